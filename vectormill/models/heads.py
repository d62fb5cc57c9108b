"""Read from a model's files which sparse and multi-vector heads it has. Reads no weights and imports no framework.

These layouts are known: bge-m3, with a linear layer for each head beside its weights; SPLADE as
sentence-transformers writes it, or as a plain masked language model; ColBERT as Stanford, PyLate and
sentence-transformers write it. The heads themselves are in worker/model/heads.py.
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vectormill.domain.errors import ModelError, UnsupportedModel
from vectormill.domain.task import DENSE, MULTI_VECTOR, SPARSE
from vectormill.models.families import find_family
from vectormill.models.model_card import SparseHead, TokenHead
from vectormill.models.model_files import SPLADE, ModelFiles
from vectormill.models.tensor_headers import read_header
from vectormill.models.weights import COLBERT_LINEAR, HEAD_FILES, SPARSE_LINEAR

STANFORD: Final = "HF_ColBERT"
MASK_MODULE: Final = "MultiVectorMask"
# The modules that begin a SPLADE model. The first was written until sentence-transformers 5.3.
SPLADE_MODULES: Final = (["MLMTransformer", "SpladePooling"], ["Transformer", "SpladePooling"])
# Defaults of the authors for what the files leave out: stanford-futuredata/ColBERT, `colbert/infra/config`.
STANFORD_PROMPTS: Final = {"query": "[unused0] ", "document": "[unused1] "}
QUERY_TOKENS: Final = 32


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a model, and what they change in its card.

    `outputs`, the usual one first, and the sizes of the outputs are those of a ModelCard. `prompts` and
    `max_tokens`, 0 if unset, go before those of other files. `notes` are sentences for people.
    """

    outputs: tuple[str, ...] = (DENSE,)
    sparse: SparseHead | None = None
    tokens: TokenHead | None = None
    sparse_dimensions: int = 0
    token_dimensions: int = 0
    prompts: Mapping[str, str] | None = None
    max_tokens: int = 0
    notes: tuple[str, ...] = ()

    @property
    def has_dense(self) -> bool:
        return DENSE in self.outputs


def read_heads(files: ModelFiles) -> Heads:
    """Return the heads of a model; without any other output than dense for most models.

    Raise ModelError if the files contradict themselves.
    """
    pooling = files.entry.pooling
    if files.kinds[:2] in SPLADE_MODULES:
        return _read_splade_modules(files)
    if has_token_modules(files):
        return _read_token_modules(files)
    if not files.modules and pooling in (None, SPLADE):
        if files.architecture == STANFORD and pooling is None:
            return _read_stanford(files)
        if files.architecture.endswith("ForMaskedLM") and (
            pooling == SPLADE or SPLADE in files.called.lower()
        ):
            note = "It has no modules.json: the largest weight of a word is used, as SPLADE's authors do."
            return Heads((SPARSE,), SparseHead(), sparse_dimensions=_count_words(files), notes=(note,))
    if pooling == SPLADE:
        raise UnsupportedModel(
            f"The model {files.name!r} cannot be used with the pooling {SPLADE}: it is no …ForMaskedLM."
        )
    return _read_linear_heads(files)


def has_token_modules(files: ModelFiles) -> bool:
    """Return True for the modules of PyLate, or of a MultiVectorEncoder of sentence-transformers."""
    is_pylate = any(str(module["type"]).startswith("pylate.") for module in files.modules)
    is_told = files.encoder.get("model_type") in ("ColBERT", "MultiVectorEncoder")
    return bool(files.modules) and (is_pylate or is_told or MASK_MODULE in files.kinds)


def _read_splade_modules(files: ModelFiles) -> Heads:
    config = files.read(f"{files.modules[1]['path']}/config.json")
    sums = config.get("pooling_strategy", "max") == "sum"
    num_logs = 2 if config.get("activation_function") == "log1p_relu" else 1
    head = SparseHead(sums=sums, num_logs=num_logs)
    return Heads((SPARSE,), head, sparse_dimensions=_count_words(files))


