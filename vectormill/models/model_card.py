"""Read a model's own files into a ModelCard. Imports no torch, and knows neither hubs nor settings.

Four layouts are read: sentence-transformers (`modules.json` and one folder per module, as versions 2 to 6
write them), plain transformers (`config.json` alone, for the architectures in `embedders` or with a pooling
given by the user; vectors have unit length), tables of static embeddings (`static_table`), and `gliner`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vectormill.domain.errors import ModelError, UnsupportedModel
from vectormill.domain.task import DENSE
from vectormill.models.adapters import Adapter, read_adapter
from vectormill.models.classifiers import SUFFIX, Classifier, is_structbert, read_classifier
from vectormill.models.embedders import (
    describe_modules,
    describe_purpose,
    find_architecture,
    find_head,
    find_plain_embedder,
    find_prompted_family,
    judge_adapters,
    refuse_plain,
    require_known_code,
    tell_prompts,
)
from vectormill.models.families import find_family
from vectormill.models.gliner import MOST_TOKENS, is_gliner, read_gliner_config
from vectormill.models.heads import (
    SPLADE,
    SPLADE_MODULES,
    Heads,
    ModelFiles,
    SparseHead,
    TokenHead,
    has_token_modules,
    read_heads,
)
from vectormill.models.rerankers import Template, find_template, read_chat_template
from vectormill.models.special_tokens import read_special_tokens, require_final_token
from vectormill.models.static_table import (
    WEIGHTS_FILE,
    StaticTable,
    find_static_folder,
    find_static_limit,
    read_static_table,
)
from vectormill.models.weights import (
    count_parameters,
    find_tensor_names,
    find_weights,
    fingerprint_directory,
    list_weights,
)

CLS: Final = "cls"
MEAN: Final = "mean"
MAX: Final = "max"
MEAN_SQRT_LEN: Final = "mean_sqrt_len"
WEIGHTED_MEAN: Final = "weighted_mean"
LAST_TOKEN: Final = "last_token"  # noqa: S105 - the place of a vector, not a secret

# Our names, in the order in which sentence-transformers concatenates them, with every name it has used for
# them.
POOLING_NAMES: Final = {
    CLS: ("cls", "cls_token"),
    MAX: ("max", "max_tokens"),
    MEAN: ("mean", "mean_tokens"),
    MEAN_SQRT_LEN: ("mean_sqrt_len", "mean_sqrt_len_tokens"),
    WEIGHTED_MEAN: ("weighted_mean", "weightedmean", "weightedmean_tokens"),
    LAST_TOKEN: ("last_token", "lasttoken"),
}
TRANSFORMER_CONFIGS: Final = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# The authors' names of extractors.
REXUNINLU: Final = "RexUniNLU"
GLINER: Final = "GLiNER"
# RexUniNLU: the architecture of its configuration, and the tensors of its head.
REXUNINLU_TYPE: Final = "deberta-v2"
EXTRACTOR_TENSORS: Final = frozenset({"ffnq.weight", "ffnk.weight", "rotary_emb.freqs"})
# The module of sentence-transformers that makes a reranker of a causal language model.
LOGIT_SCORE: Final = "LogitScore"
NOTE_ON_TEMPLATE: Final = (
    "Pairs are put into the words that this reranker was trained with; send the bare texts."
)
# A tokenizer without a limit reports 10^30.
LARGEST_MAX_TOKENS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The facts about a model that are known before its weights are loaded.

    `pooling` holds the names from POOLING_NAMES whose vectors are concatenated. `dense` names the folders of
    the Dense modules that follow, relative to `path`. `dimension` is the length of the vectors after both.
    `default_prompt` is the prompt's text. A model with a `classifier` returns a number for each label instead
    of a vector: `dimension` is their count, and `pooling` is the state that its head reads. An `extractor`,
    REXUNINLU or GLINER, returns records and has dimension 0. `outputs` are what an embedding model can compute,
    the usual one first: `dimension` is the length of dense vectors, `sparse_dimensions` the size of the
    vocabulary that sparse weights belong to, and `token_dimensions` the length of the vectors of tokens;
    `sparse_head` and `token_head` say how these are made. A model with a `static` table has no transformer.
    `unread` names the trained head that is ignored because the user gave a pooling. `unprompted` is a warning
    about texts encoded without a prompt, if the authors want one. `notes` are sentences for people.
    """

    name: str
    path: Path
    revision: str
    architecture: str
    dimension: int
    max_tokens: int
    pooling: tuple[str, ...]
    normalize: bool
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    include_prompt: bool = True
    dense: tuple[str, ...] = ()
    lowercase: bool = False
    num_parameters: int | None = None
    classifier: Classifier | None = None
    extractor: str = ""
    outputs: tuple[str, ...] = (DENSE,)
    sparse_dimensions: int = 0
    token_dimensions: int = 0
    sparse_head: SparseHead | None = None
    token_head: TokenHead | None = None
    adapter: Adapter | None = None
    static: StaticTable | None = None
    unread: str = ""
    unprompted: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_extractor(self) -> bool:
        return bool(self.extractor)


