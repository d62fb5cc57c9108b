"""TokenizedTexts: the token ids of many texts, one after another in one array. Knows nothing of tokenizers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.jobs.item import ItemFailure


@dataclass(frozen=True, slots=True)
class TokenizedTexts:
    """Text i has the ids input_ids[offsets[i]:offsets[i + 1]], special tokens included.

    `truncated[i]` says that the text had more tokens. A text in `failures` has no ids.
    """

    input_ids: NDArray[np.int32]  # [total]
    offsets: NDArray[np.int64]  # [n + 1]
    truncated: NDArray[np.bool_]  # [n]
    failures: Mapping[int, ItemFailure]

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[NDArray[np.int32]],
        truncated: NDArray[np.bool_],
        failures: Mapping[int, ItemFailure],
    ) -> "TokenizedTexts":
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(np.concatenate([np.zeros(0, np.int32), *rows]), offsets, truncated, failures)

    def __len__(self) -> int:
        return len(self.truncated)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def ids(self, index: int) -> NDArray[np.int32]:
        """A view of one text's ids."""
        return self.input_ids[self.offsets[index] : self.offsets[index + 1]]

    def gather(self, indexes: NDArray[np.int64]) -> NDArray[np.int32]:
        """A copy of the ids of these texts, one after another; no step per text."""
        starts = self.offsets[indexes]
        lengths = self.offsets[indexes + 1] - starts
        ends = np.cumsum(lengths)
        # Where each text begins here is where it begins there: the difference, for every token of it.
        shifts = np.repeat(starts - (ends - lengths), lengths)
        return self.input_ids[shifts + np.arange(len(shifts))]

    def spread(self, places: Sequence[int], num_texts: int) -> "TokenizedTexts":
        """The same ids as texts of a longer list: text i becomes text places[i] (ascending); others have none."""
        lengths = np.zeros(num_texts, dtype=np.int64)
        lengths[places] = self.lengths
        truncated = np.zeros(num_texts, dtype=np.bool_)
        truncated[places] = self.truncated
        failures = {places[index]: failure for index, failure in self.failures.items()}
        return TokenizedTexts(self.input_ids, np.concatenate(([0], np.cumsum(lengths))), truncated, failures)
