"""Read the card of a model of transformers, plain (`config.json` alone) or with the modules of sentence-transformers.

The plain layout is read for the architectures in `poolings` or with a registered pooling; its vectors have unit
length. `modules.json` and one folder per module are read as versions 2 to 6 of sentence-transformers write them.

An adapter is a folder in the layout of peft with the two small matrices for each layer that LoRA adds to a
weight (https://arxiv.org/abs/2106.09685). jinaai/jina-embeddings-v3-hf has one for each task.

`tokenizer.json` has a template for the special tokens before and after a text. Some transformers classes add further
tokens according to `add_bos_token` and `add_eos_token` in tokenizer_config.json, and some models have a tokenizer with
custom code, which is never run.
"""

import math
from dataclasses import replace
from typing import Any, Final

from vectormill.domain.errors import ModelError, UnsupportedModel
from vectormill.models.chat_templates import LOGIT_SCORE, find_template
from vectormill.models.classifiers import SUFFIX, is_structbert, read_classifier, require_template
from vectormill.models.heads import SPLADE_MODULES, Heads, has_token_modules, read_heads
from vectormill.models.model_card import REXUNINLU, Adapter, Classifier, DenseLayer, ModelCard, SpecialTokens
from vectormill.models.model_files import ModelFiles
from vectormill.models.model_shape import ModelShape
from vectormill.models.poolings import (
    LAST_TOKEN,
    LATE_INTERACTION,
    MEAN,
    MODULE_PURPOSES,
    Pooling,
    choose_pooling,
    find_prompted_family,
    judge_adapters,
    judge_code,
    parse_pooling,
    read_pooling_module,
    tell_prompts,
)
from vectormill.models.stored import Stored, naming
from vectormill.models.weights import ADAPTER_CONFIG

# RexUniNLU: the architecture of its configuration, and the tensors of its head.
REXUNINLU_TYPE: Final = "deberta-v2"
EXTRACTOR_TENSORS: Final = frozenset({"ffnq.weight", "ffnk.weight", "rotary_emb.freqs"})
NOTE_ON_TEMPLATE: Final = (
    "Pairs are put into the words that this reranker was trained with; send the bare texts."
)

# For each task, the output that the module Transformer takes of its model for a text, and the name of the feature
# in which it stores that (TRANSFORMER_TASK_DEFAULTS of sentence-transformers 6.2.0).
TASK_OUTPUTS: Final = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "fill-mask": ("logits", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
    "text-generation": ("logits", "causal_logits"),
}
# Arguments for loading a transformer that no result depends on.
LOADING: Final = frozenset(
    {"add_pooling_layer", "attn_implementation", "device_map", "dtype", "torch_dtype", "trust_remote_code", "use_cache"}
)  # fmt: skip
# The table of the numbers that tell a pair's texts apart, and the class of transformers 5 that gives none by default.
TYPE_TABLE: Final = "token_type_embeddings.weight"
WITHOUT_TYPES: Final = "TokenizersBackend"
# Settings of peft that change more than a product of two matrices; each is unset in a plain adapter.
_UNSUPPORTED: Final = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
# The classes that rewrite the template according to the two settings (transformers 4, `update_post_processor`
# in models/{llama,code_llama,gemma,cohere,gpt_neox}/tokenization_*_fast.py). Models were trained with the
# result. transformers 5 ignores both settings if there is a tokenizer.json.
APPENDS_FINAL_TOKEN: Final = frozenset(
    f"{name}Tokenizer{ending}"
    for name in ("CodeLlama", "Cohere", "Gemma", "GPTNeoX", "Llama")
    for ending in ("", "Fast")
)
# Tokenizers with custom code that do only the same: gte-Qwen2, as vLLM treats it
# (https://github.com/vllm-project/vllm, `_maybe_fix_gte_tokenizer`).
FINAL_TOKEN_CODE: Final = frozenset(
    {"tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"}
)


