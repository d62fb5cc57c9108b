"""TokenizedTexts are the model's inputs for many texts, as named arrays. Texts may also arrive as token ids.

Such ids are used as they are; special tokens and the prompt are put around them, and special tokens that are
there already are not repeated. This module knows only the bounds of a tokenizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.task import LARGEST_ID, read_token_ids
from vectormill.jobs.item import ENCODING_FAILED, ItemFailure
from vectormill.ragged import Ragged

INPUT_IDS: Final = "input_ids"
TOKEN_TYPE_IDS: Final = "token_type_ids"  # noqa: S105 - no password
# The passages whose vectors a sequence asks for, each by its first token and that behind it. Absent if none does.
SPANS: Final = "spans"

Ids = NDArray[np.int32]


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


@dataclass(frozen=True, slots=True)
class Affixes:
    """The tokens around a text's own: special tokens and the prompt before, special tokens after."""

    prefix: Ids
    prompt: Ids
    suffix: Ids
    num_known: int  # token ids of the model are 0 to num_known - 1

    def put_around(self, ids: Ids) -> Ids:
        num_prefix, num_suffix = len(self.prefix), len(self.suffix)
        has_prefix = num_prefix and np.array_equal(ids[:num_prefix], self.prefix)
        has_suffix = num_suffix and np.array_equal(ids[len(ids) - num_suffix :], self.suffix)
        if has_prefix and has_suffix and len(ids) >= num_prefix + num_suffix:
            ids = ids[num_prefix : len(ids) - num_suffix]
        return np.concatenate([self.prefix, self.prompt, ids, self.suffix])

    def read(self, text: bytes) -> "Ids | ItemFailure":
        """Return what the model reads of a text that is given as token ids, or the reason why it cannot."""
        try:
            ids = read_token_ids(text)
        except ValueError:
            return ItemFailure(ENCODING_FAILED, "the text is neither Unicode nor a list of token ids")
        largest = min(self.num_known - 1, LARGEST_ID)
        for place, number in enumerate(ids):
            if not 0 <= number <= largest:
                return ItemFailure(
                    ENCODING_FAILED,
                    f"token {place} has the id {number}, but the model's ids are 0 to {largest}; ids of another "
                    "vocabulary, such as tiktoken's, mean different words here: send the text itself",
                )
        return self.put_around(np.array(ids, dtype=np.int32))


def lay_together(texts: TokenizedTexts, given: TokenizedTexts) -> TokenizedTexts:
    """Return one list from two of equal length. In each place, at most one has tokens or a failure."""
    num_texts = len(texts)
    inputs = {}
    for name, rows in texts.inputs.items():
        others = given.inputs[name]
        places = np.arange(num_texts) + np.where(others.lengths > 0, num_texts, 0)
        inputs[name] = Ragged.join([rows, others]).take(places)
    return TokenizedTexts(inputs, texts.truncated | given.truncated, {**texts.failures, **given.failures})