def _read_linear_heads(files: ModelFiles) -> Heads:
    """Return the heads of bge-m3, as FlagEmbedding reads them."""
    there = [files.directory / name for name in HEAD_FILES if (files.directory / name).is_file()]
    sparse, colbert = (
        next((path for path in there if path.stem == stem), None) for stem in (SPARSE_LINEAR, COLBERT_LINEAR)
    )
    outputs = (DENSE, *([SPARSE] if sparse else []), *([MULTI_VECTOR] if colbert else []))
    left_out = files.find_special("cls_token", "eos_token", "pad_token", "unk_token") if sparse else ()
    return Heads(
        outputs,
        SparseHead(sparse.name, left_out) if sparse else None,
        TokenHead(file=colbert.name, skips_first=True) if colbert else None,
        _count_words(files) if sparse else 0,
        read_header(colbert)["weight"].shape[0] if colbert else 0,
    )


def _read_stanford(files: ModelFiles) -> Heads:
    """Return the head of a ColBERT by Stanford's package, whose settings are in artifact.metadata."""
    told = files.read("artifact.metadata")
    prompts = {
        side: f"{told.get(key) or default.strip()} "
        for (side, default), key in zip(
            STANFORD_PROMPTS.items(), ("query_token_id", "doc_token_id"), strict=True
        )
    }
    projection = files.headers.get("linear.weight")
    if files.headers and projection is None:
        raise ModelError(
            f"The weights of model {files.name!r} lack linear.weight, the projection that makes a ColBERT's vectors of "
            "its hidden states. Take the files as Stanford's package saved them."
        )
    length = int(told.get("query_maxlen") or QUERY_TOKENS)
    head = TokenHead(
        prefix="linear.",
        skiplist=_find_tokens(files, string.punctuation if told.get("mask_punctuation", True) else ""),
        **_mark(files, prompts),
        most_query_tokens=length,
        fewest_query_tokens=length,
        filler=_find_filler(files, None),
        attends=bool(told.get("attend_to_mask_tokens")),
    )
    dimension = int(told.get("dim") or 128) if projection is None else projection.shape[0]
    return _make_token_heads(files, head, dimension, prompts, int(told.get("doc_maxlen") or 0))


def _read_token_modules(files: ModelFiles) -> Heads:
    """Return the head of a ColBERT in the layouts of PyLate and of sentence-transformers' MultiVectorEncoder."""
    encoder, transformer = files.encoder, files.transformer
    dense = files.list_dense()
    expected = ["Transformer", *["Dense"] * len(dense)]
    rest = files.kinds[len(expected) :]
    is_pylate = MASK_MODULE not in files.kinds
    if (
        files.kinds[: len(expected)] != expected
        or not dense
        or rest not in ([], [MASK_MODULE], [MASK_MODULE, "Normalize"])
    ):
        raise UnsupportedModel(
            f"The model {files.name!r} is a late-interaction model (ColBERT) made of {', '.join(files.kinds)}. Only "
            f"Transformer, one or more Dense, {MASK_MODULE} and Normalize are supported, in this order."
        )
    prompts = {side: text for side, text in (encoder.get("prompts") or {}).items() if isinstance(text, str)}
    prefixes = {}
    for side in ("query", "document"):
        if f"{side}_prefix" in encoder:
            prefix = prefixes[side] = encoder[f"{side}_prefix"] or ""
            prompts[side] = prefix + prompts.get(side, "").removeprefix(prefix)
    mask = {} if is_pylate else files.read(f"{files.modules[len(expected)]['path']}/config.json")
    if mask.get("keep_only_token_ids"):
        raise UnsupportedModel(
            f"The model {files.name!r} keeps the vectors of certain tokens alone, such as those of images, which is "
            "not supported."
        )
    words = (
        encoder.get("skiplist_words", list(string.punctuation)) if is_pylate else mask.get("skiplist_words")
    )
    expansion, most = _read_expansion({**encoder, **transformer}, is_pylate=is_pylate)
    head = TokenHead(
        dense=tuple(dense),
        normalizes=is_pylate or rest[-1] == "Normalize",
        skiplist=_find_tokens(files, words or ()),
        skips_in_queries="query" in mask.get("skiplist_tasks", ()),
        **_mark(files, prefixes, prompts),
        most_query_tokens=most,
        fewest_query_tokens=int(expansion.get("length", 0)),
        filler=_find_filler(files, expansion.get("token")) if expansion else 0,
        attends=bool(expansion.get("attend")),
    )
    dimension = int(files.read(f"{dense[-1]}/config.json").get("out_features", 0))
    length = transformer.get("document_length") or encoder.get("document_length") or 0
    return _make_token_heads(files, head, dimension, prompts, int(length))