def read_transformer_card(files: ModelFiles) -> ModelCard:
    """Return the card. Raise ModelError if files are missing or the model needs something unsupported."""
    _check_modules(files)
    name, entry, config = files.name, files.entry, files.config
    notes = judge_code(files)
    template = None if entry.pooling else find_template(files)
    classifier = read_classifier(files, template)
    reranker = require_template(name, classifier, entry.template)
    is_extractor = False
    if classifier is None:  # the config.json of a RexUniNLU is that of any DeBERTa; its head's tensors tell
        is_extractor = files.model_type == REXUNINLU_TYPE and files.headers.keys() >= EXTRACTOR_TENSORS
    _refuse_quantized(files, config)
    is_embedder = classifier is None and not is_extractor
    if files.must_encode:
        _require_tokenizer(files)
    heads = read_heads(files) if is_embedder else Heads()
    notes += (*judge_adapters(files), *heads.notes)
    pooling = _find_pooling(files, heads, classifier, is_extractor=is_extractor)
    special = SpecialTokens()
    if files.must_encode and not is_extractor:
        special = read_special_tokens(files)
        if classifier is None and LAST_TOKEN in pooling.modes:
            require_final_token(name, special)
    text_config = config.inner("text_config") if config.values.get("text_config") else config
    num_words = 0 if classifier is None else classifier.num_words
    shape = files.read_shape(text_config, has_head=classifier is not None and not num_words)
    if not shape.hidden_size:
        raise ModelError(f"The config.json of model {name!r} has no hidden_size; it is not a text encoder.")
    width = shape.hidden_size * len(pooling.modes)
    dense = _read_dense(files, width) if heads.has_dense else ()
    dimension = dense[-1].num_outputs if dense else width
    if classifier is not None:
        dimension = len(classifier.labels)
    window, usual = files.find_window(text_config)
    told = _read_transformer(files, classifier, heads)
    own_window = heads.max_tokens or told or usual
    if own_window > window:
        notes += (f"It reads {window} tokens: its files claim {own_window}, and its weights hold no more.",)
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
    if family is not None and not family.includes_prompt:
        files.named.append(family.name)
    ends_in_unit_length = not files.modules or files.kinds[-1] == "Normalize"
    if ends_in_unit_length and files.modules and heads.has_dense:
        files.read_changing(files.modules[-1].folder, "sentence_embedding")
    has_unit_length = classifier is None and heads.has_dense and ends_in_unit_length
    normalize = has_unit_length if entry.normalize is None else entry.normalize
    similarity, remark = files.read_similarity(has_unit_length=normalize)
    notes += remark if is_embedder and heads.has_dense else ()
    side = files.read("tokenizer_config.json").take("truncation_side", "right")
    truncates_left = side == "left" and classifier is None and heads.tokens is None
    own_values = sum(layer.num_values for layer in dense)
    own_values += shape.hidden_size * num_words  # the rows of the words are the head
    shape = _add_heads(replace(shape, dense_values=own_values or shape.dense_values), heads)
    shape = replace(
        shape,
        model_type="bert" if is_structbert(config) else shape.model_type,
        is_extractor=is_extractor,
    )
    return ModelCard(
        name=name,
        path=files.directory,
        revision="+".join(filter(None, [files.revision, entry.template, entry.adapter])),
        architecture=classifier.architecture
        if classifier is not None
        else files.architecture or files.model_type or "unknown",
        dimension=dimension if heads.has_dense and not is_extractor else 0,
        max_tokens=files.choose_max_tokens(window, own_window),
        pooling=pooling.modes,
        normalize=normalize,
        similarity=similarity,
        prompts=prompts,
        default_prompt=default_prompt,
        include_prompt=pooling.includes_prompt and (family is None or family.includes_prompt),
        dense=dense,
        lowercase=files.transformer.take("do_lower_case", False),
        truncates_left=truncates_left,
        rereads=('tokenizer_config.json: truncation_side "left".',) if truncates_left else (),
        num_parameters=files.num_parameters,
        classifier=classifier,
        extractor=REXUNINLU if is_extractor else "",
        outputs=heads.outputs,
        sparse_dimensions=heads.sparse_dimensions,
        token_dimensions=heads.token_dimensions,
        sparse_head=heads.sparse,
        token_head=heads.tokens,
        model_type=files.model_type,
        adapter=read_adapter(files, entry.adapter) if entry.adapter else None,
        special=special,
        shape=shape,
        unread=pooling.unread,
        unprompted=unprompted,
        notes=notes,
    )


