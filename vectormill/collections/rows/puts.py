"""Puts of single items: small jobs whose end a client waits for, and which go when it was told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, text

from vectormill.jobs.item import ItemFailure
from vectormill.jobs.job import DELETING, TERMINAL_JOB_STATES


@dataclass(frozen=True, slots=True)
class PutEnd:
    """The end of a job of puts. `failures` are by key; `state` is None when the job is gone."""

    job_id: UUID
    state: str | None
    finished_at: datetime | None
    failures: Mapping[str, ItemFailure]


# Asked up to a hundred times a second, for all jobs that are waited for: by their ids.
FIND_PUTS: Final = text("""
    SELECT id, state, finished_at, num_failed FROM vectormill.jobs WHERE id = ANY(CAST(:job_ids AS uuid[]))
""")

LIST_PUT_FAILURES: Final = text("""
    SELECT job_id, key, code, detail FROM vectormill.item_errors WHERE job_id = ANY(CAST(:job_ids AS uuid[]))
""")


def find_ended_puts(connection: Connection, job_ids: Sequence[UUID]) -> list[PutEnd]:
    """Return the ends of those jobs that have ended."""
    rows = {row.id: row for row in connection.execute(FIND_PUTS, {"job_ids": list(job_ids)})}
    failed = [row.id for row in rows.values() if row.num_failed and row.state in TERMINAL_JOB_STATES]
    failures: dict[UUID, dict[str, ItemFailure]] = {job_id: {} for job_id in failed}
    if failed:
        for row in connection.execute(LIST_PUT_FAILURES, {"job_ids": failed}):
            failures[row.job_id][row.key] = ItemFailure(row.code, row.detail)
    ends = []
    for job_id in job_ids:
        job = rows.get(job_id)
        if job is None or job.state == DELETING:
            ends.append(PutEnd(job_id, None, None, {}))
        elif job.state in TERMINAL_JOB_STATES:
            ends.append(PutEnd(job_id, job.state, job.finished_at, failures.get(job_id, {})))
    return ends


# Chunks go with them. Nobody holds a chunk of a job that has ended; one that is being retried has not.
DELETE_ENDED_PUTS: Final = text("""
    DELETE FROM vectormill.jobs
     WHERE id = ANY(CAST(:job_ids AS uuid[])) AND finished_at IS NOT NULL AND forget_at = 'infinity'
""")


def delete_ended_puts(connection: Connection, job_ids: Sequence[UUID]) -> None:
    """Removes jobs whose clients were answered, and the texts with them."""
    connection.execute(DELETE_ENDED_PUTS, {"job_ids": list(job_ids)})