def _read_expansion(told: Mapping[str, Any], *, is_pylate: bool) -> tuple[Mapping[str, Any], int]:
    """Return how queries are filled up, empty if they are not, and how many tokens of a query are read.

    PyLate fills up queries unless `do_query_expansion` is false.
    """
    most = int(told.get("query_length") or 0)
    if "query_expansion" in told or not is_pylate:
        expansion = told.get("query_expansion") or {}
    elif told.get("do_query_expansion") is False:
        expansion = {}
    else:
        attends = bool(told.get("attend_to_expansion_tokens"))
        expansion = {"strategy": "fixed", "attend": attends, "length": most or QUERY_TOKENS}
    return expansion, int(expansion["length"]) if expansion.get("strategy") == "fixed" else most


def _make_token_heads(
    files: ModelFiles, head: TokenHead, dimension: int, prompts: Mapping[str, str], max_tokens: int
) -> Heads:
    tells_apart = (
        head.fewest_query_tokens or head.most_query_tokens or (head.skiplist and not head.skips_in_queries)
    )
    if tells_apart and (not head.query_prompt or prompts.get("document", "").startswith(head.query_prompt)):
        raise UnsupportedModel(
            f"The model {files.name!r} treats queries and documents differently, but its prompt named query does not "
            "tell them apart. Give it a prompt of its own in config_sentence_transformers.json."
        )
    if head.unattended is not None and find_family(files.model_type).is_causal:
        raise UnsupportedModel(
            f"The model {files.name!r} fills up queries with tokens that no token attends to, which is not supported "
            "for a model that reads from left to right."
        )
    return Heads((MULTI_VECTOR,), None, head, 0, dimension, prompts, max_tokens)


def _mark(
    files: ModelFiles, prefixes: Mapping[str, str], prompts: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the prompts that are single tokens, and the one that marks queries.

    A prefix that is no token of the tokenizer is put before a text as it is.
    """
    markers = {}
    for prefix in prefixes.values():
        token = next(
            (files.tokens[text] for text in (prefix, prefix.strip()) if text and text in files.tokens), None
        )
        if token is not None:
            markers[prefix] = token
    query = prefixes.get("query") or (prompts or prefixes).get("query", "")
    return {"markers": tuple(markers.items()), "query_prompt": query}


def _find_tokens(files: ModelFiles, words: Sequence[str]) -> tuple[int, ...]:
    """Return the ids of those words that are tokens."""
    return tuple(sorted({files.tokens[word] for word in words if word in files.tokens}))


def _find_filler(files: ModelFiles, token: str | None) -> int:
    """Return the id of the token that fills up queries: the given one, or else [MASK]."""
    found = (files.tokens.get(token),) if token else files.find_special("mask_token")
    if files.tokens and (not found or found[0] is None):
        raise UnsupportedModel(
            f"The model {files.name!r} fills up queries with {token or 'mask tokens'}, which its tokenizer lacks."
        )
    return int(found[0] or 0) if found else 0


def _count_words(files: ModelFiles) -> int:
    size = files.config.get("vocab_size")
    if not isinstance(size, int):
        raise ModelError(
            f"The config.json of model {files.name!r} has no vocab_size, which sparse weights need."
        )
    return size
