"""Counts of open jobs, items and chunks by model, priority or state; the workers are not looked at."""

from dataclasses import dataclass

from sqlalchemy import Connection, text

from vectormill.jobs.job import DISPATCHED_JOB_STATES, OPEN_JOB_STATES, RECEIVED_JOB_STATES


@dataclass(frozen=True, slots=True)
class Waiting:
    """The open jobs of one model and priority. Paused jobs are left out, because they wait for a client.

    `num_items` counts items without a vector or an error. `oldest_seconds` is the age of the oldest job that
    has chunks which no worker holds, without the time in which it was paused; None when workers hold all
    chunks.
    """

    model: str
    priority: int
    num_jobs: int
    num_items: int
    num_pending_chunks: int
    num_queued_chunks: int
    num_leased_chunks: int
    oldest_seconds: float | None


# The predicate on open states repeats that of ix_jobs_in_progress word for word, so that ended jobs are not
# read. Pending chunks are not counted one by one, because there may be millions: their number is the job's
# counter of open chunks minus the dispatched ones, and only as many are dispatched as workers ask for. Each
# state has its own SELECT, so that each reads its partial index.
LIST_WAITING = text(f"""
    WITH dispatched AS (
        SELECT job_id, count(*) FILTER (WHERE state = 'queued') AS num_queued,
               count(*) FILTER (WHERE state = 'leased') AS num_leased
          FROM (SELECT job_id, state FROM vectormill.chunks WHERE state = 'queued'
                 UNION ALL
                SELECT job_id, state FROM vectormill.chunks WHERE state = 'leased') AS chunks
         GROUP BY job_id
    ), open AS (
        SELECT jobs.model, jobs.priority, jobs.num_items - jobs.num_done - jobs.num_failed AS num_items,
               jobs.num_open_chunks, coalesce(dispatched.num_queued, 0) AS num_queued,
               coalesce(dispatched.num_leased, 0) AS num_leased,
               extract(epoch FROM now() - jobs.created_at) - jobs.idle_seconds AS age_seconds
          FROM vectormill.jobs LEFT JOIN dispatched ON dispatched.job_id = jobs.id
         WHERE jobs.state IN {OPEN_JOB_STATES}
           AND jobs.state IN {DISPATCHED_JOB_STATES}
    )
    SELECT model, priority, count(*) AS num_jobs, sum(num_items)::bigint AS num_items,
           sum(greatest(num_open_chunks - num_queued - num_leased, 0))::bigint AS num_pending_chunks,
           sum(num_queued)::bigint AS num_queued_chunks, sum(num_leased)::bigint AS num_leased_chunks,
           max(greatest(age_seconds, 0)) FILTER (WHERE num_open_chunks > num_leased)::float8 AS oldest_seconds
      FROM open GROUP BY model, priority ORDER BY model, priority
""")


def list_waiting(connection: Connection) -> list[Waiting]:
    """List the items that wait for encoding, by model and then by priority, the most urgent first.

    The list is empty when no job is open.
    """
    return [Waiting(*row) for row in connection.execute(LIST_WAITING)]


@dataclass(frozen=True, slots=True)
class Backlog:
    """The number of chunks of one model in one state."""

    model: str
    state: str
    num_chunks: int


# Pending chunks are not counted one by one, because there may be millions: their number is the sum of the
# jobs' counters of open chunks minus the dispatched ones. Each state has its own SELECT, so that each reads
# its partial index.
COUNT_BACKLOG = text(f"""
    WITH dispatched AS (
        SELECT jobs.model, chunks.state, count(*) AS num_chunks
          FROM (SELECT job_id, state FROM vectormill.chunks WHERE state = 'queued'
                 UNION ALL
                SELECT job_id, state FROM vectormill.chunks WHERE state = 'leased') AS chunks
          JOIN vectormill.jobs ON jobs.id = chunks.job_id
         GROUP BY jobs.model, chunks.state
    ), open AS (
        SELECT model, sum(num_open_chunks) AS num_chunks FROM vectormill.jobs
         WHERE state IN {RECEIVED_JOB_STATES}
         GROUP BY model
    )
    SELECT model, state, num_chunks FROM dispatched
     UNION ALL
    SELECT model, 'pending',
           open.num_chunks
           - coalesce((SELECT sum(num_chunks) FROM dispatched WHERE dispatched.model = open.model), 0)::bigint
      FROM open
""")


@dataclass(frozen=True, slots=True)
class OpenJobs:
    """The number of jobs of one model in one state. Ended jobs are left out."""

    model: str
    state: str
    num_jobs: int


# The predicate repeats that of ix_jobs_in_progress word for word, so that ended jobs are not read.
COUNT_OPEN_JOBS = text(f"""
    SELECT model, state, count(*) AS num_jobs FROM vectormill.jobs
     WHERE state IN {OPEN_JOB_STATES}
     GROUP BY model, state
""")


def count_open_jobs(connection: Connection) -> list[OpenJobs]:
    """Count jobs that have not ended, by model and state."""
    return [OpenJobs(*row) for row in connection.execute(COUNT_OPEN_JOBS)]


def count_backlog(connection: Connection) -> list[Backlog]:
    """Count chunks that have not ended, by model and state."""
    return [Backlog(*row) for row in connection.execute(COUNT_BACKLOG)]
