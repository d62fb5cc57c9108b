"""TokenizedTexts are the model's inputs for many texts, as named arrays. This module knows no tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vectormill.jobs.item import TOO_MANY_TOKENS, ItemFailure
from vectormill.ragged import Ragged

INPUT_IDS: Final = "input_ids"
TOKEN_TYPE_IDS: Final = "token_type_ids"  # noqa: S105 - no password
# The passages whose vectors a sequence asks for, each by its first token and that behind it. Absent if none does.
SPANS: Final = "spans"


@dataclass(frozen=True, slots=True)
class TokenizedTexts:
    """The model's inputs for n texts, as one row for each text under each input's name.

    `inputs` always has `input_ids` (int32, special tokens included); others, such as `token_type_ids`, have
    one value for each of these. `truncated[i]` says that text i had more tokens. A text in `failures` has
    none.
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
        """Return texts with these token ids and no other input."""
        return cls({INPUT_IDS: Ragged.from_rows(rows, np.int32)}, truncated, failures)

    def __len__(self) -> int:
        return len(self.truncated)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.inputs[INPUT_IDS].lengths

    def ids(self, index: int) -> NDArray[np.int32]:
        """Return a view of the token ids of one text."""
        return self.inputs[INPUT_IDS].row(index)

    def spread(self, places: Sequence[int], num_texts: int) -> "TokenizedTexts":
        """Return these texts as part of a longer list: text i becomes text places[i].

        `places` is ascending; all other texts have no tokens.
        """
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


def merge_lists(texts: TokenizedTexts, given: TokenizedTexts) -> TokenizedTexts:
    """Merge two equally long lists; at each index at most one of them has tokens or a failure."""
    num_texts = len(texts)
    inputs = {}
    for name, rows in texts.inputs.items():
        others = given.inputs[name]
        places = np.arange(num_texts) + np.where(others.lengths > 0, num_texts, 0)
        inputs[name] = Ragged.join([rows, others]).take(places)
    return TokenizedTexts(inputs, texts.truncated | given.truncated, {**texts.failures, **given.failures})


def report_length(length: int, max_tokens: int) -> ItemFailure:
    """Return the failure of a text that has too many tokens and may not be cut."""
    return ItemFailure(
        TOO_MANY_TOKENS, f"the text has {length} tokens; {max_tokens} are allowed with long_texts=fail"
    )


def drop_rows(inputs: Mapping[str, Ragged], is_dropped: NDArray[np.bool_]) -> dict[str, Ragged]:
    """Return the inputs with the dropped rows empty."""
    kept = np.flatnonzero(~is_dropped)
    return {
        name: Ragged.from_lengths(rows.take(kept).values, np.where(is_dropped, 0, rows.lengths))
        for name, rows in inputs.items()
    }