def read_model_card(
    name: str,
    directory: Path,
    *,
    revision: str | None = None,
    pooling: str | None = None,
    normalize: bool | None = None,
    max_tokens: int | None = None,
    template: str | None = None,
    adapter: str | None = None,
    needs_weights: bool = True,
    must_encode: bool = True,
) -> ModelCard:
    """Return the card of the model in `directory`; options of its registry entry override its files.

    A model that is only planned for, and never encodes, needs no tokenizer and no pooling. Raises ModelError
    if files are missing or if the model needs something unsupported.
    """
    if find_static_folder(directory) is not None or is_gliner(directory):
        _require_template(name, None, template)
        _refuse_adapter(name, adapter)
        read = _read_gliner_card if is_gliner(directory) else _read_static_card
        return read(name, directory, revision, pooling, normalize, max_tokens, needs_weights)
    config = _read_json(directory / "config.json", name)
    if must_encode:
        require_known_code(name, config)
    modules = _read_modules(directory, name, find_architecture(config))
    weights = find_weights(directory, name) if needs_weights else []
    transformer = _read_transformer(directory, modules)
    model_type = str(config.get("model_type"))
    told = None if pooling else _find_template(name, directory, modules, transformer, model_type, template)
    classifier = read_classifier(name, directory, config, told)
    reranker = _require_template(name, classifier, template)
    if must_encode and not any((directory / file).is_file() for file in _tokenizer_files(config)):
        raise ModelError(
            f"The model {name!r} has no tokenizer.json in {directory}. Write one with "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…) of transformers."
        )
    is_extractor = classifier is None and _is_extractor(config, weights or list_weights(directory))
    is_embedder = classifier is None and not is_extractor
    kinds = [_kind(module) for module in modules]
    heads = (
        read_heads(ModelFiles(name, directory, config, modules, kinds, weights), pooling)
        if is_embedder
        else Heads()
    )
    pooling = None if pooling == SPLADE else pooling
    pooled = modules if heads.has_dense else []  # the modules that make dense vectors
    own_pooling, include_prompt = _read_pooling(directory, pooled, name)
    family = find_prompted_family(f"{name} {directory}")
    include_prompt &= family is None or family.includes_prompt
    unread = ""
    notes = (*judge_adapters(name, config, pooling, adapter, must_encode), *heads.notes)
    if classifier is not None:
        own_pooling = parse_pooling(classifier.pooling)
    elif is_extractor:
        own_pooling = (MEAN,)
    elif heads.has_dense and not modules:
        own_pooling, unread, said = _choose_pooling(name, directory, config, weights, pooling, must_encode)
        notes += said
    modes = parse_pooling(pooling) if pooling and heads.has_dense else own_pooling
    if must_encode and not is_extractor:
        special = read_special_tokens(name, directory)
        if classifier is None and LAST_TOKEN in modes:
            require_final_token(name, special)
    text_config = config.get("text_config", config)
    hidden_size = text_config.get("hidden_size") or text_config.get("d_model") or text_config.get("dim")
    if not isinstance(hidden_size, int):
        raise ModelError(f"The config.json of model {name!r} has no hidden_size; it is not a text encoder.")
    dense = tuple(module["path"] for module in pooled if _kind(module) == "Dense")
    dimension = hidden_size * len(modes)
    for folder in dense:
        dimension = _read_dense(directory / folder, dimension, name)
    dimension = dimension if classifier is None else len(classifier.labels)
    longest = _longest_input(directory, text_config)
    _check_max_tokens(name, max_tokens, longest)
    prompts, default_prompt = _read_prompts(directory, heads)
    if reranker is not None:
        default_prompt = default_prompt or reranker.instruction
        notes += (NOTE_ON_TEMPLATE,)
    unprompted = (
        tell_prompts(f"{name} {directory} {adapter or ''}", prompts, default_prompt) if is_embedder else ""
    )
    architectures = config.get("architectures") or [config.get("model_type", "unknown")]
    return ModelCard(
        name=name,
        path=directory,
        revision="+".join(
            [revision or fingerprint_directory(directory, weights), *filter(None, [template, adapter])]
        ),
        architecture=classifier.architecture if classifier is not None else architectures[0],
        dimension=0 if is_extractor or not heads.has_dense else dimension,
        max_tokens=max_tokens
        or min(
            min(heads.max_tokens, longest) or transformer.get("max_seq_length") or longest, LARGEST_MAX_TOKENS
        ),
        pooling=modes,
        normalize=normalize
        if normalize is not None
        else classifier is None and heads.has_dense and (not modules or kinds[-1] == "Normalize"),
        prompts=prompts,
        default_prompt=default_prompt,
        include_prompt=include_prompt,
        dense=dense,
        lowercase=bool(transformer.get("do_lower_case")),
        num_parameters=count_parameters(weights) if weights else None,
        classifier=classifier,
        extractor=REXUNINLU if is_extractor else "",
        outputs=heads.outputs,
        sparse_dimensions=heads.sparse_dimensions,
        token_dimensions=heads.token_dimensions,
        sparse_head=heads.sparse,
        token_head=heads.tokens,
        adapter=read_adapter(name, directory, adapter) if adapter else None,
        unread=unread,
        unprompted=unprompted,
        notes=(*notes, unprompted) if unprompted else notes,
    )


