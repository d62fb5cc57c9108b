"""TextSample: random rows of a stream, and counts of all of its rows, in memory that does not grow with the stream."""

import hashlib
import math
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from vectormill.jobs.item import Item, Items
from vectormill.quotes.estimate import DEVIATIONS, Estimate

# 2,000 rows give the mean number of tokens within 2 to 5 % for texts such as abstracts or tickets.
MOST_ROWS: Final = 2000
# So much of each text is kept, 62 MiB of all together; more than 8,000 tokens of most texts.
KEPT_BYTES: Final = 32 << 10
# So many of the smallest hashes are kept; with n of them the number of different texts is known within 1 / sqrt(n).
MOST_HASHES: Final = 1 << 14
LARGEST_HASH: Final = 2.0**64


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A row of a sample: the beginning of its text, and the length and hash of all of it."""

    key: str
    text: bytes
    num_bytes: int
    content_hash: bytes

    @classmethod
    def of(cls, item: Item) -> Self:
        return cls(item.key, item.text[:KEPT_BYTES], len(item.text), item.content_hash())


class TextSample:
    """A uniform sample of the rows that are added (reservoir sampling: Vitter, 1985), and sums over all of them.

    Different texts are counted by their smallest hashes (Bar-Yossef et al., 2002): exactly up to MOST_HASHES. A caller
    that adds only some of the rows sets `rows`, the number of all, and may set `distinct`, that of different texts.
    """

    def __init__(self) -> None:
        self.drawn: list[SampledRow] = []
        self.num_rows = 0
        self.rows: Estimate | None = None
        self.distinct: Estimate | None = None
        self.notes: list[str] = []
        self._num_bytes = np.zeros(3, dtype=np.int64)  # of keys, texts and metadata
        self._hashes = np.zeros(0, dtype=np.uint64)
        self._random = np.random.default_rng(0)

    def add_all(self, items: Items) -> None:
        number = len(items)
        if not number:
            return
        columns = items.keys, items.texts, items.metadata
        self._num_bytes += [sum(map(len, column)) for column in columns]
        digests = (hashlib.blake2b(text, digest_size=8).digest() for text in items.texts)
        hashes = np.frombuffer(b"".join(digests), dtype=np.uint64)
        self._hashes = np.unique(np.concatenate([self._hashes, hashes]))[:MOST_HASHES]
        places = self._random.integers(0, np.arange(self.num_rows + 1, self.num_rows + number + 1))
        num_first = max(0, min(MOST_ROWS - self.num_rows, number))
        self.drawn += [SampledRow.of(items[row]) for row in range(num_first)]
        for row in np.flatnonzero(places[num_first:] < MOST_ROWS).tolist():
            self.drawn[places[num_first + row]] = SampledRow.of(items[num_first + row])
        self.num_rows += number

    @property
    def num_all(self) -> Estimate:
        """Return the number of all rows."""
        return self.rows or Estimate.exact(self.num_rows)

    @property
    def is_whole(self) -> bool:
        """Return True if every row is in the sample."""
        return self.rows is None and len(self.drawn) == self.num_rows

    @property
    def mean_bytes(self) -> tuple[float, float, float]:
        """Return the mean bytes of a row's key, text and metadata."""
        key, text, metadata = (self._num_bytes / max(1, self.num_rows)).tolist()
        return key, text, metadata

    @property
    def repeated(self) -> Estimate:
        """Return the share of rows whose text an earlier row has."""
        distinct, rows = self.distinct, self.num_all
        if distinct is None:
            distinct, rows = self._count_distinct(), Estimate.exact(max(1, self.num_rows))
        shares = (
            1 - number / max(1, rows.value) for number in (distinct.value, distinct.most, distinct.least)
        )
        return Estimate(*(min(1.0, max(0.0, share)) for share in shares))

    def _count_distinct(self) -> Estimate:
        kept: npt.NDArray[np.uint64] = self._hashes
        if len(kept) < MOST_HASHES:
            return Estimate.exact(len(kept))
        return Estimate.around(
            (len(kept) - 1) / (float(kept[-1]) / LARGEST_HASH), DEVIATIONS / math.sqrt(len(kept))
        )
