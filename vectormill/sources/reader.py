"""Reader: the seam between a source's kind and whoever reads it. Knows no kind."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, Protocol
from uuid import UUID

from sqlalchemy import Engine

from vectormill.collections.collection import LIVE
from vectormill.collections.generations import find_in_state
from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.item import Item
from vectormill.models.registry import Registry
from vectormill.settings import Settings

# A batch has so many rows, or about so many bytes of text when rows are long. Each is in memory twice or three times.
MOST_ROWS: Final = 8192
MOST_BYTES: Final = 8 << 20
FIRST_ROWS: Final = 256

# Examples of complaints that are kept.
EXAMPLES: Final = 3

TEXT: Final = attrgetter("text")
METADATA: Final = attrgetter("metadata")


class SourcePlace:
    """The context in which a source is read: its collection, database, task and model.

    `run_id` is the run that reads, which a push was made to; None for a check. `spec` is that of what is to be made;
    None means that of the live generation.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        registry: Registry,
        *,
        collection: str,
        spec: EncodingSpec | None = None,
        run_id: UUID | None = None,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.registry = registry
        self.collection = collection
        self.spec = spec
        self.run_id = run_id

    def find_spec(self) -> EncodingSpec | None:
        """Return the place's spec, else the collection's; None when there is no collection yet."""
        if self.spec is not None:
            return self.spec
        with self.engine.connect() as connection:
            generation = find_in_state(connection, self.collection, LIVE)
        return None if generation is None else generation.spec


@dataclass(slots=True)
class Complaints:
    """Faults of single rows that did not end the reading, counted by what was done about them.

    A row with a key that no collection can hold is left out: there was never a vector of it. A row whose metadata is no
    JSON object goes on without.
    """

    num_left_out: int = 0
    num_without_metadata: int = 0
    num_without_text: int = 0
    examples: list[str] = field(default_factory=list)

    def say(self, sentence: str) -> None:
        if len(self.examples) < EXAMPLES:
            self.examples.append(sentence)

    def to_json(self) -> dict[str, Any]:
        return {
            "num_left_out": self.num_left_out,
            "num_without_metadata": self.num_without_metadata,
            "num_without_text": self.num_without_text,
            "examples": list(self.examples),
        }

    def __bool__(self) -> bool:
        return bool(self.num_left_out or self.num_without_metadata or self.num_without_text)


class Reader(Protocol):
    """Reads a source once from its beginning.

    `complaints` is filled while reading. `num_rows` is how many rows there are, where that costs nothing to know.
    """

    @property
    def complaints(self) -> Complaints: ...

    def read(self) -> Iterator[list[Item]]:
        """The rows in batches of at most MOST_ROWS, in an order that is the same every time where the source has one.

        Memory does not grow with the source. A text that is missing is an empty one, so that it fails alone. Raises
        SourceFailed with the source's own words, without secrets, for whatever ends the reading, and for a row without
        a key or a key that a batch has twice; whether two batches share one, whoever keeps the keys can see.
        """
        ...

    def count_rows(self) -> int | None:
        """About how many rows there are, where that is cheaply known."""
        ...


class BatchSize:
    """The number of rows to ask for next, so that a batch stays within MOST_BYTES whatever the texts' length."""

    def __init__(self, most_rows: int = MOST_ROWS, most_bytes: int = MOST_BYTES) -> None:
        self._most_rows = most_rows
        self._most_bytes = most_bytes
        self.rows = min(FIRST_ROWS, most_rows)

    def learn(self, items: list[Item]) -> None:
        """Update the estimate from the last batch."""
        num_bytes = sum(map(len, map(TEXT, items))) + sum(map(len, map(METADATA, items)))
        self.learn_bytes(len(items), num_bytes)

    def learn_bytes(self, num_rows: int, num_bytes: int) -> None:
        """Grow fourfold at most: the next texts may be longer."""
        if num_rows:
            fitting = self._most_bytes * num_rows // max(num_bytes, 1)
            self.rows = max(1, min(fitting, 4 * self.rows, self._most_rows))
