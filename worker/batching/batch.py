"""Batch: what goes into one forward pass, as named rows, and whose sequences these are. Knows no padding.

An input is a row a sequence under a name. `TOKEN_INPUTS` have a value for each token, and encoders pad or pack all of
them alike; others have one value a sequence.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.ragged import Ragged
from worker.tokens.tokenized import INPUT_IDS, TOKEN_TYPE_IDS

POSITION_IDS: Final = "position_ids"
# Of worker.tasks.extract.prompts: which path of a hint, and which type below it, a token is part of; 0 for none.
PREFIX_BLOCKS: Final = "prefix_blocks"
TYPE_SEGMENTS: Final = "type_segments"
# How many leading tokens some models leave out of the pooling. Left out itself where it is 0 for all.
PROMPT_LENGTH: Final = "prompt_length"
# The inputs with a value a token, as transformers name them, and what stands where there is no token. The id that ids
# are padded with is the model's own.
TOKEN_INPUTS: Final[Mapping[str, int | None]] = {
    INPUT_IDS: None,
    TOKEN_TYPE_IDS: 0,
    POSITION_IDS: 0,
    PREFIX_BLOCKS: 0,
    TYPE_SEGMENTS: 0,
}


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one forward pass. `inputs["input_ids"]`, int32, is always there; its lengths are theirs."""

    inputs: Mapping[str, Ragged]

    @classmethod
    def from_ids(
        cls, rows: Sequence[NDArray[np.int32]], prompt_lengths: Sequence[int] | None = None
    ) -> "Batch":
        inputs = {INPUT_IDS: Ragged.from_rows(rows, np.int32)}
        if prompt_lengths is not None and any(prompt_lengths):
            inputs[PROMPT_LENGTH] = Ragged.from_scalars(np.asarray(prompt_lengths, np.int32))
        return cls(inputs)

    def part(self, start: int, end: int) -> "Batch":
        """Return the sequences from `start` up to `end` as a batch of their own."""
        parts = {name: rows.part(start, end) for name, rows in self.inputs.items()}
        return Batch(
            {name: Ragged(rows.covered, rows.offsets - rows.offsets[0]) for name, rows in parts.items()}
        )

    def take(self, rows: NDArray[np.int64]) -> "Batch":
        """Return a copy of these sequences, in this order."""
        return Batch({name: values.take(rows) for name, values in self.inputs.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as Ragged does."""
        return Batch, (self.inputs,)

    def __len__(self) -> int:
        return len(self.inputs[INPUT_IDS])

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """Return the ids [total tokens], one sequence after another."""
        return self.inputs[INPUT_IDS].covered

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the lengths [n] in tokens."""
        return self.inputs[INPUT_IDS].lengths

    @property
    def prompt_lengths(self) -> NDArray[np.int64] | None:
        """Return how many leading tokens [n] are not pooled over; None when all tokens are."""
        lengths = self.inputs.get(PROMPT_LENGTH)
        return None if lengths is None else lengths.covered.astype(np.int64)

    @property
    def max_length(self) -> int:
        return int(self.lengths.max())

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_padded_tokens(self) -> int:
        """Return the number of tokens that a kernel with padding computes."""
        return self.max_length * len(self)


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Tokenized texts as columns: row i of each is sequence i. No step here is taken a sequence.

    A request's number grows with every request admitted, so that a smaller one is older; a position is the place of the
    sequence in its request. A length is in tokens, as long as the sequence is computed when it is alone, and its cost
    is that of a batch of it alone (`worker.batching.cost`).
    """

    requests: NDArray[np.int64]  # [n]
    positions: NDArray[np.int32]  # [n]
    lengths: NDArray[np.int32]  # [n]
    costs: NDArray[np.float64]  # [n]

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def max_length(self) -> int:
        return int(self.lengths.max(initial=0))

    @property
    def cost_alone(self) -> float:
        """Return the sum of the costs of the sequences, each alone."""
        return float(self.costs.sum())

    def take(self, rows: NDArray[np.int64]) -> "Sequences":
        """Return a copy of these rows, in this order."""
        return Sequences(self.requests[rows], self.positions[rows], self.lengths[rows], self.costs[rows])

    def part(self, start: int, end: int) -> "Sequences":
        """Return the rows from `start` up to `end`; a view."""
        rows = slice(start, end)
        return Sequences(self.requests[rows], self.positions[rows], self.lengths[rows], self.costs[rows])

    def sorted_by_request(self) -> "Sequences":
        """Return the rows with the oldest request first; rows of one request keep their order."""
        if (self.requests[1:] >= self.requests[:-1]).all():
            return self
        return self.take(np.argsort(self.requests, kind="stable"))

    def by_request(self) -> Iterator[tuple[int, slice]]:
        """Yield the number of each request and the slice of its rows."""
        bounds = [0, *(np.flatnonzero(np.diff(self.requests)) + 1).tolist(), len(self)]
        for start, end in pairwise(bounds if len(self) else []):
            yield int(self.requests[start]), slice(start, end)


@dataclass(frozen=True, slots=True)
class OwnedBatch:
    """A batch, and whose sequences it is made of."""

    sequences: Sequences
    batch: Batch
    is_urgent: bool = False
    is_suspect: bool = False  # it was being encoded, and others beside it, when a runner died or fell sick
    num_failures: int = 0  # of a single sequence, in runners that were sound
    num_sickened: int = 0  # runners that were sound before it and, with nothing else at work, sick behind it

    @property
    def is_tried_alone(self) -> bool:
        return self.is_suspect or self.num_failures > 0

    @property
    def length(self) -> int:
        """Return the length in tokens to which a kernel that pads computes all sequences."""
        return self.sequences.max_length

    def halves(self) -> tuple["OwnedBatch", "OwnedBatch"]:
        middle = len(self.sequences) // 2
        return (
            OwnedBatch(self.sequences.part(0, middle), self.batch.part(0, middle), self.is_urgent),
            OwnedBatch(
                self.sequences.part(middle, len(self.sequences)),
                self.batch.part(middle, len(self.sequences)),
                self.is_urgent,
            ),
        )