def _read_transformer(files: ModelFiles, classifier: Classifier | None, heads: Heads) -> int:
    """Return the most tokens by the module Transformer of sentence-transformers, 0 if it does not say.

    What it says and no worker does is added to the flaws of the files.
    """
    told = files.transformer
    task = (
        "fill-mask" if files.kinds[:2] in SPLADE_MODULES
        else "feature-extraction" if classifier is None
        else "text-generation" if classifier.num_words
        else "sequence-classification"
    )  # fmt: skip
    output, name = TASK_OUTPUTS[task]
    processing, modality = told.inner("processing_kwargs"), told.inner("modality_config")
    text, tokenizer = processing.inner("text"), files.read("tokenizer_config.json")
    files.expect(told, "transformer_task", task)
    files.expect(told, "module_output_name", name)
    files.expect(modality.inner("text"), "method", "forward")
    files.expect(modality.inner("text"), "method_output_name", output, [output])
    files.expect(text, "truncation", True, "longest_first")
    files.expect(text, "padding", True, "longest", "max_length")
    longest = [text.take("max_length", 0, least=1), told.take("max_seq_length", 0, least=1)]
    if classifier is None or classifier.template is None:
        files.expect(modality, "message")
        files.expect(processing, "chat_template")
    cuts_left = classifier is None and heads.tokens is None
    files.expect(tokenizer, "truncation_side", "right", *(["left"] if cuts_left else []))
    tables = [header.shape[0] for name, header in files.headers.items() if name.endswith(TYPE_TABLE)]
    reads_types = max(tables, default=0 if files.headers else files.config.take("type_vocab_size", 0)) > 1
    if reads_types and classifier is not None and classifier.template is None:
        names = tokenizer.texts("model_input_names")
        key = "model_input_names" if names else "tokenizer_class"
        if "token_type_ids" not in names and (names or tokenizer.take(key, "") == WITHOUT_TYPES):
            flaw = tokenizer.refuse(key, "gives no token_type_ids, by which the texts of a pair differ")
            files.flaws.append(str(flaw))
    for key in () if heads.tokens else ("query_length", "document_length", "query_expansion"):
        files.expect(told, key)
    for arguments in ("model", "config", "tokenizer", "processor"):
        for given in (told.inner(f"{arguments}_args"), told.inner(f"{arguments}_kwargs")):
            for key in given.values.keys() - LOADING:
                files.expect(given, key)
    for key in text.list_rest({}):
        files.expect(text, key)
    for key in processing.list_rest(dict.fromkeys(("audio", "image", "video"), "")):
        files.expect(processing, key)
    return longest[0] or longest[1]


def _find_pooling(
    files: ModelFiles, heads: Heads, classifier: Classifier | None, *, is_extractor: bool
) -> Pooling:
    """Return the pooling of dense vectors, or the state that a classifier's head reads."""
    if not heads.has_dense:
        return Pooling(())
    if classifier is not None:
        own = Pooling(parse_pooling(classifier.pooling))
    elif is_extractor:
        own = Pooling((MEAN,))
    elif files.modules:
        own = read_pooling_module(files)
    else:
        return choose_pooling(files)
    return own if files.pooling is None else replace(own, modes=parse_pooling(files.pooling))


def _read_dense(files: ModelFiles, width: int) -> tuple[DenseLayer, ...]:
    """Return the Dense modules, which change pooled vectors of this width. Raise ModelError if one does not fit."""
    layers = tuple(files.read_dense(folder, "sentence_embedding") for folder in files.list_dense())
    for layer in layers:
        if layer.num_inputs != width:
            raise ModelError(
                f"The Dense module {layer.folder} of model {files.name!r} expects {layer.num_inputs} values but gets "
                f"{width}; the pooling does not fit it."
            )
        width = layer.num_outputs
    return layers


def _add_heads(shape: ModelShape, heads: Heads) -> ModelShape:
    """Return the shape with the values of sparse and multi-vector heads."""
    layers = () if heads.tokens is None else heads.tokens.dense
    token_values = sum(each.num_values for each in layers) or heads.token_dimensions * (shape.hidden_size + 1)
    is_linear = heads.sparse is not None and bool(heads.sparse.file)
    return replace(
        shape,
        dense_values=shape.dense_values + is_linear * (shape.hidden_size + 1),
        head_values=token_values,
        weighs_words=heads.sparse is not None and not is_linear,
    )


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
        files.require_inside(module.folder)
    is_judge = kinds == ["Transformer", LOGIT_SCORE] or (
        kinds == ["Transformer"] and files.architecture.endswith(SUFFIX)
    )
    if not kinds or is_judge or kinds in SPLADE_MODULES or has_token_modules(files):
        return
    tail = kinds[2:-1] if kinds[-1] == "Normalize" else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or any(kind != "Dense" for kind in tail):
        told = [MODULE_PURPOSES[kind] for kind in kinds if kind in MODULE_PURPOSES]
        purpose = LATE_INTERACTION if kinds == ["Transformer", "Dense"] else "".join(told[:1])
        raise UnsupportedModel(
            f"The model {files.name!r} is {purpose + ', ' if purpose else ''}made of {', '.join(kinds)} in "
            "modules.json. Only Transformer, Pooling, any number of Dense, and Normalize are supported, in this order."
        )


def _refuse_quantized(files: ModelFiles, config: Stored) -> None:
    """Raise ModelError for weights of 8 bits or fewer, whose numbers mean nothing without their scales."""
    how = config.inner("quantization_config") if config.values.get("quantization_config") else None
    method = "" if how is None else how.take("quant_method", "unknown")
    is_scaled = any(header.dtype.startswith("F8") for header in files.headers.values())
    if method or is_scaled:
        raise ModelError(
            f"The weights of model {files.name!r} are quantized ({method or 'fp8'}), which Vectormill does not read. "
            "Use the checkpoint in 16 or 32 bits, from which precision int8 makes weights of 8 bits."
        )


