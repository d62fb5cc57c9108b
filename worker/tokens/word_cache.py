"""WordCache composes the tokens of texts from those of their words, each tokenized only once.

Most words of a text occurred in an earlier text, and a word's tokens depend on nothing but the word if the
tokenizer allows a `Splitting`. So a text costs one look-up for each word, and no step of Python for each
token: a third of the library's time if all words are known, two thirds if a ninth of them is new
(docs/LOG.md). No tokenizer is implemented here: the tokens of a word are always those of the library. Texts
that may not be split, or that are mostly new words, are tokenized whole by the library.
"""

import threading
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.ragged import Ragged
from worker.tokens.reference import Reference, group_texts
from worker.tokens.splitting import Splitting

# The largest number of words, about 20 MiB. Beyond it, all words are forgotten: learning them again takes the
# library half a second.
MAX_WORDS: Final = 1 << 17
MAX_CHARS: Final = 1 << 21
# Longer words are not learned, because they hardly occur twice.
MAX_WORD_CHARS: Final = 100
# With fewer characters than this, the library takes less time than a group of texts takes here, however
# short.
FEW_CHARS: Final = 512
# If new words, each counted once, make up more than this share of a text, the library tokenizes the text
# whole.
LARGEST_NEW_SHARE: Final = 1 / 2
# The first rows of every table are not words: the special tokens before and after a text.
PREFIX, SUFFIX = 0, 1
UNKNOWN: Final = -1
FIRST_CAPACITY: Final = 1 << 12


