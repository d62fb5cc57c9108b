"""Pushes: rows that a client streams are stored in parts and then re-indexed by a run, all or none of them.

Parts are written as rows arrive, for a run in state `uploading`; a final transaction sets the run to
`queued`.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Final, Self
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from vectormill.db.idempotency import make_once
from vectormill.db.outages import DATABASE_ERRORS
from vectormill.db.parameters import to_jsonb
from vectormill.domain.errors import Conflict, DuplicateKey, EmptyJob, SourceFailed, UploadRemoved
from vectormill.jobs.chunk import decode_payload, encode_payload
from vectormill.jobs.duplicate_keys import DuplicateFinder
from vectormill.jobs.item import Item, Items
from vectormill.runs.run import FAILED, REINDEX, TERMINAL_RUN_STATES, UPLOADING
from vectormill.runs.runs import create_run
from vectormill.sources.reader import Reader, SourcePlace, describe_database_error
from vectormill.sources.source import PUSH
from vectormill.sources.sources import find_source

# The size limits of one part: an indexer holds a whole part in memory, and a part is one row of Postgres.
PART_ITEMS: Final = 4096
PART_BYTES: Final = 4 << 20
# While rows arrive, a part is written at least this often; it serves as the push's heartbeat.
PART_SECONDS: Final = 15.0

# Locks the run until the part is committed, so that nobody cancels it, or fails it as silent, meanwhile.
GIVE_SIGN_OF_LIFE = text("""
    UPDATE vectormill.runs SET updated_at = now() WHERE id = :id AND state = 'uploading' RETURNING id
""")

INSERT_PART = text("""
    INSERT INTO vectormill.run_parts (run_id, seq, num_items, items) VALUES (:run_id, :seq, :num_items, :items)
""")

QUEUE_RUN = text("""
    UPDATE vectormill.runs
       SET state = 'queued', options = options || jsonb_build_object('num_parts', CAST(:num_parts AS integer)),
           available_at = now(), updated_at = now()
     WHERE id = :id AND state = 'uploading'
    RETURNING id
""")

_FAIL: Final = """
    UPDATE vectormill.runs SET state = 'failed', error = :error, finished_at = now(), updated_at = now()
     WHERE state = 'uploading'
"""
FAIL_RUN = text(f"{_FAIL} AND id = :id")
# An API process that is killed leaves its run in state `uploading`.
FAIL_SILENT_PUSHES = text(f"""{_FAIL}
       AND updated_at < now() - make_interval(secs => CAST(:timeout_seconds AS double precision))
""")

# Deletes the parts too, so that a repeated push leaves no run behind.
DELETE_UPLOAD = text("DELETE FROM vectormill.runs WHERE id = :id AND state = 'uploading'")

FIND_STATE = text("SELECT state FROM vectormill.runs WHERE id = :id")

# Deletes parts of a failed push only: a queued run may already be read by an indexer before its client knows.
DELETE_PARTS = text("""
    DELETE FROM vectormill.run_parts USING vectormill.runs
     WHERE run_parts.run_id = runs.id AND runs.id = :id AND runs.state = 'failed'
""")

LOAD_PART = text("""
    SELECT seq, items FROM vectormill.run_parts WHERE run_id = :run_id AND seq > :after ORDER BY seq LIMIT 1
""")

COUNT_PARTS = text("SELECT CAST(options ->> 'num_parts' AS integer) FROM vectormill.runs WHERE id = :run_id")

COUNT_ITEMS = text("SELECT coalesce(sum(num_items), 0) FROM vectormill.run_parts WHERE run_id = :run_id")

# Parts are deleted in limited numbers, because each holds megabytes.
DELETE_READ_PARTS = text(f"""
    DELETE FROM vectormill.run_parts
     WHERE (run_id, seq) IN (SELECT part.run_id, part.seq
                               FROM vectormill.run_parts AS part
                               JOIN vectormill.runs AS run ON run.id = part.run_id
                              WHERE run.state IN {TERMINAL_RUN_STATES}
                              LIMIT :limit
                                FOR UPDATE OF part SKIP LOCKED)
