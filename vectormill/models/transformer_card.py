"""Read the card of a model of transformers, plain (`config.json` alone) or with the modules of sentence-transformers.

The plain layout is read for the architectures in `embedders` or with a registered pooling; its vectors have unit
length. `modules.json` and one folder per module are read as versions 2 to 6 of sentence-transformers write them.
"""

from dataclasses import replace
from typing import Any, Final

from vectormill.domain.errors import ModelError, UnsupportedModel
from vectormill.models.adapters import read_adapter
from vectormill.models.chat_templates import LOGIT_SCORE, find_template
from vectormill.models.classifiers import SUFFIX, is_structbert, read_classifier, require_template
from vectormill.models.embedders import (
    describe_modules,
    find_prompted_family,
    judge_adapters,
    require_known_code,
    tell_prompts,
)
from vectormill.models.heads import SPLADE_MODULES, Heads, has_token_modules, read_heads
from vectormill.models.model_card import REXUNINLU, Classifier, ModelCard, SpecialTokens
from vectormill.models.model_files import ModelFiles
from vectormill.models.poolings import (
    LAST_TOKEN,
    MEAN,
    Pooling,
    choose_pooling,
    parse_pooling,
    read_pooling_module,
)
from vectormill.models.special_tokens import read_special_tokens, require_final_token

# RexUniNLU: the architecture of its configuration, and the tensors of its head.
REXUNINLU_TYPE: Final = "deberta-v2"
EXTRACTOR_TENSORS: Final = frozenset({"ffnq.weight", "ffnk.weight", "rotary_emb.freqs"})
NOTE_ON_TEMPLATE: Final = (
    "Pairs are put into the words that this reranker was trained with; send the bare texts."
)


def read_transformer_card(files: ModelFiles) -> ModelCard:
    """Return the card. Raise ModelError if files are missing or the model needs something unsupported."""
    name, entry, config = files.name, files.entry, files.config
    if files.must_encode:
        require_known_code(files)
    _check_modules(files)
    template = None if entry.pooling else find_template(files)
    classifier = read_classifier(name, files.directory, config, template)
    reranker = require_template(name, classifier, entry.template)
    is_extractor = False
    if classifier is None:  # the config.json of a RexUniNLU is that of any DeBERTa; its head's tensors tell
        is_extractor = files.model_type == REXUNINLU_TYPE and files.headers.keys() >= EXTRACTOR_TENSORS
    is_embedder = classifier is None and not is_extractor
    if files.must_encode:
        _require_tokenizer(files)
    heads = read_heads(files) if is_embedder else Heads()
    notes = (*judge_adapters(files), *heads.notes)
    pooling = _find_pooling(files, heads, classifier, is_extractor=is_extractor)
    special = SpecialTokens()
    if files.must_encode and not is_extractor:
        special = read_special_tokens(name, files.directory)
        if classifier is None and LAST_TOKEN in pooling.modes:
            require_final_token(name, special)
    dense = tuple(files.list_dense()) if heads.has_dense else ()
    text_config = config.get("text_config", config)
    dimension = _find_dimension(files, text_config, len(pooling.modes), dense)
    if classifier is not None:
        dimension = len(classifier.labels)
    window = files.find_window(text_config)
    own_window = min(heads.max_tokens, window) or files.transformer.get("max_seq_length") or window
    prompts, default_prompt = files.read_prompts()
    if heads.prompts is not None:  # a ColBERT's, of which the one for documents is the default
        prompts, default_prompt = dict(heads.prompts), heads.prompts.get("document", "")
    notes += pooling.notes
    if reranker is not None:
        default_prompt = default_prompt or reranker.instruction
        notes += (NOTE_ON_TEMPLATE,)
    called = f"{files.called} {entry.adapter or ''}"
    unprompted = tell_prompts(called, files.model_type, prompts, default_prompt) if is_embedder else ""
    family = find_prompted_family(files.called, files.model_type)
    ends_in_unit_length = not files.modules or files.kinds[-1] == "Normalize"
    has_unit_length = classifier is None and heads.has_dense and ends_in_unit_length
    num_words = 0 if classifier is None else classifier.num_words
    shape = files.read_shape(text_config, dense=dense, has_head=classifier is not None and not num_words)
    shape = replace(
        shape,
        model_type="bert" if is_structbert(config) else shape.model_type,
        dense_values=shape.hidden_size * num_words
        or shape.dense_values,  # the rows of the words are the head
        is_extractor=is_extractor,
    )
    return ModelCard(
        name=name,
        path=files.directory,
        revision="+".join(filter(None, [files.revision, entry.template, entry.adapter])),
        architecture=classifier.architecture
        if classifier is not None
        else files.architecture or config.get("model_type", "unknown"),
        dimension=dimension if heads.has_dense and not is_extractor else 0,
        max_tokens=files.choose_max_tokens(window, own_window),
        pooling=pooling.modes,
        normalize=has_unit_length if entry.normalize is None else entry.normalize,
        prompts=prompts,
        default_prompt=default_prompt,
        include_prompt=pooling.includes_prompt and (family is None or family.includes_prompt),
        dense=dense,
        lowercase=bool(files.transformer.get("do_lower_case")),
        num_parameters=files.num_parameters,
        classifier=classifier,
        extractor=REXUNINLU if is_extractor else "",
        outputs=heads.outputs,
        sparse_dimensions=heads.sparse_dimensions,
        token_dimensions=heads.token_dimensions,
        sparse_head=heads.sparse,
        token_head=heads.tokens,
        model_type=files.model_type,
        adapter=read_adapter(name, files.directory, entry.adapter) if entry.adapter else None,
        special=special,
        shape=shape,
        unread=pooling.unread,
        unprompted=unprompted,
        notes=(*notes, unprompted) if unprompted else notes,
    )


