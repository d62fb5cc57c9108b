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
from vectormill.models.stored import Stored
from vectormill.models.tensor_headers import read_header
from vectormill.models.weights import COLBERT_LINEAR, HEAD_FILES, SPARSE_LINEAR

STANFORD: Final = "HF_ColBERT"
MASK_MODULE: Final = "MultiVectorMask"
# The modules that begin a SPLADE model. The first was written until sentence-transformers 5.3.
SPLADE_MODULES: Final = (["MLMTransformer", "SpladePooling"], ["Transformer", "SpladePooling"])
# Defaults of the authors for what the files leave out: stanford-futuredata/ColBERT, `colbert/infra/config`.
STANFORD_MARKERS: Final = (
    ("query", "query_token_id", "[unused0]"), ("document", "doc_token_id", "[unused1]"),
)  # fmt: skip
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
        config = files.read(f"{files.modules[1].folder}/config.json")
        sums = config.take("pooling_strategy", "max") == "sum"
        num_logs = 2 if config.take("activation_function", "relu") == "log1p_relu" else 1
        files.expect(config, "pooling_strategy", "max", "sum")
        files.expect(config, "activation_function", "relu", "log1p_relu")
        size = files.config.count("vocab_size")
        return Heads((SPARSE,), SparseHead(sums=sums, num_logs=num_logs), sparse_dimensions=size)
    if has_token_modules(files):
        return _read_token_modules(files)
    if not files.modules and pooling in (None, SPLADE):
        if files.architecture == STANFORD and pooling is None:
            return _read_stanford(files)
        if files.architecture.endswith("ForMaskedLM") and (
            pooling == SPLADE or SPLADE in files.called.lower()
        ):
            if pooling is None:
                files.named.append(SPLADE)
            note = "It has no modules.json: the largest weight of a word is used, as SPLADE's authors do."
            size = files.config.count("vocab_size")
            return Heads((SPARSE,), SparseHead(), sparse_dimensions=size, notes=(note,))
    if pooling == SPLADE:
        raise UnsupportedModel(
            f"The model {files.name!r} cannot be used with the pooling {SPLADE}: it is no …ForMaskedLM."
        )
    return _read_linear_heads(files)


def has_token_modules(files: ModelFiles) -> bool:
    """Return True for the modules of PyLate, or of a MultiVectorEncoder of sentence-transformers."""
    is_pylate = any(module.type.startswith("pylate.") for module in files.modules)
    is_told = files.encoder.take("model_type", "") in ("ColBERT", "MultiVectorEncoder")
    return bool(files.modules) and (is_pylate or is_told or MASK_MODULE in files.kinds)


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
        files.config.count("vocab_size") if sparse else 0,
        read_header(colbert)["weight"].shape[0] if colbert else 0,
    )


def _read_stanford(files: ModelFiles) -> Heads:
    """Return the head of a ColBERT by Stanford's package, whose settings are in artifact.metadata."""
    told = files.read("artifact.metadata")
    prompts = {side: f"{told.take(key, '') or marker} " for side, key, marker in STANFORD_MARKERS}
    projection = files.headers.get("linear.weight")
    if files.headers and projection is None:
        raise ModelError(
            f"The weights of model {files.name!r} lack linear.weight, the projection that makes a ColBERT's vectors of "
            "its hidden states. Take the files as Stanford's package saved them."
        )
    length = told.take("query_maxlen", QUERY_TOKENS, least=1)
    head = TokenHead(
        prefix="linear.",
        skiplist=_find_tokens(files, string.punctuation if told.take("mask_punctuation", True) else ""),
        **_mark(files, prompts),
        most_query_tokens=length,
        fewest_query_tokens=length,
        filler=_find_filler(files, None),
        attends=told.take("attend_to_mask_tokens", False),
    )
    dimension = told.take("dim", 128, least=1) if projection is None else projection.shape[0]
    return _make_token_heads(files, head, dimension, prompts, told.take("doc_maxlen", 0, least=0))


