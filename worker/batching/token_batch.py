"""TokenBatch: the sequences of one forward pass, packed. Knows neither padding nor where its sequences came from."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Sequences one after another; an encoder pads or packs them as its kernel likes.

    `prompt_lengths` are leading tokens that some models leave out of the pooling; 0 for all others.
    """

    input_ids: NDArray[np.int32]  # [total tokens]
    lengths: NDArray[np.int32]  # [n]
    prompt_lengths: NDArray[np.int32]  # [n]

    @classmethod
    def from_ids(
        cls, rows: Sequence[NDArray[np.int32]], prompt_lengths: Sequence[int] | None = None
    ) -> "TokenBatch":
        lengths = np.fromiter((len(row) for row in rows), dtype=np.int32, count=len(rows))
        prompts = (
            np.zeros(len(rows), dtype=np.int32)
            if prompt_lengths is None
            else np.asarray(prompt_lengths, np.int32)
        )
        return cls(np.concatenate(rows).astype(np.int32, copy=False), lengths, prompts)

    def part(self, start: int, end: int) -> "TokenBatch":
        """The sequences from `start` up to `end`, as a batch of their own."""
        bounds = np.concatenate(([0], np.cumsum(self.lengths)))
        ids = self.input_ids[bounds[start] : bounds[end]]
        return TokenBatch(ids, self.lengths[start:end], self.prompt_lengths[start:end])

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def max_length(self) -> int:
        return int(self.lengths.max())

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_padded_tokens(self) -> int:
        """What a kernel that pads computes."""
        return self.max_length * len(self)
