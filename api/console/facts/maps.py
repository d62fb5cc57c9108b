"""Maps: pictures of collections' rows, each drawn once a minute for all who look at it."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Engine

from api.console.pictures.collection_map import CollectionMap, Histogram, draw_histogram, draw_map
from vectormill.db.collections.collections import find_generation
from vectormill.db.measures.row_samples import sample_rows
from vectormill.domain.collection import RECORDS, SCORES, Generation

SAMPLE_ROWS: Final = 2000
KEPT_SECONDS: Final = 60.0
# A map is some hundred kilobytes.
MOST_MAPS: Final = 16
MOST_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class DrawnMap:
    """`field` is what it is coloured by; `share` how much of the table was read, and `seconds` what it took.

    A map of vectors, a histogram of scores; neither of records, of which there is no such picture.
    """

    generation: Generation
    field: str | None
    fields: list[str]
    num_rows: int
    share: float
    seconds: float
    map: CollectionMap | None
    histogram: Histogram | None


@dataclass(slots=True)
class _Place:
    drawn: DrawnMap | None = None
    drawn_at: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Maps:
    """Used by threads. Whoever comes while a map is drawn waits for it, and does not draw it again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._places: dict[tuple[int, str | None], _Place] = {}
        self._lock = threading.Lock()

    def find(self, engine: Engine, collection: str, field: str | None) -> DrawnMap:
        """That of the live generation. Raises CollectionNotFound and SearchTimeout."""
        with engine.connect() as connection:
            generation = find_generation(connection, collection)
        place = self._take_place(generation.id, field)
        with place.lock:
            if place.drawn is None or self._clock() - place.drawn_at >= KEPT_SECONDS:
                place.drawn = self._draw(engine, generation, field)
                place.drawn_at = self._clock()
            return place.drawn

    def _take_place(self, generation_id: int, field: str | None) -> _Place:
        """Its own, as the newest; the oldest one goes when there are too many."""
        with self._lock:
            place = self._places.pop((generation_id, field), None) or _Place()
            self._places[generation_id, field] = place
            if len(self._places) > MOST_MAPS:
                del self._places[next(iter(self._places))]
            return place

    def _draw(self, engine: Engine, generation: Generation, field: str | None) -> DrawnMap:
        start = self._clock()
        if generation.kind == RECORDS:
            return DrawnMap(generation, field, [], 0, 0.0, 0.0, None, None)
        with engine.connect() as connection:
            sample = sample_rows(connection, generation, SAMPLE_ROWS, field, MOST_SECONDS)
        is_scored = generation.kind == SCORES
        return DrawnMap(
            generation,
            field,
            sample.fields,
            len(sample.keys),
            sample.share,
            self._clock() - start,
            None if is_scored else draw_map(sample, generation.spec, field),
            draw_histogram(sample, generation.spec) if is_scored else None,
        )
