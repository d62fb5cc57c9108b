"""Generative rerankers: how a pair is put into words, and which words' logits are its score. Imports no torch.

Such a model is a …ForCausalLM. Its input is a text made of an instruction, a query and a document, and its
score is the logit of one word at the last token, or the difference of two. sentence-transformers stores both
beside the model (a module LogitScore and a chat template); for models published without them, RERANKERS says
what their authors' code does.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations
from typing import Any, Final

from vectormill.domain.errors import ModelError, UnsupportedModel
from vectormill.models.model_files import ModelFiles

INSTRUCTION: Final = "instruction"
QUERY: Final = "query"
DOCUMENT: Final = "document"
_FIELDS: Final = {field: f"{{{field}}}" for field in (INSTRUCTION, QUERY, DOCUMENT)}
FIELD: Final = re.compile(rf"\{{({INSTRUCTION}|{QUERY}|{DOCUMENT})\}}")
# The module of sentence-transformers that makes a reranker of a causal language model.
LOGIT_SCORE: Final = "LogitScore"
# Options of a chat template that transformers does not pass to it, and that change what is tokenized.
_UNSUPPORTED_OPTIONS: Final = frozenset({"chat_template", "continue_final_message", "restore_suffix"})


@dataclass(frozen=True, slots=True)
class Template:
    """The text of a pair in pieces that are tokenized one by one, and the words that score it.

    A piece has the fields `{instruction}`, `{query}` and `{document}`. If a pair has too many tokens, only
    the document is cut. `plain` is used if the instruction is empty; `instruction` is the default one. White
    space around the fields in `strips` is removed. `true` and `false` are words or token
    ids: the score is the logit of `true`, minus that of `false` if there is one. Without `true` the model has
    a head of its own.
    """

    pieces: tuple[str, ...]
    plain: tuple[str, ...]
    true: str | int | None = None
    false: str | int | None = None
    instruction: str = ""
    strips: frozenset[str] = frozenset()

    @property
    def takes_instructions(self) -> bool:
        return any(_FIELDS[INSTRUCTION] in piece for piece in self.pieces)

    @property
    def words(self) -> tuple[str | int, ...]:
        """Return the words whose logits are read, the true one first."""
        return tuple(word for word in (self.true, self.false) if word is not None)


@dataclass(frozen=True, slots=True)
class Reranker:
    """A family of generative rerankers, with the page or code that defines its template.

    It is recognized by its architecture and by one of `names` in the name or directory of a model.
    """

    name: str
    model_type: str
    names: tuple[str, ...]
    template: Template
    source: str


_QWEN3: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
_GEMMA: Final = ("<bos>", "A: {query}", "\n", "B: {document}", "\n", "{instruction}")
_MXBAI: Final = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n",
    "query: {query}",
    "\n",
    "document: {document}",
    "\n",
    "You are a search relevance expert who evaluates how well documents match search queries. For each "
    "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
    "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
    "<|im_end|>\n<|im_start|>assistant\n",
)
RERANKERS: Final = (
    Reranker(
        "qwen3-reranker",
        "qwen3",
        ("Qwen3-Reranker",),
        Template(
            _QWEN3,
            _QWEN3,
            "yes",
            "no",
            "Given a web search query, retrieve relevant passages that answer the query",
        ),
        "https://huggingface.co/Qwen/Qwen3-Reranker-0.6B",
    ),
    Reranker(
        "bge-reranker-gemma",
        "gemma",
        ("bge-reranker-v2-gemma",),
        Template(
            _GEMMA,
            _GEMMA,
            "Yes",
            None,
            "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
            "providing a prediction of either 'Yes' or 'No'.",
        ),
        "FlagEmbedding 1.4.2, inference/reranker/decoder_only/base.py",
    ),
    Reranker(
        "mxbai-rerank-v2",
        "qwen2",
        ("mxbai-rerank-base-v2", "mxbai-rerank-large-v2"),
        Template((_MXBAI[0], "instruction: {instruction}\nquery: {query}", *_MXBAI[2:]), _MXBAI, "1", "0"),
        "mxbai-rerank 0.1.6, mxbai_rerank_v2.py",
    ),
)


def find_template(files: ModelFiles) -> Template | None:
    """Return how a reranker's pairs are put into words: as registered, or by its modules, or by its name.

    Raise ModelError for an unknown template.
    """
    wanted = files.entry.template
    if wanted is None:
        is_chat = len(files.modules) == 1 and "message" in files.transformer.get("modality_config", ())
        if is_chat or files.kinds[1:] == [LOGIT_SCORE]:
            return _read_chat_template(files)
        rows = (row for row in RERANKERS if row.model_type == files.model_type)
        called = files.called.lower()
        return next((row.template for row in rows if any(each.lower() in called for each in row.names)), None)
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
    score = files.read_module(1) if len(files.modules) > 1 else {}
    options = (files.transformer.get("processing_kwargs") or {}).get("chat_template") or {}
    message = (files.transformer.get("modality_config") or {}).get("message", {})
    flaw = "" if message else "its pairs are not messages of a chat template (modality_config)"
    if unsupported := options.keys() & _UNSUPPORTED_OPTIONS:
        flaw = f"its chat template has the option {min(unsupported)}"
    try:
        if flaw:
            raise ValueError(flaw)
        render = _read_chat(files, options, is_structured=message.get("format") != "flat")
        pieces, plain = (render({**_FIELDS, INSTRUCTION: system}) for system in (_FIELDS[INSTRUCTION], ""))
        strips = _find_stripped(render, {pieces: " As {told}.\n", plain: ""})
        if any(piece.count(_FIELDS[DOCUMENT]) != 1 for piece in (pieces, plain)):
            raise ValueError("its chat template does not contain the document as it is")
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        raise UnsupportedModel(f"The reranker {files.name!r} cannot be used: {error}.") from error
    words = score.get("true_token_id"), score.get("false_token_id")
    return Template((pieces,), (plain,), *words, strips=strips)


def _find_stripped(render: Callable[[Mapping[str, str]], str], pieces: Mapping[str, str]) -> frozenset[str]:
    """Return the fields that a chat template strips. Raise ValueError if it changes texts otherwise.

    `pieces` are the rendered fields themselves, each with an instruction to try.
    """
    texts = {QUERY: "\n Why {a}? \n", DOCUMENT: "  'b' <c>\n\n"}
    for stripped in chain.from_iterable(combinations(_FIELDS, count) for count in range(4)):
        tried = {piece: {**texts, INSTRUCTION: system} for piece, system in pieces.items()}
        if all(fill_in(piece, strip_texts(told, stripped)) == render(told) for piece, told in tried.items()):
            return frozenset(stripped)
    raise ValueError("its chat template changes the texts of a pair")


def fill_in(piece: str, values: Mapping[str, str]) -> str:
    """Return the piece with the fields replaced by their values, in which no field is looked for."""
    return FIELD.sub(lambda field: values[field[1]], piece)


def strip_texts(values: Mapping[str, str], fields: Collection[str]) -> dict[str, str]:
    """Return the values without white space around those of the given fields."""
    return {field: text.strip() if field in fields else text for field, text in values.items()}


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
    text = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if not isinstance(text, str):
        raise ValueError(f"it has no chat template in {files.directory}")
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    context = {key: each["content"] if isinstance(each, dict) else each for key, each in tokens.items()}
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_error
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


def _raise_error(reason: str) -> None:
    raise ValueError(f"its chat template does not take a pair: {reason}")
