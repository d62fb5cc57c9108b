"""The outputs that the sequences of a batch ask for, and the rows of bytes in which a model process returns them.

A row has, one after another and each only if it was asked for: the dense vector, float32 [card.dimension]; the
sparse weights, float32 [tokens] of a head that weighs tokens, or uint32 [k] words and float32 [k] weights of a head
that weighs words; the vectors of tokens, float16 [tokens, card.token_dimensions]; and those of passages, float32
[passages, card.dimension]. Imports no framework.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.task import DENSE, MULTI_VECTOR, OUTPUTS, SPARSE
from vectormill.models.model_card import ModelCard
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.tokens.tokenized import SPANS

# Besides the outputs of a job: the vector of each of a sequence's SPANS, whose tokens are pooled like a sequence's.
POOLED: Final = "pooled"
# The name of the bounds of the passages among their tokens.
POOLED_BOUNDS: Final = "pooled_bounds"
BITS: Final[Mapping[str, int]] = {name: 1 << place for place, name in enumerate((*OUTPUTS, POOLED))}

Bytes = NDArray[np.uint8]


def find_bits(outputs: Sequence[str]) -> int:
    """Return what asks for these outputs in a batch; 0 for a dense vector alone."""
    return 0 if tuple(outputs) == (DENSE,) else sum(BITS[name] for name in outputs)


@dataclass(frozen=True, slots=True)
class WantedOutputs:
    """The outputs that a batch of n sequences asks for. Only outputs that some sequence asks for have entries.

    `places` [tokens] are the hidden states that a head reads, as indices into those of the batch in one row, and
    `lengths` the number of them of each sequence that asks for it; of POOLED it is the number of vectors.
    """

    wants: Mapping[str, NDArray[np.bool_]]  # [n]
    places: Mapping[str, NDArray[np.int64]]
    lengths: Mapping[str, NDArray[np.int64]]

    def lay_out(self, card: ModelCard, content: Bytes) -> Ragged:
        """Return a row for each sequence from the outputs of a pass, as bytes one after another.

        These are vectors [n, dim] of all sequences if any asks for one, and what the heads gave in the order of
        OUTPUTS.
        """
        rows: list[list[Bytes]] = [[] for _ in next(iter(self.wants.values()))]
        start = 0
        for name, wants in self.wants.items():
            bounds = start + np.cumsum(self._list_sizes(name, card))
            parts = np.split(content[start : bounds[-1]], bounds[:-1] - start)
            start = int(bounds[-1])
            if name == DENSE:
                parts = [part for part, is_wanted in zip(parts, wants, strict=True) if is_wanted]
            elif name == SPARSE and not weighs_tokens(card):
                parts = [_list_words(part.view(np.float32)) for part in parts]
            for row, part in zip(np.flatnonzero(wants), parts, strict=True):
                rows[row].append(part)
        return Ragged.from_rows([np.concatenate(parts) for parts in rows], np.uint8)

    def _list_sizes(self, name: str, card: ModelCard) -> NDArray[np.int64]:
        """Return the bytes of an output of each sequence that has one in the outputs of a pass."""
        if name == DENSE:
            return np.full(len(self.wants[name]), 4 * card.dimension)
        if name == SPARSE and not weighs_tokens(card):
            return np.full(len(self.lengths[name]), 4 * card.sparse_dimensions)
        sizes = {SPARSE: 4, MULTI_VECTOR: 2 * card.token_dimensions, POOLED: 4 * card.dimension}
        return sizes[name] * self.lengths[name]


def weighs_tokens(card: ModelCard) -> bool:
    """Return True if the sparse head gives a weight to each token, and not to each word of the vocabulary."""
    return card.sparse_head is not None and bool(card.sparse_head.file)


def find_wanted(batch: Batch, card: ModelCard, shape: tuple[int, ...]) -> WantedOutputs | None:
    """Return what the batch asks for; None if all sequences ask for a dense vector alone.

    `shape` is that of the token ids in the layout of the pass: padded [n, length], or packed [tokens].
    """
    bits = batch.outputs
    if bits is None:
        return None
    bits = np.where(bits, bits, BITS[DENSE])
    lengths = batch.lengths
    starts = np.arange(len(batch)) * shape[1] if len(shape) == 2 else np.cumsum(lengths) - lengths
    wants = {name: is_wanted for name, bit in BITS.items() if (is_wanted := (bits & bit) > 0).any()}
    places: dict[str, NDArray[np.int64]] = {}
    counts: dict[str, NDArray[np.int64]] = {}
    if POOLED in wants:
        spans = batch.inputs[SPANS]
        counts[POOLED] = spans.lengths[wants[POOLED]] // 2
        firsts, ends = spans.covered.reshape(-1, 2).astype(np.int64).T
        sizes = ends - firsts
        bounds = np.concatenate(([0], np.cumsum(sizes)))
        moved = np.repeat(starts, spans.lengths // 2) + firsts - bounds[:-1]
        places |= {POOLED: np.arange(bounds[-1]) + np.repeat(moved, sizes), POOLED_BOUNDS: bounds}
    for name in wants.keys() - {DENSE, POOLED}:
        num_skipped = count_skipped(card) if name == MULTI_VECTOR else 0
        counts[name] = np.maximum(lengths[wants[name]] - num_skipped, 0)
        before = np.cumsum(counts[name]) - counts[name]
        shifts = np.repeat(starts[wants[name]] + num_skipped - before, counts[name])
        places[name] = np.arange(len(shifts)) + shifts
    return WantedOutputs(wants, places, counts)


def count_skipped(card: ModelCard) -> int:
    """Return the number of a sequence's first tokens that have no vector."""
    return int(card.token_head is not None and card.token_head.skips_first)


