"""Count ended chunks in their job's row, so that commits of one job do not wait for each other.

A job near its end, or whose turn it is, is counted at once, if nobody holds its row; then the transaction that ends the
last chunk also ends the job. Any other commit adds a row to `job_increments` instead. The next one that counts the
job, or the scheduler, adds these rows up. A job cannot end before, since each of them is still an open chunk of it.
"""

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from vectormill.db.parameters import to_jsonb
from vectormill.jobs.chunk import ChunkOutcome, Claim

# With at most this many open chunks every commit tries to count its job at once. Of more, one chunk in 64 does: so
# progress is seen without the scheduler, too.
_NEAR_END_CHUNKS: Final = 256
_CHUNKS_PER_TURN: Final = 64

_SUMMED: Final = (
    "num_chunks", "num_done", "num_failed", "num_tokens", "num_computed_tokens", "num_truncated", "num_passages",
    "num_reused", "num_repeated",
)  # fmt: skip

# The seconds between two marks of a job's pace: its recent rate is that of the last one to two times as long.
_PACE_SECONDS: Final = 120
_SECONDS: Final = "(extract(epoch FROM now() - jobs.started_at)::float8 - jobs.idle_seconds)"
_ENDED: Final = "(jobs.num_done + jobs.num_failed + sums.num_done + sums.num_failed)::float8"

# A row that somebody holds is skipped. The sums are joined and not looked up in SET: if another transaction has changed
# the row since the statement began, only SET is evaluated again, with the row as it is now.
_COUNT: Final = """
    WITH job AS MATERIALIZED (
        SELECT id FROM vectormill.jobs WHERE id = :job_id{is_wanted} FOR NO KEY UPDATE SKIP LOCKED
    ){noted}, earlier AS (
        DELETE FROM vectormill.job_increments AS increment USING job WHERE increment.job_id = job.id
        RETURNING {names}, stage_seconds
    ), counted AS MATERIALIZED (
        {own}SELECT * FROM earlier
    ), sums AS MATERIALIZED (
        SELECT {totals},
               (SELECT coalesce(jsonb_object_agg(stage, seconds), '{{}}')
                  FROM (SELECT stage, sum(seconds::float8) AS seconds
                          FROM counted
                         CROSS JOIN LATERAL jsonb_each_text(counted.stage_seconds) AS part (stage, seconds)
                         GROUP BY stage) AS by_stage) AS stage_seconds
          FROM counted
    )
    UPDATE vectormill.jobs
       SET num_open_chunks = num_open_chunks - sums.num_chunks,
           {additions},
           stage_seconds = (
               SELECT coalesce(jsonb_object_agg(stage, round((total)::numeric, 4)), '{{}}')
                 FROM (SELECT stage, sum(seconds::float8) AS total
                         FROM (SELECT * FROM jsonb_each_text(jobs.stage_seconds)
                               UNION ALL
                               SELECT * FROM jsonb_each_text(sums.stage_seconds)) AS part (stage, seconds)
                        GROUP BY stage) AS totals),
           pace = CASE
               WHEN jobs.pace IS NULL THEN {mark} || {mark}
               WHEN {seconds} - jobs.pace[3] >= {pace_seconds} THEN jobs.pace[3:4] || {mark}
               ELSE jobs.pace END,
           updated_at = now(),
           finished_at = CASE WHEN num_open_chunks = sums.num_chunks THEN now() END,
           state = CASE
               WHEN num_open_chunks > sums.num_chunks THEN state
               WHEN state = 'cancelling' THEN 'cancelled'
               WHEN jobs.num_failed + sums.num_failed = 0 THEN 'completed'
               WHEN jobs.num_done + sums.num_done = 0 THEN 'failed'
               ELSE 'completed_with_errors' END
      FROM job, sums
     WHERE jobs.id = job.id AND sums.num_chunks > 0
    RETURNING num_open_chunks = 0 AS is_finished
"""
_NAMES: Final = ", ".join(_SUMMED)
_OWN: Final = "CAST(:num_chunks AS integer) AS num_chunks, " + ", ".join(
    f"CAST(:{name} AS bigint) AS {name}" for name in _SUMMED[1:]
)


def _compose(is_wanted: str = "", noted: str = "", own: str = "") -> str:
    return _COUNT.format(
        is_wanted=is_wanted,
        noted=noted,
        own=own,
        names=_NAMES,
        totals=", ".join(f"coalesce(sum({name}), 0) AS {name}" for name in _SUMMED),
        mark=f"ARRAY[{_SECONDS}, {_ENDED}]",
        seconds=_SECONDS,
        pace_seconds=_PACE_SECONDS,
        additions=", ".join(f"{name} = jobs.{name} + sums.{name}" for name in _SUMMED[1:]),
    )


# This is the last statement of a commit, so the job's row is locked only until COMMIT.
COUNT_CHUNK = text(
    _compose(
        f" AND (num_open_chunks <= {_NEAR_END_CHUNKS} OR CAST(:is_turn AS boolean))",
        f""", noted AS (
        INSERT INTO vectormill.job_increments (job_id, {_NAMES}, stage_seconds)
        SELECT CAST(:job_id AS uuid), {_OWN}, CAST(:stage_seconds AS jsonb) WHERE NOT EXISTS (SELECT FROM job)
    )""",
        f"SELECT {_OWN}, CAST(:stage_seconds AS jsonb) AS stage_seconds UNION ALL ",
    )
)
ADD_UP = text(_compose())
LIST_UNCOUNTED = text("SELECT job_id FROM vectormill.job_increments GROUP BY job_id LIMIT 1000")
FORGET_REMOVED = text("""
    DELETE FROM vectormill.job_increments
     WHERE job_id = :job_id AND NOT EXISTS (SELECT FROM vectormill.jobs WHERE id = :job_id)
""")


def count_chunk(
    connection: Connection, claim: Claim, outcome: ChunkOutcome, num_done: int, num_failed: int
) -> bool:
    """Count an ended chunk in the transaction that ends it. Return True if this has ended the job."""
    values = {
        "job_id": claim.job_id,
        "is_turn": claim.chunk_id % _CHUNKS_PER_TURN == 0,
        "num_chunks": 1,
        "num_done": num_done,
        "num_failed": num_failed,
        "num_tokens": outcome.num_tokens,
        "num_computed_tokens": outcome.num_computed_tokens,
        "num_truncated": len(outcome.truncated),
        "num_passages": outcome.num_passages,
        "num_reused": outcome.num_reused,
        "num_repeated": outcome.num_repeated,
        "stage_seconds": to_jsonb(dict(outcome.stage_seconds)),
    }
    return _is_finished(connection, values, COUNT_CHUNK)


def add_up_job(connection: Connection, job_id: UUID) -> bool:
    """Add up what commits have noted of a job, unless somebody else holds its row. Return True if this has ended it."""
    return _is_finished(connection, {"job_id": job_id}, ADD_UP)


def _is_finished(connection: Connection, values: Mapping[str, Any], statement: Any) -> bool:
    row = connection.execute(statement, values).one_or_none()
    return row is not None and bool(row.is_finished)


def add_up_jobs(engine: Engine) -> int:
    """Add up what commits have noted, each job in a transaction of its own. Return the number of jobs."""
    with engine.connect() as connection:
        job_ids = list(connection.execute(LIST_UNCOUNTED).scalars())
    for job_id in job_ids:
        with engine.begin() as connection:
            add_up_job(connection, job_id)
            connection.execute(FORGET_REMOVED, {"job_id": job_id})
    return len(job_ids)
