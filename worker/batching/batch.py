"""The inputs of one forward pass as named rows, and the requests that their sequences belong to.

This module does not pad. An input is a name with one row for each sequence. `TOKEN_INPUTS` have a value for
each token, and encoders pad or pack all of them alike; other inputs have one value for each sequence, or any number.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.ragged import Ragged
from worker.tokens.tokenized import INPUT_IDS, TOKEN_TYPE_IDS

POSITION_IDS: Final = "position_ids"
# These inputs come from worker.tasks.extract.prompts: the path of a hint, and the type below that path, that
# a token belongs to; 0 for none.
PREFIX_BLOCKS: Final = "prefix_blocks"
TYPE_SEGMENTS: Final = "type_segments"
# This comes from worker.tasks.extract.gliner: 1 for the first token of each word of a text, 2 for the token that
# stands for a label, 0 for others.
WORD_MARKS: Final = "word_marks"
# The number of leading tokens that some models leave out of the pooling. The input is absent if it is 0 for
# all.
PROMPT_LENGTH: Final = "prompt_length"
# The outputs that a sequence asks for, as bits (worker.encoder.outputs). The input is absent if all ask for a dense
# vector alone.
OUTPUTS: Final = "outputs"
# The inputs with one value for each token, under the names of transformers, and the value that pads each. Ids
# are padded with an id of the model.
TOKEN_INPUTS: Final[Mapping[str, int | None]] = {
    INPUT_IDS: None,
    TOKEN_TYPE_IDS: 0,
    POSITION_IDS: 0,
    PREFIX_BLOCKS: 0,
    TYPE_SEGMENTS: 0,
    WORD_MARKS: 0,
}


# A failed batch is tried again in at most so many parts besides its longest sequence. Where a failure ends the
# process, halves would load the model six times to find one of 64 texts; so many short batches take less time than
# one load of a large model.
MOST_PARTS: Final = 64


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one forward pass.

    `inputs["input_ids"]` (int32) is always present; its row lengths are the sequences' lengths.
    """

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
        """Return the sequences from `start` up to `end` as a separate batch."""
        parts = {name: rows.part(start, end) for name, rows in self.inputs.items()}
        return Batch(
            {name: Ragged(rows.covered, rows.offsets - rows.offsets[0]) for name, rows in parts.items()}
        )

    def take(self, rows: NDArray[np.int64]) -> "Batch":
        """Return a copy of these sequences, in this order."""
        return Batch({name: values.take(rows) for name, values in self.inputs.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the inputs alone, which is faster than what dataclasses with slots do."""
        return Batch, (self.inputs,)

    def __len__(self) -> int:
        return len(self.inputs[INPUT_IDS])

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """Return the token ids [total tokens], one sequence after another."""
        return self.inputs[INPUT_IDS].covered

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the lengths [n] of the sequences in tokens."""
        return self.inputs[INPUT_IDS].lengths

    @property
    def prompt_lengths(self) -> NDArray[np.int64] | None:
        """Return how many leading tokens [n] of each sequence are not pooled over; None if all are pooled."""
        lengths = self.inputs.get(PROMPT_LENGTH)
        return None if lengths is None else np.minimum(lengths.covered, self.lengths)

    @property
    def outputs(self) -> NDArray[np.int64] | None:
        """Return the outputs [n] of each sequence as bits; None if each gets a dense vector alone."""
        bits = self.inputs.get(OUTPUTS)
        return None if bits is None else bits.covered.astype(np.int64)

    @property
    def max_length(self) -> int:
        return int(self.lengths.max())

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_padded_tokens(self) -> int:
        """Return the number of tokens that a kernel with padding computes for this batch."""
        return self.max_length * len(self)


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Sequences of tokenized texts as columns: row i of each column is sequence i.

    Nothing here loops over sequences. Each request gets a greater number than those before it, so a smaller
    number is older. A position is the index of a sequence in its request. A length is the number of tokens
    that are computed when the sequence is alone in a batch, and a cost is the cost of that batch
    (`worker.batching.cost`).
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
        """Return the sum of the sequences' costs, each as if it were alone in a batch."""
        return float(self.costs.sum())

    def take(self, rows: NDArray[np.int64]) -> "Sequences":
        """Return a copy of these rows, in this order."""
        return Sequences(self.requests[rows], self.positions[rows], self.lengths[rows], self.costs[rows])

    def sorted_by_request(self) -> "Sequences":
        """Return the rows sorted by age of request, oldest first; rows of one request keep their order."""
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
    """A batch together with the requests and positions of its sequences."""

    sequences: Sequences
    batch: Batch
    is_urgent: bool = False
    is_suspect: bool = False  # it was being encoded, with other batches, when a runner died or fell sick
    num_failures: int = 0  # how often it failed, as a part of a larger batch too
    # How many runners were sound before this sequence and sick after it, with nothing else at work
    num_sickened: int = 0

    @property
    def is_doubtful(self) -> bool:
        """Return True if one of its sequences may be to blame for a failure."""
        return self.is_suspect or self.num_failures > 0

    @property
    def length(self) -> int:
        """Return the length in tokens to which a kernel that pads computes every sequence."""
        return self.sequences.max_length

    def parts(self) -> list["OwnedBatch"]:
        """Return the parts in which this batch is tried again after it has failed, the shortest sequences first.

        If memory was short, the first part that fails alone tells that all longer ones would. The longest sequence is
        alone, as it is the most likely to need too much memory, and so are all others if they are at most MOST_PARTS.
        """
        order = np.argsort(self.sequences.lengths, kind="stable")
        parts = [*np.array_split(order[:-1], MOST_PARTS), order[-1:]]
        return [
            replace(
                self,
                sequences=self.sequences.take(rows),
                batch=self.batch.take(rows),
                num_failures=self.num_failures + 1,
            )
            for rows in map(np.sort, parts)
            if len(rows)
        ]