""")
PARTS_AT_ONCE: Final = 500

BROKEN_OFF: Final = "The push was interrupted before its end; nothing was written. Push again."


class PushWriter:
    """Write the rows of one push, as a context manager.

    Leaving the block without `finish` fails the run and deletes its parts. Not thread-safe. `options` are those of
    the run; rows that the push lacks are deleted unless the option `is_complete` is false.
    """

    def __init__(
        self,
        engine: Engine,
        collection: str,
        options: dict[str, object],
        clock: Callable[[], float] = time.monotonic,
        *,
        idempotency_key: str | None = None,
    ) -> None:
        self._engine = engine
        self._collection = collection
        self._options = options
        self._clock = clock
        self._part_due = clock() + PART_SECONDS
        self._is_finished = False
        self._items: list[Item] = []
        self._item_bytes = 0
        self.num_items = 0
        self._num_parts = 0
        self._keys = DuplicateFinder()
        self._idempotency_key = idempotency_key
        self._hash = hashlib.blake2b(to_jsonb([collection, options]).encode())

    def __enter__(self) -> Self:
        with self._engine.begin() as connection:
            kind = find_source(connection, self._collection).source.kind
            if kind != PUSH:
                raise Conflict(
                    f"Cannot push to collection {self._collection!r}: its source is of kind {kind}, which runs read "
                    f"themselves. To change that, use `vectormill sources set {self._collection} --push`."
                )
            run = create_run(connection, self._collection, REINDEX, options=self._options, state=UPLOADING)
        assert run is not None  # create_run returns None only for a run of a schedule
        self.id = run.id
        return self

    def add_all(self, items: Items) -> None:
        """Add rows, and write each part that is full."""
        for item in items:
            self.add(item)

    def add(self, item: Item) -> None:
        """Add a row, and write a part if it is full."""
        key = item.key.encode()
        self._keys.add(key)
        sizes = len(key), len(item.text), len(item.metadata)
        self._hash.update(b"%d,%d,%d;%b%b%b" % (*sizes, key, item.text, item.metadata))
        self._items.append(item)
        self._item_bytes += sum(sizes)
        self.num_items += 1
        if (
            len(self._items) >= PART_ITEMS
            or self._item_bytes >= PART_BYTES
            or self._clock() >= self._part_due
        ):
            with self._engine.begin() as connection:
                self._write_part(connection)

    def _write_part(self, connection: Connection) -> None:
        if connection.execute(GIVE_SIGN_OF_LIFE, {"id": self.id}).one_or_none() is None:
            raise UploadRemoved
        if self._items:
            values = {
                "run_id": self.id,
                "seq": self._num_parts,
                "num_items": len(self._items),
                "items": encode_payload(self._items),
            }
            connection.execute(INSERT_PART, values)
            self._num_parts += 1
        self._items, self._item_bytes = [], 0
        self._part_due = self._clock() + PART_SECONDS

    def finish(self) -> UUID:
        """Queue the run and return its id, or that of an earlier push with the same key and content.

        The key is the client's idempotency key. Raise EmptyJob, DuplicateKey, UploadRemoved or
        IdempotencyMismatch.
        """
        if self.num_items == 0:
            raise EmptyJob("The push has no rows; to empty a collection, delete it or its items.")
        duplicate = self._keys.find_duplicate()
        if duplicate is not None:
            first, second = duplicate
            raise DuplicateKey(
                f"Row {first + 1} and row {second + 1} have the same key; each row must have a unique key."
            )

        def queue() -> str:
            self._write_part(connection)
            connection.execute(QUEUE_RUN, {"id": self.id, "num_parts": self._num_parts}).one()
            return str(self.id)

        run_id = self.id
        try:
            with self._engine.begin() as connection:
                content = self._hash.digest()
                run_id = UUID(make_once(connection, "push", self._idempotency_key, content, queue))
                if run_id != self.id:
                    connection.execute(DELETE_UPLOAD, {"id": self.id})
        except DATABASE_ERRORS:
            # The run may have been queued by a COMMIT whose answer was lost.
            with self._engine.connect() as connection:
                state = connection.execute(FIND_STATE, {"id": self.id}).scalar_one_or_none()
            if state in (None, UPLOADING, FAILED):
                raise
        self._is_finished = True
        return run_id

    def __exit__(self, *_: object) -> None:
        self._keys.close()
        if not self._is_finished:
            with self._engine.begin() as connection:
                connection.execute(FAIL_RUN, {"id": self.id, "error": BROKEN_OFF})
                connection.execute(DELETE_PARTS, {"id": self.id})


def load_part(connection: Connection, run_id: UUID, *, after: int) -> tuple[int, Items] | None:
    """Return the number and the items of the part of a push after number `after`; None after the last part."""
    row = connection.execute(LOAD_PART, {"run_id": run_id, "after": after}).one_or_none()
    return None if row is None else (row.seq, decode_payload(row.items))


def prune_pushes(connection: Connection, timeout_seconds: float) -> None:
    """Fail pushes that were silent for `timeout_seconds`, and delete the parts of runs that have ended."""
    connection.execute(FAIL_SILENT_PUSHES, {"timeout_seconds": timeout_seconds, "error": BROKEN_OFF})
    connection.execute(DELETE_READ_PARTS, {"limit": PARTS_AT_ONCE})


class PushReader(Reader):
    """Read the rows that were pushed for a run. The API has already validated their keys and metadata."""

    def __init__(self, place: SourcePlace) -> None:
        super().__init__()
        self._place = place

    def read(self) -> Iterator[Items]:
        if self._place.run_id is None:
            return
        seq, num_parts = -1, 0
        num_written: int | None = None
        try:
            while True:
                with self._place.engine.connect() as connection:
                    part = load_part(connection, self._place.run_id, after=seq)
                    if part is None:
                        # The parts when the run was queued; None if that was not recorded.
                        counted = connection.execute(COUNT_PARTS, {"run_id": self._place.run_id})
                        num_written = counted.scalar_one_or_none()
                        break
                seq, items = part
                num_parts += 1
                yield items
        except DATABASE_ERRORS as error:
            raise describe_database_error("The push", error) from error
        if seq < 0:
            raise SourceFailed(
                "Nothing was pushed to this run. If a collection's source is a push, a client sends the rows: "
                "`vectormill push COLLECTION FILE`."
            )
        if num_written is not None and num_parts != num_written:
            raise SourceFailed(
                f"Only {num_parts} of {num_written} parts of the push arrived, so rows are missing; push again."
            )

    def count_rows(self) -> int | None:
        if self._place.run_id is None:
            return None
        with self._place.engine.connect() as connection:
            return int(connection.execute(COUNT_ITEMS, {"run_id": self._place.run_id}).scalar_one())