def _find_template(
    name: str,
    directory: Path,
    modules: list[dict[str, Any]],
    transformer: dict[str, Any],
    model_type: str,
    wanted: str | None,
) -> Template | None:
    """Return how a reranker's pairs are put into words: by `wanted`, its modules, or its name, in this order."""
    is_scored = [_kind(module) for module in modules[1:]] == [LOGIT_SCORE]
    is_chat = len(modules) == 1 and "message" in transformer.get("modality_config", ())
    if wanted is not None or not (is_scored or is_chat):
        return find_template(name, f"{name} {directory}", model_type, wanted)
    score = _read_json(directory / modules[1]["path"] / "config.json", name) if is_scored else {}
    return read_chat_template(name, directory, transformer, score)


def _require_template(name: str, classifier: Classifier | None, wanted: str | None) -> Template | None:
    """Return the template of a reranker. Raise ModelError if one is wanted for another kind of model."""
    template = None if classifier is None else classifier.template
    if wanted is not None and template is None:
        raise ModelError(
            f"The model {name!r} is no reranker to which a template applies: it has neither an architecture "
            "…ForCausalLM nor a head with one label, or a pooling is set for it. Remove template from its entry in "
            "VECTORMILL_MODELS."
        )
    return template


def _refuse_adapter(name: str, adapter: str | None) -> None:
    if adapter is not None:
        raise ModelError(
            f"The model {name!r} is of a kind into which no adapter can be merged; remove {adapter!r}."
        )


