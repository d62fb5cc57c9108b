"""Buckets: the few lengths to which sequences are padded where every new shape of a batch costs memory. Pure."""

from dataclasses import dataclass
from typing import Final

# In each doubling of the length, a power of two: short texts, whose number of lengths is small, are not padded at all.
BUCKETS_PER_DOUBLING: Final = 16
LONGEST_EXACT: Final = 2 * BUCKETS_PER_DOUBLING
# What longer ones are padded on the mean, of what is computed: half a step, 1/64 to 1/32 of the length.
MEAN_SHARE: Final = 0.02


@dataclass(frozen=True, slots=True)
class LengthBuckets:
    """Sixteen in each doubling: 1, 2, … 32, 34, … 64, 68, … 128, 136, … tokens, and `longest`, which ends them.

    A sequence grows by less than a sixteenth, on the mean by 2 % from 32 tokens on. No bucket is longer than what the
    model has positions for.
    """

    longest: int

    def padding_share(self, length: int) -> float:
        """What is padding on the mean of what is computed of sequences of about that length."""
        return 0.0 if length <= LONGEST_EXACT else MEAN_SHARE

    def find(self, num_tokens: int) -> int:
        """The shortest that holds so many tokens; those themselves when there is none."""
        step = max(1, (1 << num_tokens.bit_length()) // (2 * BUCKETS_PER_DOUBLING))
        return max(num_tokens, min(-(-num_tokens // step) * step, self.longest))
