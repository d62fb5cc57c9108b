"""Input: the objects of a job that an indexer reads, because reading them takes longer than a request should.

States: `waiting` for an indexer, `reading`, `read` once the job is queued, `failed` with its job if the objects
cannot become a job, and `cancelled` with its job. Until then the job is `uploading`.
"""

from dataclasses import dataclass
from typing import Final
from uuid import UUID

import msgspec
from sqlalchemy import Connection, text

from vectormill.domain.states import States
from vectormill.jobs.operations import InputBody
from vectormill.settings import Settings
from vectormill.work.work import Held, Lease, Work, claim

WAITING: Final = "waiting"
READING: Final = "reading"
READ: Final = "read"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
INPUT_STATES: Final = States((WAITING, READING, READ, FAILED, CANCELLED))

INPUT: Final = Work(
    table="vectormill.job_inputs",
    row="input",
    working=States((READING,)),
    begins={WAITING: READING},
    last_error="error",
)

CLAIM_INPUT: Final = INPUT.compose_claim(
    """
    SELECT input.id FROM vectormill.job_inputs AS input
     WHERE {claimable}
     ORDER BY input.available_at LIMIT 1
    {lock}
    """,
    returning="input.request, input.collection, input.error",
)
# Only attempts since the last chunk was written count: a reading that goes on is not given up.
KEEP_INPUT: Final = INPUT.compose_keeping(
    "num_items = :num_items",
    "num_compared = :num_compared",
    "attempt = CASE WHEN :num_items > num_items THEN 1 ELSE attempt END",
)
FINISH_INPUT: Final = INPUT.compose_release(
    f"state = '{READ}', error = NULL, num_items = :num_items, num_compared = :num_compared"
)
FAIL_INPUT: Final = INPUT.compose_release(f"state = '{FAILED}', error = :error")
CANCEL_INPUT: Final = INPUT.compose_revocation(f"state = '{CANCELLED}'", "id = :job_id AND {open}")

ADD_INPUT: Final = text("""
    INSERT INTO vectormill.job_inputs (id, request, collection, state)
    VALUES (:job_id, CAST(:request AS jsonb), :collection, 'waiting')
""")


@dataclass(slots=True, kw_only=True)
class HeldInput(Held):
    """An input that this process has claimed. `error` says why the last try failed, if there was one."""

    wanted: InputBody
    collection: str | None
    error: str | None
    settings: Settings


def add_input(connection: Connection, job_id: UUID, wanted: InputBody, collection: str | None) -> None:
    """Leave the objects of a job to the indexers, in the transaction that makes the job visible."""
    request = msgspec.json.encode(wanted).decode()
    connection.execute(ADD_INPUT, {"job_id": job_id, "request": request, "collection": collection})


def cancel_input(connection: Connection, job_id: UUID) -> bool:
    """Take a job's input away from the indexers; return whether it had one that was not read yet."""
    return connection.execute(CANCEL_INPUT, {"job_id": job_id}).one_or_none() is not None


def claim_input(
    connection: Connection, owner: str, lease_seconds: float
) -> tuple[Lease, InputBody, str | None, str | None] | None:
    """Claim an input. Return its lease, request, collection and last error; None if there is none."""
    for lease, row in claim(connection, INPUT, CLAIM_INPUT, owner=owner, lease_seconds=lease_seconds):
        return lease, msgspec.convert(row.request, InputBody), row.collection, row.error
    return None