def _read_token_modules(files: ModelFiles) -> Heads:
    """Return the head of a ColBERT in the layouts of PyLate and of sentence-transformers' MultiVectorEncoder."""
    encoder, transformer = files.encoder, files.transformer
    folders = files.list_dense()
    expected = ["Transformer", *["Dense"] * len(folders)]
    rest = files.kinds[len(expected) :]
    is_pylate = MASK_MODULE not in files.kinds
    if (
        files.kinds[: len(expected)] != expected
        or not folders
        or rest not in ([], [MASK_MODULE], [MASK_MODULE, "Normalize"])
    ):
        raise UnsupportedModel(
            f"The model {files.name!r} is a late-interaction model (ColBERT) made of {', '.join(files.kinds)} in "
            f"modules.json. Only Transformer, one or more Dense, {MASK_MODULE} and Normalize are supported, in this "
            "order."
        )
    dense = tuple(files.read_dense(folder, "token_embeddings") for folder in folders)
    prompts, _ = files.read_prompts()
    prefixes = {}
    for side in ("query", "document"):
        if f"{side}_prefix" in encoder.values:
            prefix = prefixes[side] = encoder.take(f"{side}_prefix", "")
            prompts[side] = prefix + prompts.get(side, "").removeprefix(prefix)
    place = "" if is_pylate else f"{files.modules[len(expected)].folder}/config.json"
    mask = files.read(place) if place else Stored({}, place, files.name)
    if mask.find("keep_only_token_ids"):
        raise UnsupportedModel(
            str(mask.refuse("keep_only_token_ids", "must be empty, as models of images are not supported"))
        )
    if rest[-1:] == ["Normalize"]:
        files.read_changing(files.modules[-1].folder, "token_embeddings")
    skiplist = encoder if is_pylate else mask
    sides = mask.texts("skiplist_tasks") or ("document",)
    if "document" not in sides or mask.values.get("skiplist_tasks") == []:
        files.flaws.append(str(mask.refuse("skiplist_tasks", "must include document")))
    told_words = skiplist.texts("skiplist_words")
    words = told_words if "skiplist_words" in skiplist.values or not is_pylate else tuple(string.punctuation)
    expansion, most = _read_expansion(encoder, transformer, is_pylate=is_pylate)
    token = expansion.take("token", "")
    head = TokenHead(
        dense=dense,
        normalizes=is_pylate or rest[-1] == "Normalize",
        skiplist=_find_tokens(files, words),
        skips_in_queries="query" in sides,
        **_mark(files, prefixes, prompts),
        most_query_tokens=most,
        fewest_query_tokens=expansion.take("length", 0, least=1),
        filler=_find_filler(files, token or None) if expansion.values else 0,
        attends=expansion.take("attend", False),
    )
    length = transformer.take("document_length", 0, least=1) or encoder.take("document_length", 0, least=1)
    if length and not length >= most > 0:
        told = transformer if "document_length" in transformer.values else encoder
        files.flaws.append(
            str(told.refuse("document_length", "must stand beside a query_length that is not greater"))
        )
    return _make_token_heads(files, head, dense[-1].num_outputs, prompts, length)


def _read_expansion(encoder: Stored, transformer: Stored, *, is_pylate: bool) -> tuple[Stored, int]:
    """Return how queries are filled up, empty if they are not, and how many tokens of a query are read.

    PyLate fills up queries unless `do_query_expansion` is false.
    """
    most = transformer.take("query_length", 0, least=1) or encoder.take("query_length", 0, least=1)
    told = transformer if "query_expansion" in transformer.values else encoder
    expands = encoder.take("do_query_expansion", True)
    attends = encoder.take("attend_to_expansion_tokens", False)
    if "query_expansion" in told.values or not is_pylate:
        expansion = told.inner("query_expansion")
    elif not expands:
        expansion = Stored({}, told.place, told.model)
    else:
        fixed = {"strategy": "fixed", "attend": attends, "length": most or QUERY_TOKENS}
        expansion = Stored(fixed, f"{told.place}, query_expansion", told.model)
    is_fixed = expansion.take("strategy", "") == "fixed"
    return expansion, expansion.take("length", 0, least=1) if is_fixed else most


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
