"""Finalizing: when a batch's job has ended, its lines are counted and its files are made.

The error file is written. The output file is only measured, since its content is made from the job's results
whenever it is read. Each attempt starts from the beginning: the files become visible in the transaction that
ends the batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from uuid import UUID, uuid4

from sqlalchemy import Engine

from vectormill.batches.answers import (
    AnsweredLine,
    AnswerWriter,
    Refusal,
    join_lines,
    read_answers,
    read_refusals,
)
from vectormill.batches.batches import HeldBatch, add_output, end_batch, fail_batch
from vectormill.batches.files import FileWriter
from vectormill.batches.request_batch import (
    BATCH_OUTPUT,
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    BatchFault,
    RequestBatch,
)
from vectormill.domain.errors import JobNotFound
from vectormill.jobs.deletion import discard_upload
from vectormill.jobs.job import CANCELLED as JOB_CANCELLED
from vectormill.jobs.job import UPLOADING, Job
from vectormill.jobs.jobs import find_job

LINES_BETWEEN_LOOKS: Final = 256
DAY_SECONDS: Final = 86400.0


@dataclass(slots=True)
class _Tally:
    num_completed: int = 0
    num_failed: int = 0
    output_bytes: int = 0


def finalize(held: HeldBatch) -> None:
    """Make the files of a batch whose job has ended, and end the batch. Raise LeaseLost and Stopping."""
    batch = held.batch
    job = find_written_job(held, batch)
    if job is not None:
        write_answers(held, job)
    elif batch.state == CANCELLING:  # cancelled before its job was queued
        with held.engine.begin() as connection:
            end_batch(connection, held.lease, CANCELLED)
    else:
        fault = BatchFault(
            "job_removed", f"The job {batch.job_id} was removed before its answers were written."
        )
        with held.engine.begin() as connection:
            fail_batch(connection, held.lease, [fault], batch.num_lines)


def find_written_job(held: HeldBatch, batch: RequestBatch) -> Job | None:
    """Return the batch's job, or None if it was never completely submitted; remove an incomplete upload."""
    if batch.job_id is None:
        return None
    with held.engine.begin() as connection:
        discard_upload(connection, batch.job_id)
        try:
            job = find_job(connection, batch.job_id)
        except JobNotFound:
            return None
    return None if job.state == UPLOADING else job


def choose_end(batch: RequestBatch, job: Job) -> str:
    """Return the final state of a batch whose job has ended."""
    if batch.cancelling_at is not None:
        return CANCELLED
    if job.state != JOB_CANCELLED:
        return COMPLETED
    return EXPIRED if batch.is_overdue else CANCELLED


def write_answers(held: HeldBatch, job: Job) -> None:
    """Count the lines, write the error file, and end the batch in the last transaction."""
    batch, end_state = held.batch, choose_end(held.batch, job)
    lines = AnswerWriter(batch, job.spec, end_state)
    tally = _Tally()
    with FileWriter(held.engine) as errors:
        for number, line in enumerate(merge_lines(held.engine, batch, job.id)):
            if number % LINES_BETWEEN_LOOKS == 0:
                held.keep()
            if isinstance(line, Refusal):
                errors.add(lines.write_refusal(line))
                tally.num_failed += 1
            elif line.is_answered:
                tally.output_bytes += len(lines.write_answer(line))
                tally.num_completed += 1
            else:
                errors.add(lines.write_failure(line))
                tally.num_failed += 1
        _end(held, job, errors, tally, end_state)


def _end(held: HeldBatch, job: Job, errors: FileWriter, tally: _Tally, end_state: str) -> None:
    batch = held.batch
    lifetime = batch.output_lifetime_seconds or held.settings.file_retention_days * DAY_SECONDS
    output_file_id: UUID | None = uuid4() if tally.num_completed else None
    error_file_id = errors.id if tally.num_failed else None
    with held.engine.begin() as connection:
        held.lease.keep(connection)
        if output_file_id is not None:
            add_output(connection, batch, output_file_id, tally.output_bytes, lifetime)
        if error_file_id is not None:
            errors.finish_in(connection, BATCH_OUTPUT, f"{batch.name}_error.jsonl", lifetime)
        end_batch(
            connection,
            held.lease,
            end_state,
            num_completed=tally.num_completed,
            num_failed=tally.num_failed,
            num_tokens=job.num_tokens,
            output_file_id=output_file_id,
            error_file_id=error_file_id,
        )


def merge_lines(engine: Engine, batch: RequestBatch, job_id: UUID) -> Iterator[AnsweredLine | Refusal]:
    """Yield the answered and the refused lines of a batch, in the order of the file."""
    refusals = read_refusals(engine, batch.id)
    refusal = next(refusals, None)
    for line in join_lines(read_answers(engine, job_id), batch.endpoint):
        while refusal is not None and refusal.line < line.line:
            yield refusal
            refusal = next(refusals, None)
        yield line
    if refusal is not None:
        yield refusal
        yield from refusals
