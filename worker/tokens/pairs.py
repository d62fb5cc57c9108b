"""Pairs of texts as one sequence, cut if they are too long together.

The tokenizer is asked once how it joins two texts.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from vectormill.domain.errors import ModelError
from vectormill.ragged import Ragged
from worker.tokens.tokenized import INPUT_IDS, TOKEN_TYPE_IDS

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PairFrame:
    """The special tokens before, between and after the two texts of a pair, and the types of all tokens.

    If both texts are too long and the number of tokens left for them is odd, one text keeps a token more.
    With `favors_longer` that is the longer text, or the second if they are equally long; without it always
    the first.
    """

    before: Ids
    between: Ids
    behind: Ids
    # The types of the tokens before the pair, of its first text, between the texts, of the second text, and behind it.
    types: tuple[int, int, int, int, int]
    favors_longer: bool

    @property
    def num_special(self) -> int:
        return len(self.before) + len(self.between) + len(self.behind)

    def join(
        self, first: Ragged, second: Ragged, max_tokens: int
    ) -> tuple[dict[str, Ragged], NDArray[np.bool_]]:
        """Return the sequences of n pairs, cut to `max_tokens`, and which of them were cut [n].

        `first` and `second` have the token ids of each text without special tokens.
        """
        room = max_tokens - self.num_special
        kept_first, kept_second = cut_longest_first(
            first.lengths, second.lengths, room, favors_longer=self.favors_longer
        )
        is_cut = (kept_first < first.lengths) | (kept_second < second.lengths)
        n = len(first)
        before, between, behind = (
            Ragged.from_matrix(np.broadcast_to(ids, (n, len(ids))).copy())
            for ids in (self.before, self.between, self.behind)
        )
        parts = [before, _cut(first, kept_first), between, _cut(second, kept_second), behind]
        lengths = np.stack([part.lengths for part in parts], axis=1)  # [n, 5]
        places = np.arange(5 * n).reshape(5, n).T.ravel()  # part by part, in the order of a pair
        ids = Ragged.join(parts).take(places).values
        types = np.repeat(np.tile(np.array(self.types, dtype=np.int32), n), lengths.ravel())
        totals = lengths.sum(axis=1)
        return {
            INPUT_IDS: Ragged.from_lengths(ids, totals),
            TOKEN_TYPE_IDS: Ragged.from_lengths(types, totals),
        }, is_cut


def find_frame(rust: Tokenizer, *, favors_longer: bool) -> PairFrame:
    """Return the frame of pairs, derived from a sample pair. Raise ModelError if the sample shows none."""
    sample = "a", "b"
    first, second = (rust.encode(text, add_special_tokens=False).ids for text in sample)
    whole = rust.encode(*sample)
    ids, types = whole.ids, whole.type_ids
    num_special = len(ids) - len(first) - len(second)
    for start in range(num_special + 1):
        if ids[start : start + len(first)] != first:
            continue
        for middle in range(start + len(first), len(ids) - len(second) + 1):
            if ids[middle : middle + len(second)] != second:
                continue
            end, close = start + len(first), middle + len(second)
            bounds = ((0, start), (start, end), (end, middle), (middle, close), (close, len(ids)))
            kinds = [set(types[begin:stop]) for begin, stop in bounds]
            if any(len(kind) > 1 for kind in kinds):
                break
            before, between, behind = (
                np.array(ids[begin:stop], np.int32) for begin, stop in (bounds[0], bounds[2], bounds[4])
            )
            one = [next(iter(kind), 0) for kind in kinds]
            return PairFrame(before, between, behind, (one[0], one[1], one[2], one[3], one[4]), favors_longer)
    raise ModelError(
        "The tokenizer changes the tokens of two texts when it joins them, which is not supported."
    )


def cut_longest_first(
    first: NDArray[np.int64], second: NDArray[np.int64], room: int, *, favors_longer: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many tokens remain of the texts of each pair, so that no pair has more than `room`.

    Tokens are removed from the longer text. `favors_longer`, as in PairFrame, is how the tokenizers library
    cuts (tokenizers/src/utils/truncation.rs); without it, texts are cut as by BERT's first tokenizer, which
    removes one token at a time.
    """
    smaller, larger = room // 2, room - room // 2
    first_keeps_more = first > second if favors_longer else np.ones(len(first), dtype=np.bool_)
    share = np.where(first_keeps_more, larger, smaller)
    is_over = first + second > room
    kept_first = np.where(is_over & (first > share), np.maximum(share, room - second), first)
    kept_second = np.where(is_over, np.minimum(second, room - kept_first), second)
    return kept_first, kept_second


def _cut(rows: Ragged, lengths: NDArray[np.int64]) -> Ragged:
    places = np.arange(len(rows.covered)) - np.repeat(rows.offsets[:-1] - rows.offsets[0], rows.lengths)
    return Ragged.from_lengths(rows.covered[places < np.repeat(lengths, rows.lengths)], lengths)
