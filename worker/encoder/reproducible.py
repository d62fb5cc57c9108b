"""Give each text the same bits, alone or in any batch, by computing it in tiles of one shape.

What a kernel sums in which order depends on the shape of its input, so a tile has a fixed number of sequences of one
padded length. The place of a sequence in its tile changes nothing, which is checked at load; a model for which it does
is refused. Imports no framework.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.errors import ModelError
from vectormill.domain.task import DENSE
from vectormill.ragged import Ragged
from worker.batching.batch import OUTPUTS, Batch
from worker.batching.cost import LengthBuckets, count_tile_rows
from worker.encoder.encoder import Encoder, EncoderOrder, EncoderReport, ForwardPass

# The size of a tile. A smaller one wastes less where few texts are of one length, a larger one computes faster
# (docs/LOG.md). The pool of waiting sequences fills them.
TILE_TOKENS: Final = 256
# The lengths of the tiles that are compared at load.
PROBED_LENGTHS: Final = (5, 16, 50, 120)
# The ids in the compared tiles are below this; the words do not matter.
LARGEST_PROBED_ID: Final = 5000
SMALLEST_VOCABULARY: Final = 32  # assumed where config.json does not state it


@dataclass(frozen=True, slots=True)
class Tile:
    """One forward pass: the sequences at `places` of a batch, in order, and perhaps repetitions of the first."""

    batch: Batch
    places: NDArray[np.int64]


class TiledPass:
    """The tiles of one batch, computed one after the other. Implements ForwardPass."""

    def __init__(self, passes: Sequence[ForwardPass], places: Sequence[NDArray[np.int64]]) -> None:
        self._passes = passes
        self._places = places

    def start(self) -> None:
        self._passes[0].start()

    def results(self) -> Ragged:
        parts = []
        for number, (each, places) in enumerate(zip(self._passes, self._places, strict=True)):
            if number:
                each.start()
            parts.append(each.results().part(0, len(places)))
        if len({part.values.dtype for part in parts}) > 1:  # some sequences ask for more than dense vectors
            parts = [
                Ragged(part.covered.view(np.uint8), (part.offsets - part.offsets[0]) * part.values.itemsize)
                for part in parts
            ]
        order = np.argsort(np.concatenate(self._places), kind="stable")
        joined = Ragged.join(parts)
        return joined.take(order) if len(joined) else joined  # another rank returns the results


class ReproducibleEncoder(Encoder):
    """An encoder whose results for a sequence do not depend on the other sequences of its batch, bit by bit."""

    def __init__(self, inner: Encoder, order: EncoderOrder) -> None:
        """Compare some tiles. Raise ModelError if tiles of one shape are not enough."""
        self._inner = inner
        report = inner.describe()
        self._buckets = None if report.longest_bucket is None else LengthBuckets(report.longest_bucket)
        self._largest_id = min(LARGEST_PROBED_ID, order.card.shape.vocab_size or SMALLEST_VOCABULARY)
        # A text that asks for other outputs is computed alone, so only tiles of dense vectors are compared.
        gives_dense = order.card.is_extractor or DENSE in order.card.outputs
        lengths = [length for length in PROBED_LENGTHS if gives_dense and length <= order.card.max_tokens]
        if not all(map(self._is_stable, lengths)):
            raise ModelError(
                f"The model {order.card.name!r} cannot be reproducible with {report.backend.value}: its results "
                "depend on the place of a text in its batch. Use another backend or strategy."
            )

    def describe(self) -> EncoderReport:
        report = self._inner.describe()
        note = f"Each text has the same bits in any batch, with others of its length in tiles of {TILE_TOKENS} tokens."
        return replace(report, notes=(*report.notes, note), tile_tokens=TILE_TOKENS)

    def take_waited_seconds(self) -> float:
        return self._inner.take_waited_seconds()

    def prepare(self, batch: Batch) -> ForwardPass:
        tiles = list(self._cut(batch))
        passes = [self._inner.prepare(tile.batch) for tile in tiles]
        return TiledPass(passes, [tile.places for tile in tiles])

    def _cut(self, batch: Batch) -> Iterator[Tile]:
        lengths = batch.lengths
        if self._buckets is not None:
            padded = {length: self._buckets.find(length) for length in np.unique(lengths).tolist()}
            lengths = np.array([padded[length] for length in lengths.tolist()], dtype=np.int64)
        asks_more = np.zeros(len(batch), np.bool_)
        if OUTPUTS in batch.inputs:
            asks_more = batch.inputs[OUTPUTS].covered != 0
        dense = Batch({name: rows for name, rows in batch.inputs.items() if name != OUTPUTS})
        # The product of a head has as many rows as the batch has tokens for it, so such a sequence is a tile alone.
        for place in np.flatnonzero(asks_more).tolist():
            yield Tile(batch.part(place, place + 1), np.array([place]))
        for length in np.unique(lengths[~asks_more]).tolist():
            places = np.flatnonzero((lengths == length) & ~asks_more)
            num_rows = count_tile_rows(TILE_TOKENS, length)
            for start in range(0, len(places), num_rows):
                own = places[start : start + num_rows]
                filled = np.concatenate([own, np.repeat(own[:1], num_rows - len(own))])
                yield Tile(dense.take(filled), own)

    def _is_stable(self, length: int) -> bool:
        """Return True if a sequence of this length has the same bits at the begin and the end of a tile and alone."""
        numbers = np.random.default_rng(7)
        num_rows = count_tile_rows(TILE_TOKENS, length)
        first, *others = [
            numbers.integers(self._largest_id, size=length).astype(np.int32) for _ in range(num_rows)
        ]
        batches = [[first], [first, *others], [*others, first], [*others, *others, first]]
        places = [0, 0, len(others), 2 * len(others)]
        found = [self.encode(Batch.from_ids(rows)) for rows in batches]
        rows = [each.row(place) for each, place in zip(found, places, strict=True) if len(each)]
        return len({row.tobytes() for row in rows}) <= 1