def _check_max_tokens(name: str, max_tokens: int | None, longest: int) -> None:
    if max_tokens is not None and max_tokens > longest:
        raise ModelError(
            f"max_tokens {max_tokens} exceeds the {longest} tokens that the model {name!r} can read."
        )


def _read_static_card(
    name: str,
    directory: Path,
    revision: str | None,
    pooling: str | None,
    normalize: bool | None,
    max_tokens: int | None,
    needs_weights: bool,
) -> ModelCard:
    """Return the card of a table of static embeddings, which is always read: no other file has the dimension.

    Its limit of tokens is a default, not a property.
    """
    folder = find_static_folder(directory) or ""
    if pooling is not None and parse_pooling(pooling) != (MEAN,):
        raise ModelError(f"The model {name!r} has static embeddings, whose mean is the vector of a text.")
    kinds = [_kind(module) for module in _list_modules(directory)]
    if kinds[1:] not in ([], ["Normalize"]):
        raise UnsupportedModel(
            f"The model {name!r} is made of {', '.join(kinds)}. Only Normalize may follow {kinds[0]}."
        )
    _require_inside(directory, folder, name)
    table, dimension = read_static_table(name, directory, folder)
    if not (directory / folder / "tokenizer.json").is_file():
        raise ModelError(f"The model {name!r} has no tokenizer.json in {directory / folder}.")
    config = _read_json(directory / "config.json", name) if table.is_model2vec else {}
    prompts, default_prompt = _read_prompts(directory, Heads())
    unprompted = tell_prompts(f"{name} {directory}", prompts, default_prompt)
    limit = max_tokens or find_static_limit(directory, table, config) or LARGEST_MAX_TOKENS
    own = bool(config.get("normalize")) if table.is_model2vec else kinds[-1] == "Normalize"
    weights = [directory / folder / WEIGHTS_FILE]
    return ModelCard(
        name=name,
        path=directory,
        revision=revision or fingerprint_directory(directory, weights),
        architecture="StaticModel" if table.is_model2vec else "StaticEmbedding",
        dimension=dimension,
        max_tokens=min(limit, LARGEST_MAX_TOKENS),
        pooling=(MEAN,),
        normalize=own if normalize is None else normalize,
        prompts=prompts,
        default_prompt=default_prompt,
        num_parameters=count_parameters(weights),
        static=table,
        unread="a classifier's head" if "head_config" in config else "",
        unprompted=unprompted,
        notes=(unprompted,) if unprompted else (),
    )


def _read_gliner_card(
    name: str,
    directory: Path,
    revision: str | None,
    pooling: str | None,
    normalize: bool | None,
    max_tokens: int | None,
    needs_weights: bool,
) -> ModelCard:
    if pooling is not None or normalize is not None:
        raise ModelError(f"The model {name!r} is a {GLINER}, to which neither pooling nor normalize applies.")
    config = read_gliner_config(name, directory)
    weights = find_weights(directory, name) if needs_weights else []
    has_limit = {} if config.has_positions else {"max_position_embeddings": MOST_TOKENS}
    longest = min(_longest_input(directory, {**config.encoder, **has_limit}), MOST_TOKENS)
    _check_max_tokens(name, max_tokens, longest)
    return ModelCard(
        name=name,
        path=directory,
        revision=revision or fingerprint_directory(directory, weights),
        architecture=GLINER,
        dimension=0,
        max_tokens=max_tokens or longest,
        pooling=(MEAN,),
        normalize=False,
        num_parameters=count_parameters(weights) if weights else None,
        extractor=GLINER,
    )


def parse_pooling(text: str | Sequence[str]) -> tuple[str, ...]:
    """Return our names for the pooling modes of "mean", "cls+mean" or a list of names."""
    by_alias = {alias: mode for mode, aliases in POOLING_NAMES.items() for alias in aliases}
    names = text.split("+") if isinstance(text, str) else text
    for name in names:
        if name not in by_alias:
            raise ModelError(
                f"Unknown pooling {name!r}; expected one of {', '.join(POOLING_NAMES)}, or several joined by '+'."
            )
    return tuple(by_alias[name] for name in names)


