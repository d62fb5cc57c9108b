"""Fail jobs whose model no live worker has been able to load for a long time."""

from uuid import UUID

from sqlalchemy import Connection, text

from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.chunk import insert_errors, read_keys
from vectormill.jobs.item import MODEL_NOT_LOADED, ItemFailure
from vectormill.jobs.job import DISPATCHED_JOB_STATES
from vectormill.jobs.waiting import LIST_SERVING_WORKERS, ServingWorker, explain_load_failure
from vectormill.workers.workers import ALIVE_SECONDS

# Nearly always no model is failing, and then no other statement is run.
LIST_FAILING_MODELS = text("""
    SELECT DISTINCT model FROM vectormill.workers
     WHERE heartbeat_at > now() - make_interval(secs => :alive_seconds) AND slots = 0
""")

LIST_STUCK_JOBS = text(f"""
    SELECT id, spec FROM vectormill.jobs
     WHERE model = ANY(CAST(:models AS text[])) AND state IN {DISPATCHED_JOB_STATES}
       AND updated_at <= now() - make_interval(secs => :seconds)
     ORDER BY model, priority, seq LIMIT 10000
""")

# A locked or dispatched chunk is left to a later round: a worker has it, or the reaper makes it pending
# again.
FAIL_WAITING_CHUNKS = text("""
    WITH waiting AS (
        SELECT id, only_items FROM vectormill.chunks WHERE job_id = :job_id AND state = 'pending'
         ORDER BY seq LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
    ), failed AS (
        UPDATE vectormill.chunks AS chunk SET state = 'failed', error = NULL, only_items = NULL
          FROM waiting WHERE chunk.id = waiting.id
        RETURNING chunk.id, chunk.first_item, waiting.only_items
    )
    SELECT failed.id, failed.first_item, failed.only_items, payload.items
      FROM failed JOIN vectormill.chunk_payloads AS payload ON payload.chunk_id = failed.id
""")

# `updated_at` changes only with the last chunk, because the next round finds a large job by it.
COUNT_FAILED = text("""
    UPDATE vectormill.jobs
       SET num_open_chunks = num_open_chunks - :num_chunks, num_failed = num_failed + :num_failed,
           updated_at = CASE WHEN num_open_chunks = :num_chunks THEN now() ELSE updated_at END,
           finished_at = CASE WHEN num_open_chunks = :num_chunks THEN now() END,
           state = CASE WHEN num_open_chunks > :num_chunks THEN state
                        WHEN state = 'cancelling' THEN 'cancelled'
                        WHEN num_done = 0 THEN 'failed'
                        ELSE 'completed_with_errors' END
     WHERE id = :job_id
""")


def find_stuck_jobs(connection: Connection, seconds: float) -> dict[UUID, str]:
    """Return the reason for each job whose model no live worker has been able to load for so many seconds."""
    alive = {"alive_seconds": ALIVE_SECONDS}
    models = list(connection.execute(LIST_FAILING_MODELS, alive).scalars())
    if not models:
        return {}
    workers = [
        ServingWorker(*row) for row in connection.execute(LIST_SERVING_WORKERS, alive | {"models": models})
    ]
    jobs = connection.execute(LIST_STUCK_JOBS, {"models": models, "seconds": seconds})
    reasons = {
        row.id: explain_load_failure(EncodingSpec.from_json(row.spec), workers, seconds) for row in jobs
    }
    return {job_id: reason for job_id, reason in reasons.items() if reason is not None}


def fail_waiting_chunks(connection: Connection, job_id: UUID, reason: str, limit: int) -> int:
    """Fail at most `limit` pending chunks of a job, each item with the given reason.

    Return the number of chunks. The transaction that fails the last open chunk ends the job.
    """
    rows = connection.execute(FAIL_WAITING_CHUNKS, {"job_id": job_id, "limit": limit}).all()
    if not rows:
        return 0
    failed, failure = [], ItemFailure(MODEL_NOT_LOADED, reason)
    for row in rows:
        keys = read_keys(row.items)
        wanted = range(len(keys)) if row.only_items is None else row.only_items
        failed += [(row.first_item + place, row.id, keys[place], failure) for place in wanted]
    insert_errors(connection, job_id, failed)
    connection.execute(COUNT_FAILED, {"job_id": job_id, "num_chunks": len(rows), "num_failed": len(failed)})
    return len(rows)
