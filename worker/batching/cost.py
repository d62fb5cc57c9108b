"""The cost of a batch, in tokens of short sequences. Knows nothing of devices, and of a model only its widths. Pure.

A forward pass is linear layers, the same for every token, and attention, in which a token of a sequence of length L
looks at L tokens. So a token costs 1 + L / quadratic_length, where quadratic_length is the length at which attention
takes as much arithmetic as the linear layers. Where every new shape of a batch costs memory, sequences are computed as
long as the *bucket* that holds them.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

# In each doubling of the length, a power of two: short texts, whose number of lengths is small, are not padded at all.
BUCKETS_PER_DOUBLING: Final = 16
LONGEST_EXACT: Final = 2 * BUCKETS_PER_DOUBLING
# The mean padding of longer ones, as a share of what is computed: half a step, 1/64 to 1/32 of the length.
MEAN_SHARE: Final = 0.02


@dataclass(frozen=True, slots=True)
class LengthBuckets:
    """The lengths to which sequences are padded: sixteen in each doubling, and `longest`, which ends them.

    They are 1, 2, … 32, 34, … 64, 68, … 128, 136, … tokens.

    A sequence grows by less than a sixteenth, on the mean by 2 % from 32 tokens on. No bucket is longer than what the
    model has positions for.
    """

    longest: int

    def padding_share(self, length: int) -> float:
        """Return the mean share of padding in what is computed for sequences of about this length."""
        return 0.0 if length <= LONGEST_EXACT else MEAN_SHARE

    def find(self, num_tokens: int) -> int:
        """Return the shortest bucket that holds so many tokens, or that number if there is none."""
        step = max(1, (1 << num_tokens.bit_length()) // (2 * BUCKETS_PER_DOUBLING))
        return max(num_tokens, min(-(-num_tokens // step) * step, self.longest))


@dataclass(frozen=True, slots=True)
class BatchCost:
    """The cost of a batch, made of its sequences.

    A kernel that `pads` computes a rectangle: each sequence costs as much as the longest, or its bucket. One that
    packs computes no padding: each costs what it costs alone. `holds_squares` says that a sequence takes matrices of
    its length squared, as those whose attention adds a bias for each two tokens: of these padding is counted, and not
    of tokens.
    """

    quadratic_length: float = math.inf
    buckets: LengthBuckets | None = None
    holds_squares: bool = False
    pads: bool = True

    def weigh(self, length: int) -> int:
        """Return the units in which padding is counted, for a sequence that is computed this long."""
        return length * length if self.holds_squares else length

    def padding_share(self, length: int) -> float:
        """Return the mean share of padding when sequences of about this length are computed alone."""
        return 0.0 if self.buckets is None else self.buckets.padding_share(length)

    def find_length(self, num_tokens: int) -> int:
        """Return how long a sequence of so many tokens is computed when alone. All other lengths here are such."""
        return num_tokens if self.buckets is None else self.buckets.find(num_tokens)

    def of_sequence(self, length: int) -> float:
        """Return the cost of this sequence alone."""
        return length * (1 + length / self.quadratic_length)

    def of_sequences(self, lengths: NDArray[Any]) -> NDArray[np.float64]:
        """Return the cost of each of them alone."""
        return lengths * (1 + lengths / self.quadratic_length)

    def of_batch(self, num_sequences: int, max_length: int, sum_of_sequences: float) -> float:
        """Return the cost of a batch whose sequences cost `sum_of_sequences` when each is alone."""
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
    """Return the length at which attention takes as much arithmetic as the linear layers: 2304 for MiniLM-L6, 4608 for
    BERT.

    `attention_size` is heads times head size, `key_value_size` the same of the heads that queries share (equal where
    they share none). Per layer and token, two flop a weight: queries and output, keys and values, and the feed-forward
    block's two matrices, or three when it is gated; then 2 * attention_size * L for the scores and as much for their
    sum. Source: Kaplan et al., Scaling Laws for Neural Language Models, table 1. Attention over a window costs less. A
    DeBERTa multiplies queries and keys with 2 L relative positions besides, which is twice as much again.
    """
    num_matrices = 3 if is_gated else 2
    num_weights = hidden_size * (2 * attention_size + 2 * key_value_size + num_matrices * intermediate_size)
    return 2 * num_weights / ((12 if has_relative_scores else 4) * attention_size)