def _tokenizer_files(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the files of which any one suffices to make the tokenizer.

    A vocabulary alone suffices only if it is known to be a BERT's.
    """
    return ("tokenizer.json", "vocab.txt") if is_structbert(config) else ("tokenizer.json",)


def _kind(module: dict[str, Any]) -> str:
    """Return the kind of a module: the last part of its import path, whose rest differs between versions."""
    return str(module["type"]).rsplit(".", 1)[-1]


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"The model {name!r} has no {path.name} in {path.parent}; is this a model directory?"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"The file {path} of model {name!r} cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise ModelError(f"The file {path} of model {name!r} must contain a JSON object.")
    return values


def _list_modules(directory: Path) -> list[dict[str, Any]]:
    path = directory / "modules.json"
    if not path.is_file():
        return []
    modules = sorted(json.loads(path.read_text(encoding="utf-8")), key=lambda entry: entry["idx"])
    return [module for module in modules if _kind(module) != "Dropout"]  # has no effect outside training


def _read_modules(directory: Path, name: str, architecture: str) -> list[dict[str, Any]]:
    """Return the entries of modules.json in order; empty for the plain transformers layout.

    Those of a model that scores are its transformer alone, or a transformer and LogitScore.
    """
    modules = _list_modules(directory)
    if not modules:
        return []
    kinds = [_kind(module) for module in modules]
    purpose = describe_modules(kinds, [str(module["type"]) for module in modules])
    tail = kinds[2:-1] if kinds[-1] == "Normalize" else kinds[2:]
    for module in modules:
        _require_inside(directory, module["path"], name)
    is_judge = kinds == ["Transformer", LOGIT_SCORE] or (
        kinds == ["Transformer"] and architecture.endswith(SUFFIX)
    )
    files = ModelFiles(name, directory, {}, modules, kinds, ())
    if is_judge or kinds in SPLADE_MODULES or has_token_modules(files):
        return modules
    if kinds[:2] != ["Transformer", "Pooling"] or any(kind != "Dense" for kind in tail):
        raise UnsupportedModel(
            f"The model {name!r} is {purpose + ', ' if purpose else ''}made of {', '.join(kinds)}. Only "
            "Transformer, Pooling, any number of Dense, and Normalize are supported, in this order."
        )
    return modules


def _require_inside(directory: Path, folder: str, name: str) -> None:
    """Raise ModelError if a module is outside the model's directory, by its path or by symbolic links.

    A snapshot in the hub's cache consists of links into the blobs two folders above it, which are allowed.
    """
    home = directory.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    place = (home / folder).resolve()
    files = [path.resolve() for path in place.glob("*")] if folder and place.is_relative_to(home) else []
    outside = [path for path in files if not (path.is_relative_to(home) or path.is_relative_to(blobs))]
    if not place.is_relative_to(home) or outside:
        raise ModelError(
            f"modules.json of model {name!r} refers to a path outside the model directory: {folder!r} resolves to "
            f"{outside[0] if outside else place}. Copy the missing files into {directory}."
        )


def _read_pooling(directory: Path, modules: list[dict[str, Any]], name: str) -> tuple[tuple[str, ...], bool]:
    if [_kind(module) for module in modules[1:2]] != ["Pooling"]:
        return (), True
    config = _read_json(directory / modules[1]["path"] / "config.json", name)
    include_prompt = bool(config.get("include_prompt", True))
    if "pooling_mode" in config:
        return parse_pooling(config["pooling_mode"]), include_prompt
    modes = tuple(
        mode
        for mode, aliases in POOLING_NAMES.items()
        if any(config.get(f"pooling_mode_{alias}") is True for alias in aliases)
    )
    return modes or (MEAN,), include_prompt


def _choose_pooling(
    name: str,
    directory: Path,
    config: dict[str, Any],
    weights: Sequence[Path],
    wanted: str | None,
    must_encode: bool,
) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Return a model's pooling if it has no modules.json, the head that is ignored, and notes on both.

    Raises ModelError if neither a convention nor the user says how it pools, unless it is only planned for.
    """
    head = find_head(find_tensor_names(weights))
    plain = find_plain_embedder(find_architecture(config), head)
    if plain is not None:
        pooling = wanted or plain.pooling
        whose = "as set in VECTORMILL_MODELS" if wanted else f"by convention, because it is {plain.source}"
        return parse_pooling(pooling), "", (f"It has no modules.json: {pooling} pooling is used {whose}.",)
    if wanted is None and must_encode:
        raise UnsupportedModel(refuse_plain(name, str(directory), config, head))
    if wanted is None:
        return (MEAN,), "", (f"No worker will load it: {refuse_plain(name, str(directory), config, head)}",)
    purpose, reader = describe_purpose(f"{name} {directory}", config)
    left_out = f"; {head.purpose} is ignored" if head is not None else ""
    note = f"It is {purpose}, used with {wanted} pooling as set in VECTORMILL_MODELS{left_out}."
    if head is not None and head.judges:
        return parse_pooling(wanted), head.purpose, (note,)
    return parse_pooling(wanted), purpose if reader else "", (note,)


def _read_dense(folder: Path, input_dimension: int, name: str) -> int:
    config = _read_json(folder / "config.json", name)
    inner = {config.get(key) or "sentence_embedding" for key in ("module_input_name", "module_output_name")}
    if inner != {"sentence_embedding"}:
        raise ModelError(
            f"The Dense module {folder.name} of model {name!r} works on single tokens, which is not supported."
        )
    if config["in_features"] != input_dimension:
        raise ModelError(
            f"The Dense module {folder.name} of model {name!r} expects {config['in_features']} values but "
            f"gets {input_dimension}; the pooling does not fit it."
        )
    return int(config["out_features"])


def _read_transformer(directory: Path, modules: list[dict[str, Any]]) -> dict[str, Any]:
    if not modules:
        return {}
    folder = directory / modules[0]["path"]
    for file_name in TRANSFORMER_CONFIGS:
        if (folder / file_name).is_file():
            return _read_json(folder / file_name, directory.name)
    return {}


def _read_prompts(directory: Path, heads: Heads) -> tuple[dict[str, str], str]:
    """Return the prompts by name, and the one used by default: of a ColBERT the one for documents."""
    if heads.prompts is not None:
        return dict(heads.prompts), heads.prompts.get("document", "")
    path = directory / "config_sentence_transformers.json"
    if not path.is_file():
        return {}, ""
    config = _read_json(path, directory.name)
    prompts = {key: text for key, text in (config.get("prompts") or {}).items() if isinstance(text, str)}
    return prompts, prompts.get(config.get("default_prompt_name") or "", "")


def _longest_input(directory: Path, config: dict[str, Any]) -> int:
    """Return the number of positions of the model, or less if its tokenizer has a lower limit."""
    positions = config.get("max_position_embeddings") or -1
    limit = positions if positions > 0 else LARGEST_MAX_TOKENS
    if find_family(str(config.get("model_type"))).has_offset:
        limit -= int(config.get("pad_token_id") or 0) + 1
    tokenizer_config = directory / "tokenizer_config.json"
    if tokenizer_config.is_file():
        said = _read_json(tokenizer_config, directory.name).get("model_max_length")
        if isinstance(said, (int, float)) and said > 0:
            limit = min(limit, int(min(said, LARGEST_MAX_TOKENS)))
    return limit


def _is_extractor(config: dict[str, Any], weights: Sequence[Path]) -> bool:
    """Return True for a RexUniNLU.

    Its config.json is that of any DeBERTa, but its head's tensors have their own names.
    """
    return config.get("model_type") == REXUNINLU_TYPE and find_tensor_names(weights) >= EXTRACTOR_TENSORS
