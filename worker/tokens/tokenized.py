"""TokenizedTexts: what a model reads of many texts, as named arrays. Knows nothing of tokenizers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vectormill.jobs.item import ItemFailure
from vectormill.ragged import Ragged

INPUT_IDS: Final = "input_ids"
TOKEN_TYPE_IDS: Final = "token_type_ids"  # noqa: S105 - no password


@dataclass(frozen=True, slots=True)
class TokenizedTexts:
    """`inputs` has a row for each text, under the names that the model gives them: always `input_ids`, int32, special
    tokens included; others, such as `token_type_ids`, have one value for each of these.

    `truncated[i]` says that the text had more tokens. A text in `failures` has none.
    """

    inputs: Mapping[str, Ragged]
    truncated: NDArray[np.bool_]  # [n]
    failures: Mapping[int, ItemFailure]

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[NDArray[np.int32]],
        truncated: NDArray[np.bool_],
        failures: Mapping[int, ItemFailure],
    ) -> "TokenizedTexts":
        """Return texts with these ids and no other input."""
        return cls({INPUT_IDS: Ragged.from_rows(rows, np.int32)}, truncated, failures)

    def __len__(self) -> int:
        return len(self.truncated)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.inputs[INPUT_IDS].lengths

    def ids(self, index: int) -> NDArray[np.int32]:
        """Return a view of one text's ids."""
        return self.inputs[INPUT_IDS].row(index)

    def spread(self, places: Sequence[int], num_texts: int) -> "TokenizedTexts":
        """Return these as texts of a longer list: text i becomes text places[i] (ascending); others have no tokens."""
        if num_texts == len(self):
            return self
        truncated = np.zeros(num_texts, dtype=np.bool_)
        truncated[places] = self.truncated
        inputs = {}
        for name, rows in self.inputs.items():
            lengths = np.zeros(num_texts, dtype=np.int64)
            lengths[places] = rows.lengths
            inputs[name] = Ragged.from_lengths(rows.covered, lengths)
        return TokenizedTexts(
            inputs, truncated, {places[index]: failure for index, failure in self.failures.items()}
        )
