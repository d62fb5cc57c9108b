"""Counts of open jobs, items and chunks by model, priority or state; the workers are not looked at."""

from dataclasses import dataclass

from sqlalchemy import Connection, Engine, text

from vectormill.jobs.job import DISPATCHED_JOB_STATES, RECEIVED_JOB_STATES


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


# Pending chunks are not counted one by one, because there may be millions: their number is that of open chunks
# minus the dispatched ones, and only as many are dispatched as workers ask for. Each state has its own SELECT,
# so that each reads its partial index, and LIMIT 1 makes the planner look each job up; see LIST_ROOMS. The age is
# that of the oldest among the first ten jobs: a job that was paused is younger than its place says, and not all
# can be looked at.
LIST_WAITING = text(f"""
    WITH dispatched AS MATERIALIZED (
        SELECT job_id, count(*) FILTER (WHERE state = 'queued') AS num_queued,
               count(*) FILTER (WHERE state = 'leased') AS num_leased
          FROM (SELECT job_id, state FROM vectormill.chunks WHERE state = 'queued'
                 UNION ALL
                SELECT job_id, state FROM vectormill.chunks WHERE state = 'leased') AS chunks
         GROUP BY job_id
    ), in_hand AS (
        SELECT job.model, job.priority, sum(num_queued)::bigint AS num_queued, sum(num_leased)::bigint AS num_leased
          FROM dispatched
         CROSS JOIN LATERAL (
               SELECT model, priority, state FROM vectormill.jobs WHERE id = dispatched.job_id LIMIT 1) AS job
         WHERE job.state IN {DISPATCHED_JOB_STATES}
         GROUP BY job.model, job.priority
    ), open AS (
        SELECT model, priority, sum(num_jobs)::bigint AS num_jobs, sum(num_items)::bigint AS num_items,
               sum(num_chunks)::bigint AS num_chunks
          FROM vectormill.open_job_counts
         WHERE state IN {DISPATCHED_JOB_STATES}
         GROUP BY model, priority
        HAVING sum(num_jobs) > 0
    )
    SELECT open.model, open.priority, open.num_jobs, open.num_items,
           greatest(open.num_chunks - coalesce(num_queued, 0) - coalesce(num_leased, 0), 0) AS num_pending_chunks,
           coalesce(num_queued, 0) AS num_queued_chunks, coalesce(num_leased, 0) AS num_leased_chunks,
           oldest.seconds AS oldest_seconds
      FROM open
      LEFT JOIN in_hand ON in_hand.model = open.model AND in_hand.priority = open.priority
     CROSS JOIN LATERAL (
           SELECT max(greatest(age_seconds, 0))::float8 AS seconds
             FROM (SELECT extract(epoch FROM now() - created_at) - idle_seconds AS age_seconds
                     FROM vectormill.jobs
                    WHERE jobs.model = open.model AND jobs.priority = open.priority
                      AND jobs.state IN {DISPATCHED_JOB_STATES}
                      AND (EXISTS (SELECT 1 FROM vectormill.chunks WHERE job_id = jobs.id AND state = 'pending')
                           OR jobs.id IN (SELECT job_id FROM dispatched WHERE num_queued > 0))
                    ORDER BY jobs.seq LIMIT 10) AS first) AS oldest
     ORDER BY open.model, open.priority
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


# Pending chunks are counted as in LIST_WAITING.
COUNT_BACKLOG = text(f"""
    WITH dispatched AS (
        SELECT job.model, chunks.state, sum(chunks.num_chunks)::bigint AS num_chunks
          FROM (SELECT job_id, 'queued' AS state, count(*) AS num_chunks
                  FROM vectormill.chunks WHERE state = 'queued' GROUP BY job_id
                 UNION ALL
                SELECT job_id, 'leased', count(*)
                  FROM vectormill.chunks WHERE state = 'leased' GROUP BY job_id) AS chunks
         CROSS JOIN LATERAL (SELECT model FROM vectormill.jobs WHERE id = chunks.job_id LIMIT 1) AS job
         GROUP BY job.model, chunks.state
    ), open AS (
        SELECT model, sum(num_chunks)::bigint AS num_chunks FROM vectormill.open_job_counts
         WHERE state IN {RECEIVED_JOB_STATES}
         GROUP BY model
        HAVING sum(num_jobs) > 0
    )
    SELECT model, state, num_chunks FROM dispatched
     UNION ALL
    SELECT model, 'pending',
           greatest(open.num_chunks
                    - coalesce((SELECT sum(num_chunks) FROM dispatched WHERE dispatched.model = open.model), 0), 0)
               ::bigint
      FROM open
""")


@dataclass(frozen=True, slots=True)
class OpenJobs:
    """The number of jobs of one model in one state. Ended jobs are left out."""

    model: str
    state: str
    num_jobs: int


COUNT_OPEN_JOBS = text("""
    SELECT model, state, sum(num_jobs)::bigint AS num_jobs FROM vectormill.open_job_counts
     GROUP BY model, state
    HAVING sum(num_jobs) > 0
""")


def count_open_jobs(connection: Connection) -> list[OpenJobs]:
    """Count jobs that have not ended, by model and state."""
    return [OpenJobs(*row) for row in connection.execute(COUNT_OPEN_JOBS)]


def count_backlog(connection: Connection) -> list[Backlog]:
    """Count chunks that have not ended, by model and state."""
    return [Backlog(*row) for row in connection.execute(COUNT_BACKLOG)]


# Paused jobs count too. Items of an upload count only once it is complete.
COUNT_PENDING_ITEMS = text("""
    SELECT CAST(coalesce(sum(num_items), 0) AS bigint) FROM vectormill.open_job_counts
""")


def count_pending_items(connection: Connection) -> int:
    """Return the number of items without a result; each job counts with at most a 64th of its items too many."""
    number: int = connection.execute(COUNT_PENDING_ITEMS).scalar_one()
    return number


# Nothing is done before the rows are many more than their sums, so that each row is read here a few times at most.
# Rows of transactions that have not committed are not seen, and are added later.
ADD_UP_COUNTS = text("""
    WITH counted AS (
        DELETE FROM vectormill.open_job_counts
         WHERE (SELECT sum(num_rows) > 1000 + 2 * count(*)
                  FROM (SELECT count(*) AS num_rows FROM vectormill.open_job_counts
                         GROUP BY model, state, priority, generation_id) AS groups)
        RETURNING *
    )
    INSERT INTO vectormill.open_job_counts (model, state, priority, generation_id, num_jobs, num_items, num_chunks)
    SELECT model, state, priority, generation_id, sum(num_jobs), sum(num_items), sum(num_chunks) FROM counted
     GROUP BY model, state, priority, generation_id
    HAVING sum(num_jobs) <> 0
""")


def add_up_counts(engine: Engine) -> None:
    """Replace the rows of `open_job_counts` by their sums once they are many. Only the elected scheduler does."""
    with engine.begin() as connection:
        connection.execute(ADD_UP_COUNTS)
