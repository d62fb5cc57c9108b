"""SQL of the dispatcher: jobs that need workers, capacity of workers, marking of chunks, and wake-ups."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import psycopg
from sqlalchemy import Connection, text

from vectormill.jobs.chunk import LARGEST_CHUNK_TOKENS, Dispatch
from vectormill.jobs.job import (
    DISPATCHED_JOB_STATES,
    LEAST_URGENT_PRIORITY,
    MOST_URGENT_PRIORITY,
    TENDED_JOB_STATES,
)
from vectormill.jobs.transitions import MARK_QUEUED, RECALL_DISPATCHES
from vectormill.workers.workers import IS_ALIVE


@dataclass(frozen=True, slots=True)
class Demand:
    """A job with chunks that could be dispatched now.

    `waited_seconds` is the time since the job last made progress. `chunk_tokens` are the estimated tokens of
    its next chunk. `num_open_chunks` includes chunks that are already dispatched.
    """

    job_id: UUID
    seq: int
    model: str
    priority: int
    waited_seconds: float
    chunk_tokens: int
    num_open_chunks: int


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """The capacity of a model's live workers, and how much of it queued and leased chunks occupy.

    Chunks are limited by slots, and estimated tokens by what the workers ask for. Chunks of interactive jobs
    are counted separately, and their tokens are not counted.
    """

    model: str
    slots: int
    outstanding: int
    interactive: int
    max_tokens: int
    outstanding_tokens: int


NEXT_CHUNK: Final = """LATERAL (
    SELECT estimated_tokens AS chunk_tokens
      FROM vectormill.chunks
     WHERE job_id = jobs.id AND state = 'pending' AND available_at <= now()
     ORDER BY chunks.seq LIMIT 1) AS next_chunk"""

# The limit is per model, so that thousands of jobs whose model no worker serves do not hide those of another.
# A job ages while it makes no progress, and not while it is served; otherwise a bulk job that runs all night
# would overtake everything else. The statement runs ten times a second or more, so it reads the beginning of
# an index and stops: 3 ms with 100,000 open jobs. Only the next chunk of each job is read, since those after
# it have about as many tokens. Jobs of a generation that is on hold are left out: see generations.py.
LIST_DEMANDS = text(f"""
    WITH held AS MATERIALIZED (SELECT id FROM vectormill.generations WHERE held_until > now())
    SELECT waiting.id, seq, model, priority, extract(epoch FROM now() - updated_at)::float8, chunk_tokens,
           num_open_chunks
      FROM (SELECT urgent.*
              FROM unnest(CAST(:models AS text[])) AS served (model)
             CROSS JOIN LATERAL (
                   SELECT id, jobs.seq, model, priority, updated_at, chunk_tokens, num_open_chunks
                     FROM vectormill.jobs
                    CROSS JOIN {NEXT_CHUNK}
                    WHERE jobs.model = served.model AND jobs.state IN {DISPATCHED_JOB_STATES}
                      AND coalesce(jobs.generation_id, 0) <> ALL(ARRAY(SELECT id FROM held))
                    ORDER BY priority, jobs.seq
                    LIMIT :limit) AS urgent
             UNION
            SELECT id, jobs.seq, model, priority, updated_at, chunk_tokens, num_open_chunks
              FROM vectormill.jobs
             CROSS JOIN {NEXT_CHUNK}
             WHERE id = ANY(CAST(:aged AS uuid[])) AND jobs.state IN {DISPATCHED_JOB_STATES}
               AND coalesce(jobs.generation_id, 0) <> ALL(ARRAY(SELECT id FROM held))) AS waiting
""")


def list_demands(
    connection: Connection, models: Sequence[str], limit: int, aged: Sequence[UUID] = ()
) -> list[Demand]:
    """List jobs of these models that have chunks to dispatch.

    These are at most `limit` jobs of each model, the most urgent and oldest first, and the jobs named in
    `aged`.
    """
    values = {"models": list(models), "limit": limit, "aged": list(aged)}
    return [Demand(*row) for row in connection.execute(LIST_DEMANDS, values)]


# Jobs are ordered by the moment at which they would have aged to the most urgent class, so that later jobs
# cannot overtake forever. Only the first jobs of each priority are looked at, because they have waited longest.
LIST_AGED_JOBS = text(f"""
    SELECT aged.id
      FROM unnest(CAST(:models AS text[])) AS served (model)
     CROSS JOIN LATERAL (
           SELECT first.id FROM generate_series({MOST_URGENT_PRIORITY}, {LEAST_URGENT_PRIORITY}) AS class (priority)
            CROSS JOIN LATERAL (
                  SELECT id, priority, updated_at FROM vectormill.jobs
                   WHERE jobs.model = served.model AND jobs.priority = class.priority
                     AND state IN {DISPATCHED_JOB_STATES}
                   ORDER BY seq LIMIT :limit) AS first
            WHERE updated_at < now() - make_interval(secs => :ageing_seconds)
            ORDER BY updated_at + make_interval(secs => first.priority * :ageing_seconds)
            LIMIT :limit) AS aged