def _find_pooling(
    files: ModelFiles, heads: Heads, classifier: Classifier | None, *, is_extractor: bool
) -> Pooling:
    """Return the pooling of dense vectors, or the state that a classifier's head reads."""
    if not heads.has_dense:
        return Pooling(())
    if classifier is None and not is_extractor and not files.modules:
        return choose_pooling(files, files.pooling)
    if classifier is not None:
        own = Pooling(parse_pooling(classifier.pooling))
    else:
        own = Pooling((MEAN,)) if is_extractor else read_pooling_module(files)
    return own if files.pooling is None else replace(own, modes=parse_pooling(files.pooling))


def _find_dimension(files: ModelFiles, config: dict[str, Any], num_modes: int, dense: tuple[str, ...]) -> int:
    """Return the dimension of the vectors that a model pools and its Dense modules change."""
    dimension = config.get("hidden_size") or config.get("d_model") or config.get("dim")
    if not isinstance(dimension, int):
        raise ModelError(
            f"The config.json of model {files.name!r} has no hidden_size; it is not a text encoder."
        )
    dimension *= num_modes
    for folder in dense:
        told = files.require(f"{folder}/config.json")
        inner = {told.get(key) or "sentence_embedding" for key in ("module_input_name", "module_output_name")}
        if inner != {"sentence_embedding"}:
            raise ModelError(
                f"The Dense module {folder} of model {files.name!r} works on single tokens, which is not supported."
            )
        if told["in_features"] != dimension:
            raise ModelError(
                f"The Dense module {folder} of model {files.name!r} expects {told['in_features']} values but gets "
                f"{dimension}; the pooling does not fit it."
            )
        dimension = int(told["out_features"])
    return dimension


def _require_tokenizer(files: ModelFiles) -> None:
    """Raise ModelError without a tokenizer. A vocabulary alone suffices only if it is known to be a BERT's."""
    enough = ("tokenizer.json", "vocab.txt") if is_structbert(files.config) else ("tokenizer.json",)
    if not any((files.directory / file).is_file() for file in enough):
        raise ModelError(
            f"The model {files.name!r} has no tokenizer.json in {files.directory}. Write one with "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…) of transformers."
        )


def _check_modules(files: ModelFiles) -> None:
    """Raise UnsupportedModel for modules of another kind than these; the plain layout has none.

    Those of a model that scores are its transformer alone, or a transformer and LogitScore.
    """
    kinds = files.kinds
    for module in files.modules:
        files.require_inside(module["path"])
    is_judge = kinds == ["Transformer", LOGIT_SCORE] or (
        kinds == ["Transformer"] and files.architecture.endswith(SUFFIX)
    )
    if not kinds or is_judge or kinds in SPLADE_MODULES or has_token_modules(files):
        return
    tail = kinds[2:-1] if kinds[-1] == "Normalize" else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or any(kind != "Dense" for kind in tail):
        purpose = describe_modules(files)
        raise UnsupportedModel(
            f"The model {files.name!r} is {purpose + ', ' if purpose else ''}made of {', '.join(kinds)}. Only "
            "Transformer, Pooling, any number of Dense, and Normalize are supported, in this order."
        )
