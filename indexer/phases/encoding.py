"""Encoding: new and changed texts as a job like any other; what needs no encoding is written before.

The job's id is the run's before anything of it is uploaded, and its place among the writers is that of the run. So an
indexer that takes over finds the job: it waits for one that is complete, and removes an upload that broke off.
"""

from collections.abc import Callable
from typing import Final
from uuid import UUID, uuid4

from indexer.context import RunContext
from indexer.progress import ClaimProgress
from indexer.target import find_target
from vectormill.collections.rows.items import remove_items
from vectormill.domain.errors import JobNotFound, RunError
from vectormill.jobs.deletion import discard_upload
from vectormill.jobs.job import CANCELLED, DEFAULT_PRIORITY, UPLOADING, Job, NewJob
from vectormill.jobs.jobs import find_job
from vectormill.jobs.submission import JobWriter
from vectormill.runs.differences import list_failed_keys, write_metadata
from vectormill.runs.run import ENCODING
from vectormill.runs.run_claims import forget_attempts
from vectormill.runs.stages import CHANGED, NEW, load_changes, require_stage

# Texts in memory at a time, and rows of one transaction.
_TEXTS_PER_BATCH: Final = 200
_ROWS_PER_BATCH: Final = 2000
# Beside the phases, in the run's report.
KEPT_TEXTS: Final = "kept_texts"

# Sleeps so many seconds, or less when the indexer is to stop.
Wait = Callable[[float], object]


class EncodingEnded(RunError):
    """The job that encoded for the run was cancelled or deleted; start the run again."""


def encode(context: RunContext, progress: ClaimProgress, wait: Wait) -> None:
    """`wait` sleeps for the pause between two looks at the job."""
    run = context.run
    job_id = find_own_job(context, progress, run.job_id)
    num_refused = update_metadata(
        context, progress
    )  # first: it finds rows that older jobs have given another text
    if job_id is None and progress.counts.num_new + progress.counts.num_changed > progress.counts.num_moved:
        job_id = submit(context, progress)
    if job_id is not None:
        job = await_job(context, progress, job_id, wait)
        delete_failed(context, progress, job)
    if num_refused:
        context.report(KEPT_TEXTS, {"num_refused": num_refused})


def find_own_job(context: RunContext, progress: ClaimProgress, job_id: UUID | None) -> UUID | None:
    """Return the run's job if it was submitted whole; what is left of a broken upload is removed at once."""
    if job_id is None:
        return None
    with context.engine.begin() as connection:
        progress.save(connection)
        discard_upload(connection, job_id)
        try:
            job = find_job(connection, job_id)
        except JobNotFound:
            return None
        # A job of an earlier reading has another place among the writers, and other texts.
        return job.id if job.state != UPLOADING and job.seq == context.run.seq else None


def submit(context: RunContext, progress: ClaimProgress) -> UUID | None:
    """Everything that is staged and has no vector yet, as one job; None if that is nothing.

    The run is held while anything is written: an indexer that lost it leaves no job in the run's place.
    """
    run = context.run
    assert run.seq is not None
    job_id = uuid4()
    with context.engine.begin() as connection:
        progress.save(connection, job_id=job_id)
        target = find_target(connection, run)
        require_stage(connection, target.stage)
    new_job = NewJob(
        target.spec,
        run.collection,
        int(run.options.get("priority", DEFAULT_PRIORITY)),
        {"run": str(run.id)},
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


def update_metadata(context: RunContext, progress: ClaimProgress) -> int:
    """Give rows whose text is unchanged their metadata, without touching the table that has the vectors.

    Answers how many texts Postgres refused to keep.
    """
    run = context.run
    if progress.counts.num_metadata_only == 0:
        return 0
    after: int | None = 0
    num_refused = 0
    while after is not None:
        context.check()
        with context.engine.begin() as connection:
            progress.save(connection)
            target = find_target(connection, run)
            require_stage(connection, target.stage)
            num_changed, num_without_text, after = write_metadata(
                connection,
                target.stage,
                after=after,
                limit=_ROWS_PER_BATCH,
                keep_text=target.keep_text,
            )
            counts = progress.add(num_changed=num_changed, num_metadata_only=-num_changed)
            progress.save(connection, counts)
        progress.counts = counts
        num_refused += num_without_text
    return num_refused


def await_job(context: RunContext, progress: ClaimProgress, job_id: UUID, wait: Wait) -> Job:
    """Wait until the job has ended, whatever came of its items. Raise EncodingEnded when somebody else ended it.

    Once some items are encoded the run's earlier attempts no longer count: a long job outlives many indexers.
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
                forget_attempts(connection, progress.lease)
            has_advanced = True
        if job.is_terminal:
            return job
        wait(_pause_of(job))


def _pause_of(job: Job) -> float:
    """Short for a job that may be over in a moment, long for one that has hours to go."""
    eta = job.eta_seconds
    return 0.1 if eta is None else min(2.0, max(0.05, 0.1 * eta))


def delete_failed(context: RunContext, progress: ClaimProgress, job: Job) -> None:
    """A text that cannot be encoded has no vector; the one of its former text would be found for what it is not."""
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
        counts = progress.add(num_failed=num_failed - progress.counts.num_failed)
        progress.save(connection, counts)
    progress.counts = counts
    context.report(
        ENCODING,
        {
            "job": str(job.id),
            "num_encoded": job.num_done,
            "num_failed": num_failed,
            "num_vectors_removed": num_deleted,
        },
    )