""")


def list_aged_jobs(
    connection: Connection, models: Sequence[str], ageing_seconds: float, limit: int
) -> list[UUID]:
    """List jobs that have waited long enough to be raised in priority, at most `limit` of each model.

    They are in the order in which they are to be served.
    """
    values = {"models": list(models), "ageing_seconds": float(ageing_seconds), "limit": limit}
    return list(connection.execute(LIST_AGED_JOBS, values).scalars())


# Interactive chunks are counted separately, because they have their own slots. A lease counts only while
# its owner is alive: a dead worker's leases must not occupy capacity of the surviving workers until they
# expire. Each state has its own SELECT, because a partial index serves state = 'queued' but no IN; with a
# million ended chunks that is 1 ms instead of 236. LIMIT 1 makes the planner look each job up: a join of
# thousands of jobs is planned as a scan of all open ones.
LIST_ROOMS = text(f"""
    WITH alive AS MATERIALIZED (
        SELECT model, slots, left(incarnation::text, 8) AS tag,
               coalesce(max_tokens_in_flight, slots * CAST({LARGEST_CHUNK_TOKENS} AS bigint)) AS max_tokens
          FROM vectormill.workers
         WHERE {IS_ALIVE} AND slots > 0
    )
    SELECT slots.model, slots.slots, coalesce(held.outstanding, 0), coalesce(held.interactive, 0),
           slots.max_tokens, coalesce(held.tokens, 0)
      FROM (SELECT model, sum(slots)::int AS slots, sum(max_tokens)::bigint AS max_tokens
              FROM alive GROUP BY model) AS slots
      LEFT JOIN (SELECT job.model, sum(num_chunks) FILTER (WHERE job.priority > 0)::int AS outstanding,
                        sum(num_chunks) FILTER (WHERE job.priority = 0)::int AS interactive,
                        sum(num_tokens) FILTER (WHERE job.priority > 0)::bigint AS tokens
                   FROM (SELECT job_id, count(*) AS num_chunks, sum(estimated_tokens) AS num_tokens
                           FROM (SELECT job_id, estimated_tokens
                                   FROM vectormill.chunks WHERE state = 'queued'
                                  UNION ALL
                                 SELECT job_id, estimated_tokens FROM vectormill.chunks
                                  WHERE state = 'leased' AND right(lease_owner, 8) IN (SELECT tag FROM alive))
                                AS chunks
                          GROUP BY job_id) AS dispatched
                  CROSS JOIN LATERAL (
                        SELECT model, priority FROM vectormill.jobs WHERE id = dispatched.job_id LIMIT 1) AS job
                  GROUP BY job.model) AS held ON held.model = slots.model
""")


def list_rooms(connection: Connection) -> list[WorkerCapacity]:
    """Return capacity and load of each model that has a live worker.

    A worker that sets no token limit gets as many chunks as it has slots, whatever their size.
    """
    return [WorkerCapacity(*row) for row in connection.execute(LIST_ROOMS)]


START_JOBS = text("""
    UPDATE vectormill.jobs SET state = 'running', started_at = coalesce(started_at, now()), updated_at = now()
     WHERE id = ANY(CAST(:job_ids AS uuid[])) AND state = 'queued'
""")


def mark_queued(connection: Connection, shares: Sequence[tuple[UUID, int]]) -> list[Dispatch]:
    """Mark up to the given number of chunks of each job as queued.

    Publish the returned dispatches only after COMMIT.
    """
    values = {
        "job_ids": [job_id for job_id, _ in shares],
        "counts": [count for _, count in shares],
    }
    connection.execute(START_JOBS, {"job_ids": values["job_ids"]})
    return [Dispatch(*row) for row in connection.execute(MARK_QUEUED, values)]


# There are only a few queued chunks for each worker. They are listed in the order of their dispatch.
LIST_QUEUED = text("""
    SELECT chunk.id, chunk.dispatch_seq, chunk.job_id, chunk.seq, chunk.num_items, job.model, job.priority
      FROM vectormill.chunks AS chunk
     CROSS JOIN LATERAL (SELECT model, priority FROM vectormill.jobs WHERE id = chunk.job_id LIMIT 1) AS job
     WHERE chunk.state = 'queued' ORDER BY chunk.queued_at LIMIT 10000
""")


def list_queued(connection: Connection) -> list[Dispatch]:
    """List dispatches that nobody has claimed, the oldest first."""
    return [Dispatch(*row) for row in connection.execute(LIST_QUEUED)]


def recall_dispatches(connection: Connection, dispatches: Sequence[Dispatch]) -> int:
    """Make dispatched chunks `pending` again unless they were claimed meanwhile.

    Return the number of chunks.
    """
    values = {
        "chunk_ids": [dispatch.chunk_id for dispatch in dispatches],
        "dispatch_seqs": [dispatch.dispatch_seq for dispatch in dispatches],
    }
    return len(connection.execute(RECALL_DISPATCHES, values).all())


LISTEN_FOR_JOBS: Final = "LISTEN vectormill_jobs"

HAS_OPEN_JOBS: Final = f"""
    SELECT EXISTS (SELECT 1 FROM vectormill.jobs WHERE state IN {TENDED_JOB_STATES})
"""


def has_open_jobs(driver: psycopg.Connection[Any]) -> bool:
    """Return whether any job may have chunks to dispatch, recall or end."""
    row = driver.execute(HAS_OPEN_JOBS).fetchone()
    return row is not None and bool(row[0])


def listen_for_jobs(driver: psycopg.Connection[Any]) -> None:
    """Subscribe this connection to the notifications of new jobs, which has_heard_of_job reads."""
    driver.execute(LISTEN_FOR_JOBS)


def has_heard_of_job(driver: psycopg.Connection[Any]) -> bool:
    """Return whether a job has arrived since the last call, without waiting."""
    return bool(list(driver.notifies(timeout=0)))
