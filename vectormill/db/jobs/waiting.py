"""What jobs wait for, read in a few short statements whose cost does not grow with the number of ended chunks."""

from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

from sqlalchemy import Connection, text

from vectormill.db.workers import ALIVE_SECONDS, REDIS_AWAY, REDIS_FULL, SCHEDULER, list_signs_of_life
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.jobs.chunk_size import UNESTIMATED_ITEM_TOKENS
from vectormill.domain.jobs.job import PAUSED, STEERABLE_JOB_STATES, Job
from vectormill.domain.jobs.waiting import (
    InHand,
    ServingWorker,
    Surroundings,
    explain_absence,
    explain_wait,
)

# Reports are a few kilobytes of JSON each: only those of workers that serve a model in question are opened, and once.
LIST_SERVING_WORKERS = text("""
    SELECT name, model, slots, told.revision, told.pooling, told.state, told.state_reason,
           max_tokens_in_flight, extract(epoch FROM now() - started_at)::float8 AS seconds_since_start
      FROM vectormill.workers
     CROSS JOIN LATERAL jsonb_to_record(CASE WHEN model = ANY(CAST(:models AS text[])) THEN report ELSE '{}' END)
                     AS told (revision text, pooling text, state text, state_reason text)
     WHERE heartbeat_at > now() - make_interval(secs => :alive_seconds)
     ORDER BY name LIMIT 10000
""")

# One state a SELECT, so that each reads its partial index; see LIST_ROOMS. As many rows as jobs with dispatched chunks.
LIST_IN_HAND = text("""
    SELECT jobs.id, jobs.model, jobs.priority, held.num_queued, held.num_leased, held.oldest_queued_seconds,
           held.num_tokens
      FROM (SELECT job_id, count(queued_at)::int AS num_queued, count(lease_until)::int AS num_leased,
                   coalesce(extract(epoch FROM now() - min(queued_at)), 0)::float8 AS oldest_queued_seconds,
                   sum(coalesce(estimated_tokens, num_items * CAST(:item_tokens AS integer)))::bigint AS num_tokens
              FROM (SELECT job_id, queued_at, CAST(NULL AS timestamptz) AS lease_until, num_items, estimated_tokens
                      FROM vectormill.chunks WHERE state = 'queued'
                     UNION ALL
                    SELECT job_id, NULL, lease_until, num_items, estimated_tokens
                      FROM vectormill.chunks WHERE state = 'leased' AND lease_until > now()) AS chunks
             GROUP BY job_id) AS held
      JOIN vectormill.jobs ON jobs.id = held.job_id
     WHERE jobs.model = ANY(CAST(:models AS text[]))
""")

# CASE keeps the order: a job with a chunk that could be dispatched now, nearly always its first, is asked no more. As a
# join, 20,000 waiting chunks cost 17 ms. ORDER BY leads to the partial index; EXISTS read the whole table.
LIST_SETBACKS = text("""
    SELECT waiting.job_id,
           CASE WHEN (SELECT id FROM vectormill.chunks
                       WHERE job_id = waiting.job_id AND state = 'pending' AND available_at <= now()
                       ORDER BY seq LIMIT 1) IS NULL
                THEN (SELECT error FROM vectormill.chunks
                       WHERE job_id = waiting.job_id AND state = 'pending' AND error IS NOT NULL
                       ORDER BY seq LIMIT 1) END AS error
      FROM unnest(CAST(:job_ids AS uuid[])) AS waiting (job_id)
""")


def explain_waits(connection: Connection, jobs: Sequence[Job]) -> dict[UUID, str]:
    """Why each of these jobs makes no progress; those that do, or have ended, are left out."""
    waiting = [job for job in jobs if job.state in STEERABLE_JOB_STATES]
    if not waiting:
        return {}
    around = load_surroundings(connection, [job for job in waiting if job.state != PAUSED])
    reasons = {job.id: explain_wait(job, around) for job in waiting}
    return {job_id: reason for job_id, reason in reasons.items() if reason is not None}


def explain_query_wait(connection: Connection, spec: EncodingSpec) -> str | None:
    """Why no worker answers a query of this spec, as far as Postgres knows."""
    values = {"models": [spec.model], "alive_seconds": ALIVE_SECONDS}
    workers = [ServingWorker(*row) for row in connection.execute(LIST_SERVING_WORKERS, values)]
    if (absence := explain_absence(spec, workers)) is not None:
        return absence
    if REDIS_AWAY in list_signs_of_life(connection):
        return 'Redis cannot be reached; see docs/OPERATIONS.md, "Troubleshooting".'
    return None


def load_surroundings(connection: Connection, jobs: Sequence[Job]) -> Surroundings:
    """What these queued or running jobs may wait for. Asks nothing when there is none, and little of those at work:
    they are asked after all the time.
    """
    nothing = Surroundings(
        [], [], is_scheduler_alive=True, is_redis_away=False, is_redis_full=False, setbacks={}
    )
    if not jobs:
        return nothing
    models = {"models": sorted({job.spec.model for job in jobs})}
    values = models | {"alive_seconds": ALIVE_SECONDS}
    workers = [ServingWorker(*row) for row in connection.execute(LIST_SERVING_WORKERS, values)]
    sizes = models | {"item_tokens": UNESTIMATED_ITEM_TOKENS}
    in_hand = [InHand(*row) for row in connection.execute(LIST_IN_HAND, sizes)]
    seen = replace(nothing, workers=workers, in_hand=in_hand)
    if {job.id for job in jobs} <= {chunks.job_id for chunks in in_hand if chunks.num_leased}:
        return seen
    held = {chunks.job_id for chunks in in_hand}
    idle = {"job_ids": [job.id for job in jobs if job.id not in held]}
    signs = list_signs_of_life(connection)
    return replace(
        seen,
        is_scheduler_alive=SCHEDULER in signs,
        is_redis_away=REDIS_AWAY in signs,
        is_redis_full=REDIS_FULL in signs,
        setbacks={row.job_id: row.error for row in connection.execute(LIST_SETBACKS, idle) if row.error},
    )