def _list_words(weights: NDArray[np.float32]) -> Bytes:
    """Return the words with a weight, and the weights, as bytes."""
    words = np.flatnonzero(weights)
    return np.concatenate((words.astype(np.uint32).view(np.uint8), weights[words].view(np.uint8)))


@dataclass(frozen=True, slots=True)
class RawOutputs:
    """The outputs of one sequence as the model gives them; those that were not asked for are empty.

    `words` are empty where `weights` are those of tokens.
    """

    dense: NDArray[np.float32]  # [card.dimension]
    words: NDArray[np.uint32]  # [k]
    weights: NDArray[np.float32]  # [k] or [tokens]
    vectors: NDArray[np.float16]  # [tokens, card.token_dimensions]


def read_row(row: "NDArray[Any]", bits: int, num_tokens: int, card: ModelCard) -> RawOutputs:
    """Return the outputs of a sequence of `num_tokens` that asked for `bits`, from its row.

    Raise ValueError if the row does not fit.
    """
    dense_end = 4 * card.dimension if bits & BITS[DENSE] else 0
    num_vectors, width = 0, 0
    if bits & BITS[MULTI_VECTOR]:
        num_vectors, width = max(num_tokens - count_skipped(card), 0), card.token_dimensions
    sparse_end = len(row) - 2 * num_vectors * width
    numbers = row[dense_end:sparse_end]
    has_words = bool(bits & BITS[SPARSE]) and not weighs_tokens(card)
    expected = 4 * num_tokens if bits & BITS[SPARSE] and not has_words else 0
    if sparse_end < dense_end or (len(numbers) % 8 if has_words else len(numbers) != expected):
        raise ValueError(f"a row of {len(row)} bytes does not hold the outputs of {num_tokens} tokens")
    middle = len(numbers) // 2 if has_words else 0
    return RawOutputs(
        row[:dense_end].view(np.float32),
        numbers[:middle].view(np.uint32),
        numbers[middle:].view(np.float32),
        row[sparse_end:].view(np.float16).reshape(num_vectors, width),
    )
