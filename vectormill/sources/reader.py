"""Reader: the interface of all readers of sources, and the conversion of columns to items."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final
from uuid import UUID

import psycopg
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from vectormill.collections.collection import LIVE
from vectormill.collections.collections import find_in_state
from vectormill.db.outages import is_outage
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import SourceFailed, SourceInterrupted
from vectormill.files.roots import Roots
from vectormill.jobs.item import Item, Items
from vectormill.models.registry import Registry
from vectormill.rows.items import Assembler
from vectormill.rows.items import Complaints as Complaints
from vectormill.rows.values import shorten
from vectormill.settings import Settings
from vectormill.sources.source import Source

# A batch has at most this many rows, or about this many bytes of text if rows are long. Each batch is held in
# memory two or three times.
MOST_ROWS: Final = 8192
MOST_BYTES: Final = 8 << 20
FIRST_ROWS: Final = 256


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """The context in which a source is read: collection, database, task and model.

    `run_id` is the run that reads, None for a check; a push is found by it. `spec` is that of the generation
    to be written; None means that of the live generation.
    """

    engine: Engine
    settings: Settings
    registry: Registry
    _: KW_ONLY
    collection: str
    spec: EncodingSpec | None = None
    run_id: UUID | None = None

    @property
    def roots(self) -> Roots:
        """Return the folders beneath which local files may be read."""
        return Roots.of(self.settings, "source_root", SourceFailed)

    def find_spec(self) -> EncodingSpec | None:
        """Return this context's spec, else the collection's; None if the collection does not exist."""
        if self.spec is not None:
            return self.spec
        with self.engine.connect() as connection:
            generation = find_in_state(connection, self.collection, LIVE)
        return None if generation is None else generation.spec


class Reader:
    """Base class of readers, which read a source once from the beginning and fill `complaints`."""

    # True if a row that was not read no longer exists in the source.
    tells_what_vanished: bool = True
    # True if a row that was not read may exist nevertheless, so that the source must be asked before it is deleted.
    must_be_asked: bool = False
    # The source that this reader reads, with its options; None for a reader without one.
    source: Source | None = None
    # The greatest value that was read of the column that grows with each change; None if the source names none.
    newest: str | float | None = None

    def __init__(self) -> None:
        self.complaints = Complaints()

    def narrow(self, since: str | float, failed: Sequence[str] = ()) -> None:
        """Read only rows whose column of changes is at or above this value, and those with the keys that failed."""
        raise NotImplementedError  # abstract: only readers of sources that name such a column can do it

    def read(self) -> Iterator[Sequence[Item]]:
        """Yield the rows in batches of at most MOST_ROWS, in the source's order if it has one.

        Memory does not grow with the size of the source. A missing text becomes an empty one, so that only
        its item fails. Raise SourceFailed with the source's own message, without secrets, if reading fails,
        and for a row without a key or a key that occurs twice in a batch. Duplicates across batches are for
        the caller to find.
        """
        raise NotImplementedError  # abstract: the reader of each kind of source overrides it

    def count_rows(self) -> int | None:
        """Return the approximate number of rows; None if no cheap estimate is available."""
        return None

    def cancel(self) -> None:
        """Stop reading, and cancel the query if the server supports that. Called from another thread."""


class BatchSize:
    """The number of rows to fetch next, adapted to their length so that a batch stays within MOST_BYTES."""

    def __init__(self) -> None:
        self.rows = FIRST_ROWS

    def learn(self, items: Items) -> None:
        """Update the estimate from a batch; grow at most fourfold, because the next texts may be longer."""
        num_bytes = sum(map(len, items.texts)) + sum(map(len, items.metadata))
        if items:
            fitting = MOST_BYTES * len(items) // max(num_bytes, 1)
            self.rows = max(1, min(fitting, 4 * self.rows, MOST_ROWS))


class SourceAssembler(Assembler):
    """The assembler of sources: a row without a key, or with that of another row of its batch, ends the reading.

    What a source does not have is deleted from its collection, so no row may be passed over whose key is not known.
    """

    refusal = SourceFailed
    skips_bad_keys = True

    def assemble(
        self,
        keys: Sequence[Any],
        texts: Sequence[Any],
        metadata: Sequence[Any] | None = None,
        pairs: Sequence[Any] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> Items:
        """Return one item per row, as that of rows does. Raise SourceFailed if a key is missing or occurs twice."""
        items = super().assemble(keys, texts, metadata, pairs, numbers)
        if len(set(items.keys)) != len(items):
            twice = next(key for key, number in Counter(items.keys).items() if number > 1)
            raise SourceFailed(
                f"{self._name}: duplicate key {shorten(twice)}; each row must have a unique key."
            )
        return items


def describe_database_error(what: str, error: Exception) -> SourceFailed:
    """Return the error of a source that reads our own Postgres: SourceInterrupted if it is transient."""
    words = " ".join(str(getattr(error, "orig", error)).split())
    return choose_failure(error)(f"{what} cannot be read: {words.rstrip('.')}.")


def choose_failure(error: Exception) -> type[SourceFailed]:
    """Return SourceInterrupted for a transient error, else SourceFailed.

    For databases other than Postgres only a broken connection is known to be transient.
    """
    cause = error.orig if isinstance(error, DBAPIError) else error
    is_known = isinstance(cause, psycopg.Error) or not isinstance(error, DBAPIError)
    passes = is_outage(error) if is_known else getattr(error, "connection_invalidated", False)
    return SourceInterrupted if passes else SourceFailed
