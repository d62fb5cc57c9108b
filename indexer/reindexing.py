"""Reindexing: bring a collection up to date with its source by reading, comparing, encoding and deleting.

The source is read once from the beginning. Each batch is compared with the generation and staged, while a
thread reads and hashes the next ones. Nothing in the collection changes during this phase, so a reading that
was interrupted starts again.

Changes that need no encoding are written first. New and changed texts become an ordinary job, whose id is
saved with the run before its upload begins and whose place in the order of writers is that of the run. So an
indexer that takes over the run finds the job: it waits for one that is complete, and removes an upload that
was interrupted.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from uuid import UUID, uuid4

from sqlalchemy import Connection

from indexer.context import ClaimProgress, RunContext, Target, Wait, find_target, make_target
from vectormill.collections.bulk_loads import (
    begin_bulk_load,
    close_bulk_load,
    compose_indexes,
    finish_bulk_load,
    has_bulk_load,
    merge_rows,
)
from vectormill.collections.collection import BUILDING, Generation
from vectormill.collections.collections import find_generation, find_written
from vectormill.collections.generation_tables import filled_names
from vectormill.collections.generations import open_target_generation
from vectormill.collections.indexes import analyze_table, run_build
from vectormill.collections.items import remove_items
from vectormill.collections.tombstones import hold_deletions_of
from vectormill.db.locks import act_in_short_locks
from vectormill.domain.errors import JobNotFound, RunError, SourceFailed
from vectormill.jobs.deletion import settle_upload
from vectormill.jobs.dual_writes import add_missing_twins
from vectormill.jobs.duplicate_keys import DuplicateFinder
from vectormill.jobs.job import CANCELLED, DEFAULT_PRIORITY, Job, NewJob
from vectormill.jobs.jobs import draw_seq, find_job
from vectormill.jobs.submission import JobWriter
from vectormill.runs.differences import (
    CHANGED,
    METADATA_ONLY,
    NEW,
    VANISHED,
    Rows,
    RunTables,
    begin_mark,
    count_rows,
    has_repeated_key,
    list_failed_keys,
    list_renamed,
    list_staged,
    load_changes,
    make_stage,
    note_moved,
    note_vanished,
    pack_rows,
    require_stage,
    stage_rows,
    write_metadata,
    write_moved,
)
from vectormill.runs.run import (
    CHANGES,
    COMPARING,
    DEFAULT_MAX_CHANGE_SHARE,
    ENCODING,
    READING,
    Run,
    RunCounts,
    is_as_confirmed,
    refuse_change,
)
from vectormill.runs.runs import FORGET_ATTEMPTS, refuse_without_texts
from vectormill.sources.opening import find_present, open_source
from vectormill.sources.own_texts import CarriedTextReader
from vectormill.sources.reader import Reader, SourcePlace
from vectormill.sources.source import OWN_TEXTS, SQL, Source
from vectormill.sources.sources import find_source_by_id

# The number of batches that wait for the database; each takes up memory.
_AHEAD: Final = 2
# The interval at which cancellation is checked while the source returns nothing.
_LOOK_SECONDS: Final = 0.5


class _Ahead:
    """Read a source ahead in a thread; `take` returns its batches and raises the thread's error."""

    def __init__(self, source: Reader) -> None:
        self._source = source
        self._queue: queue.Queue[Rows | BaseException | None] = queue.Queue(_AHEAD)
        self._is_over = threading.Event()
        self._keys = DuplicateFinder()
        # A daemon thread, because a source may block for minutes after the run has failed.
        threading.Thread(target=self._read, name="source", daemon=True).start()

    def _read(self) -> None:
        end: BaseException | None = None
        first = 1
        try:
            for items in self._source.read():
                if items:
                    rows = pack_rows(first, items)
                    self._keys.add_all(rows.items.keys)
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
        """Return the next batch, or None after the last one.

        Raise the error that ended the reading, or whatever `context.check` raises.
        """
        while True:
            context.check()
            try:
                what = self._queue.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                continue
            if isinstance(what, BaseException):
                raise what
            return what

    def refuse_duplicates(self, connection: Connection, stage: RunTables) -> None:
        """Raise SourceFailed if two rows have the same key, since either of their texts could be meant."""
        duplicate = self._keys.find_duplicate()
        if duplicate is not None and has_repeated_key(connection, stage):
            first, second = duplicate
            raise SourceFailed(
                f"Rows {first + 1:,} and {second + 1:,} of the source have the same key; keys must be "
                "unique. Nothing was changed."
            )

    def close(self) -> None:
        """Stop the reading, and cancel the query of a source whose server supports that."""
        self._is_over.set()
        self._source.cancel()
        self._keys.close()


