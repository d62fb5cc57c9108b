"""Read how a reranker's pairs are put into words. Only here a model's Jinja is evaluated, once for its card.

The texts are given as fields, which are found in what is rendered, so that no pair needs Jinja.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain, combinations
from typing import Any, Final

from vectormill.domain.errors import ModelError, UnsupportedModel
from vectormill.models.model_files import ModelFiles
from vectormill.models.rerankers import (
    DOCUMENT,
    FIELDS,
    INSTRUCTION,
    QUERY,
    RERANKERS,
    Template,
    fill_in,
    strip_texts,
)
from vectormill.models.stored import Stored

# The module of sentence-transformers that makes a reranker of a causal language model.
LOGIT_SCORE: Final = "LogitScore"
# Options of a chat template that transformers does not pass to it, and that change what is tokenized.
_UNSUPPORTED_OPTIONS: Final = frozenset({"chat_template", "continue_final_message", "restore_suffix"})


def find_template(files: ModelFiles) -> Template | None:
    """Return how a reranker's pairs are put into words: as registered, or by its modules, or by its name.

    Raise ModelError for an unknown template.
    """
    wanted = files.entry.template
    if wanted is None:
        is_chat = len(files.modules) == 1 and "message" in files.transformer.take("modality_config", {})
        if is_chat or files.kinds[1:] == [LOGIT_SCORE]:
            return _read_chat_template(files)
        called = files.called.lower()
        for row in RERANKERS:
            if row.model_type == files.model_type and any(each.lower() in called for each in row.names):
                files.named.append(row.name)
                return row.template
        return None
    for row in RERANKERS:
        if row.name == wanted:
            return row.template
    known = ", ".join(row.name for row in RERANKERS)
    raise ModelError(f"The template {wanted!r} of model {files.name!r} is unknown; expected one of {known}.")


def _read_chat_template(files: ModelFiles) -> Template:
    """Return the template of a reranker in the layout of sentence-transformers.

    Without a module LogitScore it has a head of its own. Raise UnsupportedModel if no chat template puts a pair
    into words.
    """
    has_score = len(files.modules) > 1
    score = (
        files.require(f"{files.modules[1].folder}/config.json") if has_score else Stored({}, "", files.name)
    )
    options = files.transformer.inner("processing_kwargs").take("chat_template", {})
    message = files.transformer.inner("modality_config").inner("message")
    flaw = "" if message.values else "its pairs are not messages of a chat template (modality_config)"
    if unsupported := options.keys() & _UNSUPPORTED_OPTIONS:
        flaw = f"its chat template has the option {min(unsupported)}"
    try:
        if flaw:
            raise ValueError(flaw)
        render = _read_chat(files, options, is_structured=message.take("format", "auto") != "flat")
        pieces, plain = (render({**FIELDS, INSTRUCTION: system}) for system in (FIELDS[INSTRUCTION], ""))
        strips = _find_stripped(render, {pieces: " As {told}.\n", plain: ""})
        if any(piece.count(FIELDS[DOCUMENT]) != 1 for piece in (pieces, plain)):
            raise ValueError("its chat template does not contain the document as it is")
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        raise UnsupportedModel(f"The reranker {files.name!r} cannot be used: {error}.") from error
    files.expect(score, "module_input_name", "causal_logits")
    words = [score.take(key, -1, least=0) for key in ("true_token_id", "false_token_id")]
    true, false = (None if word < 0 else word for word in words)
    return Template((pieces,), (plain,), true, false, strips=strips)


def _find_stripped(render: Callable[[Mapping[str, str]], str], pieces: Mapping[str, str]) -> frozenset[str]:
    """Return the fields that a chat template strips. Raise ValueError if it changes texts otherwise.

    `pieces` are the rendered fields themselves, each with an instruction to try.
    """
    texts = {QUERY: "\n Why {a}? \n", DOCUMENT: "  'b' <c>\n\n"}
    for stripped in chain.from_iterable(combinations(FIELDS, count) for count in range(4)):
        tried = {piece: {**texts, INSTRUCTION: system} for piece, system in pieces.items()}
        if all(fill_in(piece, strip_texts(told, stripped)) == render(told) for piece, told in tried.items()):
            return frozenset(stripped)
    raise ValueError("its chat template changes the texts of a pair")


def _read_chat(
    files: ModelFiles, options: Mapping[str, Any], *, is_structured: bool
) -> Callable[[Mapping[str, str]], str]:
    """Return the function that renders a pair's texts as transformers does.

    A template is Jinja in a sandbox: it computes text, and reads and changes nothing outside. Two functions
    of Jinja through which sandboxes were left are taken away.
    """
    # Imported here, because few models have a chat template that is read.
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    config = files.read("tokenizer_config.json")
    path = files.directory / "chat_template.jinja"
    text = path.read_text(encoding="utf-8") if path.is_file() else config.find("chat_template")
    if not isinstance(text, str):
        raise ValueError(f"it has no chat template in {files.directory}")
    context = {key: config.token(key) for key in config.values if key.endswith("_token")}
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)

    def raise_exception(reason: str) -> None:
        raise ValueError(f"its chat template does not take a pair: {reason}")

    environment.globals["raise_exception"] = raise_exception
    for function in ("dict", "namespace"):
        del environment.globals[function]
    template = environment.from_string(text)

    def render(texts: Mapping[str, str]) -> str:
        messages = [
            {
                "role": role,
                "content": [{"type": "text", "text": texts[field]}] if is_structured else texts[field],
            }
            for role, field in (("system", INSTRUCTION), (QUERY, QUERY), (DOCUMENT, DOCUMENT))
            if texts[field]
        ]
        return template.render(messages=messages, **{"add_generation_prompt": False, **context, **options})

    return render
