"""Reading: the source once from its beginning, batch by batch into the stage, each compared with the generation.

A thread reads and hashes ahead of the database, so that both have something to do. Nothing of the collection is
changed: a reading that was broken off begins again.
"""

import queue
import threading
from collections.abc import Iterator
from typing import Any, Final, Protocol

from indexer.context import RunContext
from indexer.progress import ClaimProgress
from indexer.target import Target, make_target
from vectormill.collections.building import open_target_generation
from vectormill.collections.rows.tombstones import hold_deletions_of
from vectormill.domain.errors import SourceFailed
from vectormill.jobs.item import Item
from vectormill.jobs.jobs import draw_seq
from vectormill.jobs.key_ledger import KeyLedger
from vectormill.runs.run import RunCounts
from vectormill.runs.stages import CHANGED, METADATA_ONLY, NEW, Rows, make_stage, pack_rows, stage_rows

# Batches that wait for the database: each is in memory once more.
_AHEAD: Final = 2
# So often a cancelled run is noticed while the source is silent.
_LOOK_SECONDS: Final = 0.5


class RunSource(Protocol):
    """The source that a run reads: see vectormill/sources/reader.py."""

    def read(self) -> Iterator[list[Item]]: ...


class _Ahead:
    """Reads in a thread of its own; `batches` gives what came, and raises what ended it."""

    def __init__(self, source: RunSource) -> None:
        self._source = source
        self._queue: queue.Queue[Rows | BaseException | None] = queue.Queue(_AHEAD)
        self._is_over = threading.Event()
        self._keys = KeyLedger()
        # Of nobody who waits: a source may be silent for minutes after we have given up.
        threading.Thread(target=self._read, name="source", daemon=True).start()

    def _read(self) -> None:
        end: BaseException | None = None
        first = 1
        try:
            for items in self._source.read():
                if items:
                    rows = pack_rows(first, items)
                    self._keys.add_all(rows.keys)
                    first += len(items)
                    self._put(rows)
                if self._is_over.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 - it is raised where the batches are taken
            end = error
        self._put(end)

    def _put(self, what: Rows | BaseException | None) -> None:
        while not self._is_over.is_set():
            try:
                self._queue.put(what, timeout=_LOOK_SECONDS)
                return
            except queue.Full:
                continue

    def take(self, context: RunContext) -> Rows | None:
        """Return the next batch, None behind the last one; raises what the source raised, or what `check` does."""
        while True:
            context.check()
            try:
                what = self._queue.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                continue
            if isinstance(what, BaseException):
                raise what
            return what

    def refuse_duplicates(self) -> None:
        """Raise SourceFailed: which of two texts is meant nobody knows."""
        duplicate = self._keys.find_duplicate()
        if duplicate is not None:
            first, second = duplicate
            raise SourceFailed(
                f"Rows {first + 1:,} and {second + 1:,} of the source have the same key; each row needs a key of its "
                "own. Nothing was changed."
            )

    def close(self) -> None:
        """End the reading, also on the server where the source can tell it: nobody waits for a query that hangs."""
        self._is_over.set()
        cancel = getattr(self._source, "cancel", None)
        if cancel is not None:
            cancel()
        self._keys.close()


def read_source(
    context: RunContext, progress: ClaimProgress, source: RunSource, target: Target, seq: int
) -> None:
    """Read all of the source. Raise SourceFailed when it did not come to its end."""
    ahead = _Ahead(source)
    try:
        while (rows := ahead.take(context)) is not None:
            with context.engine.begin() as connection:
                kinds = stage_rows(connection, target.stage, rows, seq, keep_text=target.keep_text)
                counts = progress.add(
                    num_seen=len(rows.items),
                    num_unchanged=len(rows.items) - sum(kinds.values()),
                    num_new=kinds[NEW],
                    num_changed=kinds[CHANGED],
                    num_metadata_only=kinds[METADATA_ONLY],
                )
                progress.save(connection, counts)  # last: it rolls all back if the lease was lost
            progress.counts = counts
        ahead.refuse_duplicates()
    finally:
        ahead.close()


def begin_reading(context: RunContext, progress: ClaimProgress) -> tuple[Target, int]:
    """Return an empty stage, and the run's place among the writers: client writes from here on are newer.

    No deletion is under way meanwhile, so that the run reads no row that was deleted in an earlier place.
    """
    generation = open_target_generation(context.engine, context.run.collection, context.run.spec)
    with context.engine.begin() as connection:
        progress.save(connection, RunCounts())
        hold_deletions_of(connection, generation.collection_id)
        seq = draw_seq(connection)
        target = make_target(connection, context.run, generation)
        make_stage(connection, target.stage)
        progress.save(connection, RunCounts(), seq=seq, generation_id=generation.id)
    progress.counts = RunCounts()
    return target, seq


def describe_reading(source: RunSource) -> dict[str, Any]:
    """Return the errors in single rows, if the source tells them, and whether rows that it lacks are gone."""
    complaints = getattr(source, "complaints", None)
    found = dict(complaints.to_json()) if complaints else {}
    return found | {"tells_what_vanished": getattr(source, "tells_what_vanished", True)}