def read_adapter(files: ModelFiles, wanted: str) -> Adapter:
    """Return the adapter in a folder. Raise UnsupportedModel if there is none or if it is more than LoRA."""
    name = files.name
    known = sorted(path.parent.name for path in files.directory.glob(f"*/{ADAPTER_CONFIG}"))
    if wanted not in known:
        raise UnsupportedModel(
            f"The model {name!r} has no adapter {wanted!r}; "
            f"{'it has ' + ', '.join(known) if known else 'no folder in its directory is one'}."
        )
    config = files.read(f"{wanted}/{ADAPTER_CONFIG}")
    flaws = [key for key in _UNSUPPORTED if config.find(key)]
    if config.take("peft_type", "") != "LORA" or config.take("bias", "none") != "none" or flaws:
        raise UnsupportedModel(
            f"The adapter {wanted!r} of model {name!r} is not a plain LoRA"
            f"{' (' + ', '.join(flaws) + ')' if flaws else ''}, which is the only kind that is merged."
        )
    rank = config.count("r")
    alpha = float(config.take("lora_alpha", 0.0))
    return Adapter(wanted, alpha / (math.sqrt(rank) if config.take("use_rslora", False) else rank))


def read_special_tokens(files: ModelFiles) -> SpecialTokens:
    """Return the special tokens before and after each text.

    Raise UnsupportedModel if the files do not tell.
    """
    name, config = files.name, files.read("tokenizer_config.json")
    # The classes that auto_map names, without the repository before `--`.
    told = config.find("auto_map") or []
    classes = told.get("AutoTokenizer") or [] if isinstance(told, dict) else told
    code = [
        str(each).rpartition("--")[2] for each in ([classes] if isinstance(classes, str) else classes) if each
    ]
    foreign = [each for each in code if each not in FINAL_TOKEN_CODE]
    if foreign:
        raise UnsupportedModel(
            f"The tokenizer of model {name!r} has custom code ({foreign[0]}), which is never run, so the tokens that "
            "it adds are unknown. Write a tokenizer.json that gives the same tokens, the special ones by its "
            "post_processor, and remove auto_map from tokenizer_config.json."
        )
    with naming("tokenizer.json", name):
        prefix, suffix = _read_template(files.read("tokenizer.json").take("post_processor", {}))
    wanted = [key for key in ("add_bos_token", "add_eos_token") if config.take(key, False)]
    bos, eos = config.token("bos_token"), config.token("eos_token")
    lacking = [bos] if "add_bos_token" in wanted and bos and bos not in prefix else []
    lacking += [eos] if "add_eos_token" in wanted and eos and eos not in suffix else []
    if not lacking:
        return SpecialTokens(prefix, suffix, has_code=bool(code))
    if not code and config.take("tokenizer_class", "") not in APPENDS_FINAL_TOKEN:
        raise UnsupportedModel(
            f"The files of model {name!r} contradict each other: tokenizer_config.json requires {', '.join(lacking)} "
            f"({', '.join(wanted)}), but the post_processor of tokenizer.json does not add it. Add it there or remove "
            "the setting, whichever matches the training of the model."
        )
    new_prefix = (bos,) if "add_bos_token" in wanted else prefix
    new_suffix = (eos,) if "add_eos_token" in wanted else suffix
    flags = (("add_bos_token", bool(new_prefix)), ("add_eos_token", bool(new_suffix)))
    return SpecialTokens(new_prefix, new_suffix, is_rewritten=True, flags=flags, has_code=bool(code))


def require_final_token(name: str, tokens: SpecialTokens) -> None:
    """Raise UnsupportedModel if no token follows a text: its last word would then represent all of it."""
    if not tokens.suffix:
        raise UnsupportedModel(
            f"The model {name!r} pools the last token, but its tokenizer does not append an end-of-sequence token: "
            "the text's last word would represent all of it. Make tokenizer.json append the token it was trained with, "
            "or set add_eos_token in tokenizer_config.json."
        )


def _read_template(processor: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the special tokens before and after a single text in a post_processor of tokenizer.json."""
    kind = (processor or {}).get("type")
    if kind == "Sequence":
        found = [_read_template(each) for each in processor.get("processors", [])]
        return next((each for each in found if each != ((), ())), ((), ()))
    if kind in ("BertProcessing", "RobertaProcessing"):
        return (str(processor["cls"][0]),), (str(processor["sep"][0]),)
    if kind != "TemplateProcessing":
        return (), ()
    parts = [next(iter(part.items())) for part in processor.get("single", [])]
    place = next((number for number, (what, _) in enumerate(parts) if what == "Sequence"), len(parts))
    names = [str(part["id"]) for _, part in parts]
    return tuple(names[:place]), tuple(names[place + 1 :])
