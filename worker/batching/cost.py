"""The cost of a batch, in units of one token of a short sequence.

It depends on the model's widths, not on the device. A forward pass is linear layers, the same for every
token, and attention, in which each token of a sequence of length L attends to L tokens. So a token costs 1 +
L / quadratic_length, where quadratic_length is the length at which attention takes as much arithmetic as the
linear layers. Where every new shape of a batch costs memory, sequences are padded to the length of the
*bucket* that holds them. All functions are pure.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

# The number of buckets in each doubling of the length, a power of two. Short texts, which have few different
# lengths, are not padded at all.
BUCKETS_PER_DOUBLING: Final = 16
LONGEST_EXACT: Final = 2 * BUCKETS_PER_DOUBLING
# The mean padding of longer sequences as a share of what is computed: half a step, which is 1/64 to 1/32 of
# the length.
MEAN_SHARE: Final = 0.02


@dataclass(frozen=True, slots=True)
class LengthBuckets:
    """The lengths to which sequences are padded: sixteen in each doubling, up to `longest`.

    They are 1, 2, … 32, 34, … 64, 68, … 128, 136, … tokens.

    Padding adds less than a sixteenth to a sequence, and 2 % on average from 32 tokens on. No bucket is
    longer than the model has positions for.
    """

    longest: int

    def padding_share(self, length: int) -> float:
        """Return the mean share of padding in what is computed for sequences of about this length."""
        return 0.0 if length <= LONGEST_EXACT else MEAN_SHARE

    def find(self, num_tokens: int) -> int:
        """Return the shortest bucket length that holds this many tokens, or `num_tokens` if none does."""
        step = max(1, (1 << num_tokens.bit_length()) // (2 * BUCKETS_PER_DOUBLING))
        return max(num_tokens, min(-(-num_tokens // step) * step, self.longest))


def count_tile_rows(tile_tokens: int, length: int) -> int:
    """Return how many sequences of this length are in a tile of so many tokens, at least one."""
    return max(1, tile_tokens // length)


@dataclass(frozen=True, slots=True)
class BatchCost:
    """The cost of a batch, computed from its sequences.

    A kernel that `pads` computes a rectangle: each sequence costs as much as the longest, or as its bucket. A
    kernel that packs computes no padding: each sequence costs the same as alone. `holds_squares` says that a
    sequence needs matrices of its length squared, as in attention that adds a bias for each pair of tokens;
    then padding is counted in these squares and not in tokens. Where `tile_tokens` is not 0, a batch is computed in
    tiles of sequences of one length (worker.encoder.reproducible); one that is not full costs as much as a full one.
    """

    quadratic_length: float = math.inf
    buckets: LengthBuckets | None = None
    holds_squares: bool = False
    pads: bool = True
    tile_tokens: int = 0

    def weigh(self, length: int) -> int:
        """Return the weight of a sequence of this length in the units in which padding is counted."""
        return length * length if self.holds_squares else length

    def padding_share(self, length: int) -> float:
        """Return the mean share of padding when sequences of about this length are computed alone."""
        return 0.0 if self.buckets is None else self.buckets.padding_share(length)

    def find_length(self, num_tokens: int) -> int:
        """Return the length at which a sequence of this many tokens is computed when it is alone in a batch.

        All other methods take such lengths.
        """
        return num_tokens if self.buckets is None else self.buckets.find(num_tokens)

    def of_sequence(self, length: int) -> float:
        """Return the cost of a sequence of this length when it is alone in a batch."""
        return length * (1 + length / self.quadratic_length)

    def of_sequences(self, lengths: NDArray[Any]) -> NDArray[np.float64]:
        """Return the cost of each sequence when it is alone in a batch."""
        return lengths * (1 + lengths / self.quadratic_length)

    def fill_tiles(self, length: int, num_sequences: int) -> int:
        """Return how many of these sequences of one length fill whole tiles; without tiles, all of them do."""
        return num_sequences - num_sequences % count_tile_rows(self.tile_tokens or 1, length)

    def of_batch(self, num_sequences: int, max_length: int, sum_of_sequences: float) -> float:
        """Return the cost of a batch whose sequences, each alone, would cost `sum_of_sequences` in total."""
        return num_sequences * self.of_sequence(max_length) if self.pads else sum_of_sequences


def find_quadratic_length(
    hidden_size: int,
    attention_size: int,
    key_value_size: int,
    intermediate_size: int,
    *,
    is_gated: bool,
    has_relative_scores: bool = False,
) -> float:
    """Return the length at which attention takes as much arithmetic as the linear layers.

    It is 2304 for MiniLM-L6 and 4608 for BERT. `attention_size` is the number of heads times the head size;
    `key_value_size` is the same for key and value heads (equal if queries share none). Each layer takes, for
    each token, two flop a weight: queries and output, keys and values, and the feed-forward block's two
    matrices, or three if it is gated; then 2 * attention_size * L for the scores and as much for their
    weighted sum. Source: Kaplan et al., Scaling Laws for Neural Language Models, table 1. Attention over a
    window costs less. A DeBERTa also multiplies queries and keys with 2 L relative positions, which is twice
    as much again. Without attention no length is.
    """
    if not attention_size:
        return math.inf
    num_matrices = 3 if is_gated else 2
    num_weights = hidden_size * (2 * attention_size + 2 * key_value_size + num_matrices * intermediate_size)
    return 2 * num_weights / ((12 if has_relative_scores else 4) * attention_size)