class WordTally:
    """Counts of words that were looked up and found. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        self.num_words, self.num_known = 0, 0

    def add(self, num_words: int, num_known: int) -> None:
        with self._lock:
            self.num_words += num_words
            self.num_known += num_known


class WordTable:
    """Words and their token ids, for looking up many words at once.

    The table only grows, so the number of a word never changes. Readers take no lock, because a word's number
    is published after its ids are stored. The first numbers are those of `rows`, which are not words.
    """

    def __init__(self, rows: Ragged) -> None:
        self._numbers: dict[str, int] = {}
        self._values: NDArray[np.int32] = np.zeros(FIRST_CAPACITY, dtype=np.int32)
        self._offsets: NDArray[np.int64] = np.zeros(FIRST_CAPACITY, dtype=np.int64)
        self._num_rows = 0
        self.num_chars = 0  # sum over all words
        self._lock = threading.Lock()
        self._append(rows)

    def __len__(self) -> int:
        return self._num_rows

    def find(self, words: Sequence[str]) -> NDArray[np.int64]:
        """Return the number of each word [words], UNKNOWN for new ones.

        No Python step is taken for each word.
        """
        found = map(self._numbers.get, words, repeat(UNKNOWN))
        return np.fromiter(found, dtype=np.int64, count=len(words))

    def add(self, words: Iterable[str], ids: Ragged) -> None:
        """Add words, with row i of `ids` for word i. Words that are known already are skipped."""
        with self._lock:
            new = [(word, row) for row, word in enumerate(words) if word not in self._numbers]
            rows = ids.take(np.array([row for _, row in new], dtype=np.int64))
            first = self._append(rows)
            self.num_chars += sum(len(word) for word, _ in new)
            self._numbers.update(zip((word for word, _ in new), range(first, self._num_rows), strict=True))

    def take(self, numbers: NDArray[np.int64]) -> Ragged:
        """Return the token ids of the words with these numbers, one row for each word."""
        # Read the offsets first: the values that they refer to are in any array that is read afterwards.
        offsets = self._offsets
        return Ragged(self._values, offsets).take(numbers)

    def _append(self, rows: Ragged) -> int:
        """Append rows. Return the number of the first one."""
        start, end = self._num_rows, self._num_rows + len(rows)
        num_values = int(self._offsets[start])
        self._offsets = _grown(self._offsets, end + 1)
        self._values = _grown(self._values, num_values + len(rows.values))
        self._values[num_values : num_values + len(rows.values)] = rows.values
        self._offsets[start : end + 1] = num_values + rows.offsets
        self._num_rows = end
        return start


class WordCache:
    """Tokenizes texts word by word. Thread-safe.

    `encode` returns the same token ids as `Reference.encode` for every text.
    """

    def __init__(self, reference: Reference, splitting: Splitting, tally: WordTally | None = None) -> None:
        self._reference = reference
        self._splitting = splitting
        self._tally = tally or WordTally()
        self._table = self._make_table()

    def encode(self, texts: Sequence[str]) -> Ragged:
        if sum(map(len, texts)) < FEW_CHARS:
            return self._reference.encode(texts)
        return Ragged.join([self._encode_group(group) for group in group_texts(texts)])

    def _encode_group(self, texts: list[str]) -> Ragged:
        table, splitting = self._table, self._splitting
        words_of = splitting.split_all(texts)
        counts = np.fromiter(map(len, words_of), dtype=np.int64, count=len(texts))
        words = list(chain.from_iterable(words_of))
        numbers = table.find(words)
        is_whole = counts == 0
        num_unknown = int(np.count_nonzero(numbers == UNKNOWN))
        self._tally.add(len(words), len(words) - num_unknown)
        if num_unknown:
            owners = np.repeat(np.arange(len(texts)), counts)
            self._learn(table, texts, words, numbers, owners)
            is_whole[owners[numbers == UNKNOWN]] = True
        if not is_whole.any():
            return _compose(table, numbers, counts)
        whole, by_words = np.flatnonzero(is_whole), np.flatnonzero(~is_whole)
        encoded = self._reference.encode([texts[index] for index in whole.tolist()])
        composed = _compose(table, numbers[np.repeat(~is_whole, counts)], counts[by_words])
        places = np.empty(len(texts), dtype=np.int64)
        places[np.concatenate((whole, by_words))] = np.arange(len(texts))
        return Ragged.join([encoded, composed]).take(places)

    def _learn(
        self,
        table: WordTable,
        texts: list[str],
        words: list[str],
        numbers: NDArray[np.int64],
        owners: NDArray[np.int64],
    ) -> None:
        """Add new words to the table and set their `numbers`, except in texts that are mostly new."""
        places = np.flatnonzero(numbers == UNKNOWN)
        missing = [words[place] for place in places.tolist()]
        missing_owners = owners[places].tolist()
        num_new_chars = [0] * len(texts)
        can_learn: dict[str, bool] = {}
        for word, owner in zip(missing, missing_owners, strict=True):
            if word not in can_learn:
                can_learn[word] = len(word) <= MAX_WORD_CHARS and not self._reference.has_added_token(word)
                num_new_chars[owner] += len(word)
            if not can_learn[word]:
                num_new_chars[owner] = len(texts[owner])
        wanted = {
            word: None
            for word, owner in zip(missing, missing_owners, strict=True)
            if num_new_chars[owner] <= LARGEST_NEW_SHARE * len(texts[owner])
        }
        if wanted:
            table.add(list(wanted), self._reference.encode(list(wanted), add_special_tokens=False))
            numbers[places] = table.find(missing)
            if (len(table) > MAX_WORDS or table.num_chars > MAX_CHARS) and self._table is table:
                self._table = self._make_table()  # threads that use the old table go on with it

    def _make_table(self) -> WordTable:
        special = [np.array(ids, dtype=np.int32) for ids in (self._reference.prefix, self._reference.suffix)]
        return WordTable(Ragged.from_rows(special, np.int32))


def _compose(table: WordTable, numbers: NDArray[np.int64], counts: NDArray[np.int64]) -> Ragged:
    """Return the token ids of texts with `counts` words (at least 1) each, special tokens included."""
    ends = np.cumsum(counts + 2) - 1
    starts = ends - counts - 1
    rows = np.empty(len(numbers) + 2 * len(counts), dtype=np.int64)
    is_word = np.ones(len(rows), dtype=np.bool_)
    is_word[starts] = is_word[ends] = False
    rows[is_word] = numbers
    rows[starts], rows[ends] = PREFIX, SUFFIX
    tokens = table.take(rows)
    return Ragged(tokens.values, np.concatenate(([0], tokens.offsets[ends + 1])))


def _grown(array: NDArray[Any], size: int) -> NDArray[Any]:
    """Return the array if it is large enough, else a copy of at least twice its size.

    It is never resized in place, since a reader may use it.
    """
    if size <= len(array):
        return array
    grown = np.zeros(max(size, 2 * len(array)), dtype=array.dtype)
    grown[: len(array)] = array
    return grown
