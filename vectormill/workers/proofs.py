"""Periods of a worker between two proofs: what it computed in one is vouched for by the proof that ends it.

Decision 0078 says how chunks and periods belong together. Of chunks this module knows only that they name a period.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from vectormill.db.parameters import to_jsonb
from vectormill.workers.workers import IS_ALIVE

BEGIN_PERIOD = text("""
    INSERT INTO vectormill.proofs (worker, incarnation, model, report)
    VALUES (:worker, :incarnation, :model, CAST(:report AS jsonb))
    RETURNING id
""")

PROVE_PERIOD = text("""
    UPDATE vectormill.proofs SET proven_at = now() WHERE id = :period AND failed_at IS NULL
""")

FAIL_PERIOD = text("""
    UPDATE vectormill.proofs SET failed_at = now(), reason = :reason WHERE id = :period AND proven_at IS NULL
""")


def begin_period(
    connection: Connection, worker: str, incarnation: UUID, model: str, report: Mapping[str, Any]
) -> int:
    """Record that a worker's period begins, with what it runs. Return the id of the period."""
    values = {"worker": worker, "incarnation": incarnation, "model": model, "report": to_jsonb(report)}
    period: int = connection.execute(BEGIN_PERIOD, values).scalar_one()
    return period


def prove_period(connection: Connection, period: int) -> None:
    """Record that a good proof has ended the period."""
    connection.execute(PROVE_PERIOD, {"period": period})


def fail_period(connection: Connection, period: int, reason: str) -> None:
    """Record that a bad proof has ended the period, so that what was computed in it is encoded again."""
    connection.execute(FAIL_PERIOD, {"period": period, "reason": reason})


# A period is over if a proof vouches for it, if it is repaired, or if its worker is gone without a bad proof. Before,
# its results may yet turn out to be faulty, and their chunks be encoded again.
_IS_OPEN = f"""
    proven_at IS NULL AND repaired_at IS NULL
    AND (failed_at IS NOT NULL
         OR incarnation IN (SELECT incarnation FROM vectormill.workers
                             WHERE {IS_ALIVE}))
"""

# True of a job with results of an open period, or else NULL or false. The first condition spares the chunks of older
# jobs; a commit takes less than an hour. LIMIT keeps the planner from reading the chunks of all jobs at once.
IS_UNPROVEN = f"""
    jobs.updated_at >= (SELECT min(began_at) - interval '1 hour' FROM vectormill.proofs WHERE {_IS_OPEN})
    AND (SELECT true FROM vectormill.chunks
          WHERE chunks.job_id = jobs.id
            AND array_append(earlier_proofs, proof_id) && ARRAY(SELECT id FROM vectormill.proofs WHERE {_IS_OPEN})
          LIMIT 1)
"""

# A worker whose row is gone, or whose heartbeat is overdue, commits nothing more.
LIST_UNREPAIRED = text(f"""
    SELECT id, worker, reason FROM vectormill.proofs AS proof
     WHERE failed_at IS NOT NULL AND repaired_at IS NULL
       AND NOT EXISTS (SELECT 1 FROM vectormill.workers
                        WHERE workers.incarnation = proof.incarnation
                          AND {IS_ALIVE})
     ORDER BY id LIMIT 100
""")

NOTE_REPAIR = text("UPDATE vectormill.proofs SET repaired_at = now() WHERE id = :period")


@dataclass(frozen=True, slots=True)
class FailedPeriod:
    """A period that a bad proof has ended, and whose worker is gone."""

    id: int
    worker: str
    reason: str


def list_unrepaired_periods(connection: Connection) -> Sequence[FailedPeriod]:
    """List the failed periods whose chunks are to be encoded again, once their workers are gone."""
    return [FailedPeriod(*row) for row in connection.execute(LIST_UNREPAIRED)]


def note_repair(connection: Connection, period: int) -> None:
    """Record that all chunks of the period were put back, or are suspect."""
    connection.execute(NOTE_REPAIR, {"period": period})


# A period without an end belongs to a worker that still runs, or to one that was stopped or killed.
PRUNE_PERIODS = text("""
    DELETE FROM vectormill.proofs
     WHERE coalesce(proven_at, repaired_at, began_at) < now() - make_interval(secs => :seconds)
       AND (proven_at IS NOT NULL OR repaired_at IS NOT NULL
            OR failed_at IS NULL AND incarnation NOT IN (SELECT incarnation FROM vectormill.workers))
""")


def prune_periods(connection: Connection, seconds: float) -> int:
    """Delete periods that ended before the retention of jobs. Return their number."""
    return connection.execute(PRUNE_PERIODS, {"seconds": seconds}).rowcount


COUNT_FAILED = text("SELECT count(*) FROM vectormill.proofs WHERE failed_at IS NOT NULL")


def count_failed_periods(connection: Connection) -> int:
    """Return the number of periods that a bad proof has ended, within the retention of jobs."""
    return int(connection.execute(COUNT_FAILED).scalar_one())
