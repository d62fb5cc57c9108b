"""Fail jobs whose model no live worker has been able to load for a long time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, text

from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.chunk import read_known
from vectormill.jobs.chunks import claim_chunk
from vectormill.jobs.completion import fail_chunk
from vectormill.jobs.item import MODEL_NOT_LOADED, Item, ItemFailure
from vectormill.jobs.job import DISPATCHED_JOB_STATES
from vectormill.jobs.waiting import LIST_SERVING_WORKERS, ServingWorker, explain_load_failure
from vectormill.workers.workers import ALIVE_SECONDS

# The chunks are failed in the transaction that claims them.
CLAIM_SECONDS: Final = 60.0

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


# A dispatched chunk is left to a later round: a worker has it, or it becomes pending again.
LIST_WAITING_CHUNKS = text("""
    SELECT chunks.id, jobs.model
      FROM vectormill.chunks JOIN vectormill.jobs ON jobs.id = chunks.job_id
     WHERE job_id = :job_id AND chunks.state = 'pending' AND available_at <= now()
     ORDER BY chunks.seq LIMIT :limit
""")


def fail_waiting_chunks(connection: Connection, job_id: UUID, reason: str, limit: int) -> int:
    """Fail at most `limit` pending chunks of a job, each item with the given reason, as a worker would.

    Return the number of chunks. The transaction that fails the last open chunk ends the job.
    """
    num_failed = 0
    for row in connection.execute(LIST_WAITING_CHUNKS, {"job_id": job_id, "limit": limit}).all():
        claimed = claim_chunk(connection, row.id, "the pruner", row.model, CLAIM_SECONDS)
        if claimed is not None:
            items: Sequence[Item] = [Item("", b"")] * claimed.claim.num_items
            if claimed.payload is not None:
                items = replace(read_known(claimed.payload), places=claimed.places)
            fail_chunk(connection, claimed.claim, items, ItemFailure(MODEL_NOT_LOADED, reason), None)
            num_failed += 1
    return num_failed