def read_source(
    context: RunContext, progress: ClaimProgress, source: Reader, target: Target, seq: int
) -> None:
    """Read and stage the whole source. Raise SourceFailed if this fails or two rows have the same key."""
    ahead = _Ahead(source)
    try:
        while (rows := ahead.take(context)) is not None:
            with context.engine.begin() as connection:
                kinds = stage_rows(connection, target.stage, rows, seq, keep_text=target.keep_text)
                progress.save(  # last, because a lost lease rolls back all of it
                    connection,
                    num_seen=len(rows.items),
                    num_unchanged=len(rows.items) - sum(kinds.values()),
                    num_new=kinds[NEW],
                    num_changed=kinds[CHANGED],
                    num_metadata_only=kinds[METADATA_ONLY],
                )
        with context.engine.connect() as connection:
            ahead.refuse_duplicates(connection, target.stage)
    finally:
        ahead.close()


def begin_reading(context: RunContext, progress: ClaimProgress) -> tuple[Target, int]:
    """Return the target with an empty stage, and the run's place in the order of writers.

    The place is drawn from the sequence jobs.seq; client writes from here on are newer than the run.
    Deletions are held off meanwhile, so that the run reads no row that was deleted in an earlier place.
    """
    generation = open_target_generation(context.engine, context.run.collection, context.run.spec)
    if generation.state == BUILDING:
        end_fill(context, generation.id)  # that of an earlier run, or of an earlier reading
    with context.engine.begin() as connection:
        progress.save(connection)
        hold_deletions_of(connection, generation.collection_id)
        seq = draw_seq(connection)
        target = make_target(connection, context.run, generation)
        make_stage(connection, target.stage)
        progress.counts = RunCounts()
        progress.save(connection, seq=seq, generation_id=generation.id)
    return target, seq


def narrow_reading(context: RunContext, reader: Reader, target: Target) -> dict[str, Any]:
    """Let the reader skip rows that have not changed, if the source tells which; return the mark of the run."""
    source = reader.source
    if source is None or not source.options.get("changed"):
        return {}
    with context.engine.connect() as connection:
        mark, failed = begin_mark(connection, context.run, target.generation.id, source)
    if mark["since"] is not None:
        reader.narrow(mark["since"], failed)
    return mark


def describe_reading(source: Reader, mark: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report of a reading: faults of rows, whether rows missing from the source are gone, and its mark."""
    complaints = source.complaints.to_json() if source.complaints else {}
    asked = {"must_be_asked": True} if source.must_be_asked else {}
    told = {CHANGES: {**mark, "newest": source.newest}} if mark else {}
    return {**complaints, "tells_what_vanished": source.tells_what_vanished, **asked, **told}


def open_run_source(context: RunContext) -> Reader:
    """Return a reader of the collection's source, or of its stored texts if it has no source.

    After a rollback, return a reader of the retired generation's newer rows (see `open_carried`). Raise
    SourceNotFound or InvalidOption.
    """
    run = context.run
    if "carry_from" in run.options:
        return open_carried(context)
    with context.engine.connect() as connection:
        refuse_without_texts(connection, run.collection)
        source = find_source_by_id(connection, run.collection_id) or Source(OWN_TEXTS, {})
    return open_source(source, place_of(context))


def place_of(context: RunContext) -> SourcePlace:
    """Return the context in which the run reads its source."""
    run = context.run
    tools = context.engine, context.settings, context.registry
    return SourcePlace(*tools, collection=run.collection, spec=run.spec, run_id=run.id)


def open_carried(context: RunContext) -> CarriedTextReader:
    """Return a reader of the retired generation's newer rows, to carry them over after a rollback.

    Jobs that still write to the retired generation first get twins. In this order a job that ends meanwhile
    is covered either way. If missing texts are allowed, ended jobs get twins too.
    """
    run, engine = context.run, context.engine
    with engine.connect() as connection:
        live = find_generation(connection, run.collection)
    add_missing_twins(engine, live)
    return CarriedTextReader(
        place_of(context), int(run.options["carry_from"]), int(run.options["carry_since"])
    )


_MOVED_PER_BATCH: Final = 2000


@contextmanager
def open_stage(context: RunContext, progress: ClaimProgress) -> Iterator[tuple[Connection, Target]]:
    """Yield a transaction that holds the run, and the run's target, whose stage is there."""
    with context.engine.begin() as connection:
        progress.save(connection)
        target = find_target(connection, context.run)
        require_stage(connection, target.stage)
        yield connection, target


class RunHeld(RunError):
    """The run would change more of the collection than allowed without confirmation, so it is held."""


def compare(context: RunContext, progress: ClaimProgress) -> None:
    """Find vanished rows, then take over known vectors. Raise RunHeld before anything is changed."""
    look_for_vanished(context, progress)
    take_over_vectors(context, progress)


def look_for_vanished(context: RunContext, progress: ClaimProgress) -> None:
    run = context.run
    assert run.seq is not None
    with open_stage(context, progress) as (connection, target):
        num_rows = count_rows(connection, target.stage)
        num_vanished = 0
        if tells_what_vanished(run):
            num_vanished = note_vanished(
                connection,
                target.stage,
                num_rows=num_rows,
                num_known=run.counts.num_seen - run.counts.num_new,
                num_seen=run.counts.num_seen,
                seq=run.seq,
            )
        found: dict[str, Any] = {"num_rows": num_rows, "num_vanished": num_vanished}
        if target.is_live:
            change = {
                "num_rows": num_rows,
                "num_changed": run.counts.num_changed,
                "num_vanished": num_vanished,
            }
        else:
            # Encoding all other rows again was requested, so only rows count that the new generation would lack
            # because the source no longer has them.
            live = find_generation(connection, run.collection)
            num_live = count_rows(connection, RunTables(run.id, live))
            num_vanished = max(0, num_live - run.counts.num_seen)
            change = {"num_rows": num_live, "num_changed": 0, "num_vanished": num_vanished}
    refusal = guard(run, change)
    context.report(COMPARING, found if refusal is None else found | {"held_for": change})
    if refusal is not None:
        raise RunHeld(refusal)


def tells_what_vanished(run: Run) -> bool:
    """Return True if rows missing from the source are to be deleted.

    They are kept if a client pushed only some rows, or if the source cannot tell.
    """
    is_complete = bool(run.options.get("is_complete", True))
    return is_complete and bool(run.report.get(READING, {}).get("tells_what_vanished", True))


def guard(run: Run, change: Mapping[str, int]) -> str | None:
    """Return the reason why the run is held; None if it may continue."""
    confirmed = run.options.get("confirmed")
    if run.options.get("confirm") or (confirmed and is_as_confirmed(**change, confirmed=confirmed)):
        return None
    share = run.options.get("max_change_share")
    return refuse_change(**change, max_share=DEFAULT_MAX_CHANGE_SHARE if share is None else float(share))


def take_over_vectors(context: RunContext, progress: ClaimProgress) -> None:
    """Copy vectors to renamed rows and moved passages whose text the generation has under another key."""
    run = context.run
    if run.counts.num_new + run.counts.num_changed == 0:
        return
    with open_stage(context, progress) as (connection, target):
        note_moved(connection, target.stage, run.counts.num_new + run.counts.num_changed)
    after: int | None = 0
    while after is not None:
        context.check()
        with open_stage(context, progress) as (connection, target):
            num_new, num_changed, after = write_moved(
                connection,
                target.stage,
                after=after,
                limit=_MOVED_PER_BATCH,
                keep_text=target.keep_text,
            )
            num_moved = num_new + num_changed
            progress.save(connection, num_moved=num_moved, num_new=-num_new, num_changed=-num_changed)


# The number of texts held in memory at a time, and of rows per transaction.
_TEXTS_PER_BATCH: Final = 200
_ROWS_PER_BATCH: Final = 2000
# A section of the run's report, in addition to those of the phases.
KEPT_TEXTS: Final = "kept_texts"


class EncodingEnded(RunError):
    """The job that encoded for the run was cancelled or deleted; start the run again."""


def encode(context: RunContext, progress: ClaimProgress, wait: Wait) -> None:
    """Write all differences: changed metadata directly, and new and changed texts by a job.

    `wait` sleeps between two polls of the job.
    """
    run = context.run
    job_id = find_own_job(context, progress, run.job_id)
    # First, because it finds rows whose text older jobs have changed.
    num_refused = update_metadata(context, progress)
    if job_id is None and progress.counts.num_new + progress.counts.num_changed:
        job_id = submit(context, progress)
    job = None if job_id is None else await_job(context, progress, job_id, wait)
    assert run.generation_id is not None
    end_fill(context, run.generation_id)
    if job is not None:
        delete_failed(context, progress, job)
    if num_refused:
        context.report(KEPT_TEXTS, {"num_refused": num_refused})


def find_own_job(context: RunContext, progress: ClaimProgress, job_id: UUID | None) -> UUID | None:
    """Return the id of the run's job if it was fully submitted, else None.

    An upload of the job that was interrupted is deleted.
    """
    if job_id is None:
        return None
    with context.engine.begin() as connection:
        progress.save(connection)
        job = settle_upload(connection, job_id)
    # A job of an earlier reading has another place in the order of writers, and other texts.
    return job.id if job is not None and job.seq == context.run.seq else None


def submit(context: RunContext, progress: ClaimProgress) -> UUID | None:
    """Submit all staged texts that still need encoding as one job; return its id, None if there are none.

    Each transaction locks the run, so that an indexer that has lost the run leaves no job in its name.
    """
    run = context.run
    assert run.seq is not None
    job_id = uuid4()
    with context.engine.begin() as connection:
        progress.save(connection, job_id=job_id)
        target = find_target(connection, run)
        require_stage(connection, target.stage)
        if not target.is_live and is_fill(context, progress):
            begin_bulk_load(connection, target.generation, job_id)
    new_job = NewJob(
        target.spec,
        collection=run.collection,
        priority=int(run.options.get("priority", DEFAULT_PRIORITY)),
        metadata={"run": str(run.id)},
        id=job_id,
        seq=run.seq,
        generation_id=target.generation.id,
    )
    with JobWriter(context.engine, new_job, context.settings, hold=context.hold) as writer:
        after, num_items = 0, 0
        while True:
            context.check()
            with context.engine.begin() as connection:
                require_stage(connection, target.stage)
                batch = load_changes(
                    connection,
                    target.stage,
                    run.seq,
                    kinds=(NEW, CHANGED),
                    after=after,
                    limit=_TEXTS_PER_BATCH,
                )
            if not batch:
                break
            for _, item in batch:
                writer.add(item)
            after = batch[-1][0]
            num_items += len(batch)
        if num_items == 0:
            return None
        return writer.finish().id


def is_fill(context: RunContext, progress: ClaimProgress) -> bool:
    """Return whether the run's rows go into a bulk load: it writes at least as many as the new generation has.

    The generation has rows if an earlier run did not complete it, or of clients' jobs since the build began.
    Merging them into a bulk load must not cost more than the bulk load saves.
    """
    num_rows = int(context.run.report.get(COMPARING, {}).get("num_rows", 0))
    return num_rows <= progress.counts.num_new + progress.counts.num_changed


def update_metadata(context: RunContext, progress: ClaimProgress) -> int:
    """Write the metadata of rows whose text is unchanged, without touching the table of vectors.

    Return how many texts Postgres refused to keep.
    """
    if progress.counts.num_metadata_only == 0:
        return 0
    after: int | None = 0
    num_refused = 0
    while after is not None:
        context.check()
        with open_stage(context, progress) as (connection, target):
            num_changed, num_without_text, after = write_metadata(
                connection,
                target.stage,
                after=after,
                limit=_ROWS_PER_BATCH,
                keep_text=target.keep_text,
            )
            progress.save(connection, num_changed=num_changed, num_metadata_only=-num_changed)
        num_refused += num_without_text
    return num_refused


def await_job(context: RunContext, progress: ClaimProgress, job_id: UUID, wait: Wait) -> Job:
    """Wait until the job has ended, even with failed items, and return it.

    Raise EncodingEnded if it was cancelled or deleted. Once some chunks are encoded, the run's attempts are
    reset, because a long job may outlive many indexers.
    """
    num_open: int | None = None
    has_advanced = False
    while True:
        context.check()
        with context.engine.connect() as connection:
            try:
                job = find_job(connection, job_id)
            except JobNotFound:
                raise EncodingEnded from None
        if job.state == CANCELLED:
            raise EncodingEnded
        if num_open is None:
            num_open = job.num_open_chunks
        elif job.num_open_chunks < num_open and not has_advanced:
            with context.engine.begin() as connection:
                progress.lease.keep(connection, FORGET_ATTEMPTS)
            has_advanced = True
        if job.is_terminal:
            return job
        eta = job.eta_seconds
        wait(0.1 if eta is None else min(2.0, max(0.05, 0.1 * eta)))


def delete_failed(context: RunContext, progress: ClaimProgress, job: Job) -> None:
    """Delete rows whose new text could not be encoded; searches would find them by their previous text."""
    run = context.run
    after, num_deleted, num_failed = -1, 0, 0
    while True:
        context.check()
        with context.engine.begin() as connection:
            progress.save(connection)
            target = find_target(connection, run)
            failed = list_failed_keys(connection, job.id, after=after, limit=_ROWS_PER_BATCH)
            keys, places = [key for _, key, _ in failed], [place for _, _, place in failed]
            num_deleted += remove_items(connection, target.generation, keys, places)
        if not failed:
            break
        after = failed[-1][0]
        num_failed += len(failed)
    with context.engine.begin() as connection:
        progress.save(connection, num_failed=num_failed - progress.counts.num_failed)
    context.report(
        ENCODING,
        {
            "job": str(job.id),
            "num_encoded": job.num_done,
            "num_failed": num_failed,
            "num_vectors_removed": num_deleted,
        },
    )


_DELETED_PER_BATCH: Final = 1000


def leave_out_present(context: RunContext, keys: list[str]) -> list[str]:
    """Return the keys that the source does not have now either, if it has not been read at one moment.

    Raise SourceFailed if it cannot be asked.
    """
    run = context.run
    if not run.report.get(READING, {}).get("must_be_asked"):
        return keys
    with context.engine.connect() as connection:
        source = find_source_by_id(connection, run.collection_id)
    if source is None or source.kind != SQL:
        raise SourceFailed(
            "The collection got another source, which cannot be asked for rows that seem to have vanished; they were "
            "left. Start the run again."
        )
    present = find_present(source, place_of(context), keys)
    return [key for key in keys if key not in present]


def delete_vanished(context: RunContext, progress: ClaimProgress) -> None:
    """Delete rows that the source no longer has, except those that a client put since the run began.

    A row that was renamed goes too, but counts as moved and not as deleted.
    """
    run = context.run
    assert run.seq is not None
    after = run.counts.num_seen
    while True:
        context.check()
        with open_stage(context, progress) as (connection, target):
            vanished = list_staged(connection, target.stage, VANISHED, after=after, limit=_DELETED_PER_BATCH)
        if not vanished:
            return
        keys = leave_out_present(context, [key for _, key in vanished])
        with open_stage(context, progress) as (connection, target):
            renamed = list_renamed(connection, target.stage, keys) if progress.counts.num_moved else []
            gone = sorted(set(keys) - set(renamed))
            remove_items(connection, target.generation, renamed, [run.seq] * len(renamed))
            num_deleted = remove_items(connection, target.generation, gone, [run.seq] * len(gone))
            progress.save(connection, num_deleted=num_deleted)
        after = vanished[-1][0]


# The scrubber of texts may be reading the fill.
PATIENCE_SECONDS: Final = 600.0


def end_fill(context: RunContext, generation_id: int) -> None:
    """Make the rows of the generation's fill, if it has one, ordinary rows. Raise Conflict if it was discarded."""
    with context.engine.connect() as connection:
        if not has_bulk_load(connection, generation_id):
            return

    def pause(seconds: float) -> None:
        context.check()
        # This waits between two tries for a lock. A run that was cancelled or lost ends before the next one.
        time.sleep(seconds)

    def act(step: Callable[[Connection, Generation], None]) -> Generation:
        def hold_and_act(connection: Connection) -> Generation:
            context.hold(connection)  # first, because a run that was cancelled or lost must change nothing
            generation = find_written(connection, generation_id)
            step(connection, generation)
            return generation

        context.check()
        return act_in_short_locks(context.engine, hold_and_act, patience_seconds=PATIENCE_SECONDS, wait=pause)

    generation = act(close_bulk_load)
    for statement in compose_indexes(generation):
        run_build(context.engine, generation_id, statement, {}, lambda _: context.check())
    with context.engine.begin() as connection:
        for name in filled_names(generation_id):
            analyze_table(connection, name)
    act(merge_rows)  # most of it before anybody has to wait
    act(finish_bulk_load)
