"""Claims of runs: an indexer holds a run by a lease, and writes for it under the fence of its claim.

One run of a collection is carried out at a time: a unique index says so, and what is queued waits. A run stays
`running` when its indexer dies; whoever claims it after the lease goes on in its phase.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError

from vectormill.db.jsonb import to_jsonb
from vectormill.db.runs.runs import cancel_encoding, find_run
from vectormill.domain.errors import LeaseLost, RunCancelled
from vectormill.domain.run import CANCELLING, FAILED, PHASES_BY_KIND, Run, RunCounts


@dataclass(frozen=True, slots=True)
class RunClaim:
    """A run as it was claimed, and what proves that it is still ours."""

    run: Run
    fence: int
    lease_seconds: float


# A queued run waits while another of its collection is carried out, or waits longer. One that follows a rollback goes
# first: a swap in between would make rows that it carries older than the generation into which it carries them.
# `attempt` counts claims since the run last came to another phase: a hand-back takes its own back.
CLAIM_RUN = text("""
    WITH candidate AS (
        SELECT run.id
          FROM vectormill.runs AS run
         WHERE run.state IN ('uploading', 'queued', 'running', 'held', 'cancelling') AND run.available_at <= now()
           AND CASE WHEN run.state = 'queued' THEN NOT EXISTS (
                        SELECT 1 FROM vectormill.runs AS other
                         WHERE other.collection_id = run.collection_id
                           AND (other.state IN ('running', 'cancelling')
                                OR (other.state = 'queued'
                                    AND (NOT other.options ? 'carry_from', other.created_at)
                                        < (NOT run.options ? 'carry_from', run.created_at))))
                    ELSE run.state IN ('running', 'cancelling') AND run.lease_until <= now() END
         ORDER BY run.created_at
         LIMIT 1
           FOR NO KEY UPDATE OF run SKIP LOCKED
    )
    UPDATE vectormill.runs AS run
       SET state = CASE WHEN run.state = 'queued' THEN 'running' ELSE run.state END,
           phase = coalesce(run.phase, CAST(CAST(:first_phases AS jsonb) ->> run.kind AS text)),
           fence = run.fence + 1, attempt = run.attempt + 1, lease_owner = :owner,
           lease_until = now() + make_interval(secs => CAST(:lease_seconds AS double precision)),
           started_at = coalesce(run.started_at, now()), updated_at = now()
      FROM candidate
     WHERE run.id = candidate.id
    RETURNING run.id, run.fence
""")

FIRST_PHASES: Final = to_jsonb({kind: phases[0] for kind, phases in PHASES_BY_KIND.items()})


def claim_run(connection: Connection, owner: str, lease_seconds: float) -> RunClaim | None:
    """The oldest run that can be carried out now, or None. In a transaction of its own, which may be rolled back."""
    values = {"owner": owner, "lease_seconds": lease_seconds, "first_phases": FIRST_PHASES}
    try:
        row = connection.execute(CLAIM_RUN, values).one_or_none()
    except IntegrityError:  # another run of the collection was claimed at this moment
        connection.rollback()
        return None
    return None if row is None else RunClaim(find_run(connection, row.id), row.fence, lease_seconds)


# A run whose row is locked by a transaction of its own phase is renewed by that one: see SAVE_RUN.
RENEW_RUNS = text("""
    WITH held AS (
        SELECT run.id FROM vectormill.runs AS run
          JOIN unnest(CAST(:ids AS uuid[]), CAST(:fences AS bigint[])) AS claim (id, fence)
            ON claim.id = run.id AND claim.fence = run.fence
         WHERE run.state IN ('running', 'cancelling')
         ORDER BY run.id
           FOR NO KEY UPDATE OF run SKIP LOCKED
    )
    UPDATE vectormill.runs AS run
       SET lease_until = now() + make_interval(secs => CAST(:lease_seconds AS double precision)), updated_at = now()
      FROM held
     WHERE run.id = held.id
""")

LIST_HELD_RUNS = text("""
    SELECT run.id, run.state FROM vectormill.runs AS run
      JOIN unnest(CAST(:ids AS uuid[]), CAST(:fences AS bigint[])) AS claim (id, fence)
        ON claim.id = run.id AND claim.fence = run.fence
     WHERE run.state IN ('running', 'cancelling')
""")


def renew_runs(connection: Connection, claims: Sequence[RunClaim], lease_seconds: float) -> dict[UUID, bool]:
    """The runs that are still held, each with whether a client wants it cancelled; what is missing is lost."""
    values = {"ids": [claim.run.id for claim in claims], "fences": [claim.fence for claim in claims]}
    connection.execute(RENEW_RUNS, {**values, "lease_seconds": lease_seconds})
    return {row.id: row.state == CANCELLING for row in connection.execute(LIST_HELD_RUNS, values)}


# The first statement of every transaction that writes for a run: it locks the run until COMMIT, so that nobody claims
# it meanwhile, renews its lease, and tells how far it is.
SAVE_RUN = text("""
    UPDATE vectormill.runs
       SET num_seen = :num_seen, num_unchanged = :num_unchanged, num_metadata_only = :num_metadata_only,
           num_new = :num_new, num_changed = :num_changed, num_moved = :num_moved, num_deleted = :num_deleted,
           num_failed = :num_failed,
           attempt = CASE WHEN phase IS DISTINCT FROM CAST(:phase AS text) THEN 1 ELSE attempt END,
           phase = CAST(:phase AS text), seq = coalesce(CAST(:seq AS bigint), seq),
           job_id = coalesce(CAST(:job_id AS uuid), job_id),
           generation_id = coalesce(CAST(:generation_id AS bigint), generation_id),
           lease_until = now() + make_interval(secs => CAST(:lease_seconds AS double precision)),
           updated_at = now()
     WHERE id = :run_id AND fence = :fence AND state IN ('running', 'cancelling')
    RETURNING 1
""")


def save_run(
    connection: Connection,
    claim: RunClaim,
    phase: str,
    counts: RunCounts,
    *,
    seq: int | None = None,
    job_id: UUID | None = None,
    generation_id: int | None = None,
) -> None:
    """Keeps how far the run is; None leaves a value as it is. Raises LeaseLost."""
    values = {
        "run_id": claim.run.id,
        "fence": claim.fence,
        "lease_seconds": claim.lease_seconds,
        "phase": phase,
        "seq": seq,
        "job_id": job_id,
        "generation_id": generation_id,
        **asdict(counts),
    }
    if connection.execute(SAVE_RUN, values).one_or_none() is None:
        raise LeaseLost("The run's lease expired and another indexer may hold it; nothing was written.")


HOLD_RUN = text("""
    SELECT state FROM vectormill.runs
     WHERE id = :run_id AND fence = :fence AND state IN ('running', 'cancelling')
       FOR NO KEY UPDATE
""")


def hold_run(connection: Connection, claim: RunClaim) -> None:
    """Lock the run until the transaction ends: nobody cancels or claims it. Raises LeaseLost and RunCancelled."""
    values = {"run_id": claim.run.id, "fence": claim.fence}
    state = connection.execute(HOLD_RUN, values).scalar_one_or_none()
    if state is None:
        raise LeaseLost("The run's lease expired and another indexer may hold it; nothing was written.")
    if state == CANCELLING:
        raise RunCancelled


REPORT_RUN = text("""
    UPDATE vectormill.runs
       SET report = report || jsonb_build_object(CAST(:phase AS text), CAST(:found AS jsonb)), updated_at = now()
     WHERE id = :run_id AND fence = :fence AND state IN ('running', 'cancelling')
    RETURNING 1
""")


def report_run(connection: Connection, claim: RunClaim, phase: str, found: Mapping[str, Any]) -> None:
    """Keeps what a phase found, in place of what it had found before. Raises LeaseLost."""
    values = {"run_id": claim.run.id, "fence": claim.fence, "phase": phase, "found": to_jsonb(dict(found))}
    if connection.execute(REPORT_RUN, values).one_or_none() is None:
        raise LeaseLost("The run's lease expired and another indexer may hold it; nothing was written.")


FORGET_ATTEMPTS = text("""
    UPDATE vectormill.runs SET attempt = 1 WHERE id = :run_id AND fence = :fence AND state IN ('running', 'cancelling')
""")


def forget_attempts(connection: Connection, claim: RunClaim) -> None:
    """Count the present attempt as the first, because the run has advanced in it."""
    connection.execute(FORGET_ATTEMPTS, {"run_id": claim.run.id, "fence": claim.fence})


# A cancelled run ends cancelled, whatever else its indexer says of it.
END_RUN = text("""
    UPDATE vectormill.runs
       SET state = CASE WHEN state = 'cancelling' THEN 'cancelled' ELSE :state END,
           error = CAST(:error AS text),
           finished_at = CASE WHEN CAST(:state AS text) <> 'held' OR state = 'cancelling' THEN now() END,
           lease_owner = NULL, lease_until = NULL, updated_at = now()
     WHERE id = :run_id AND fence = :fence AND state IN ('running', 'cancelling')
    RETURNING id
""")


def end_run(connection: Connection, claim: RunClaim, state: str, error: str | None = None) -> bool:
    """Ends the run in this state, or holds it; False if it is no longer ours."""
    values = {"run_id": claim.run.id, "fence": claim.fence, "state": state, "error": error}
    return connection.execute(END_RUN, values).one_or_none() is not None


# It stays running, so that no other run of the collection comes between.
HAND_BACK_RUN = text("""
    UPDATE vectormill.runs
       SET lease_until = now(), lease_owner = NULL, error = coalesce(CAST(:error AS text), error),
           available_at = now() + make_interval(secs => CAST(:pause_seconds AS double precision)),
           attempt = attempt - CASE WHEN CAST(:is_counted AS boolean) THEN 0 ELSE 1 END, updated_at = now()
     WHERE id = :run_id AND fence = :fence AND state IN ('running', 'cancelling')
    RETURNING id
""")


def hand_back_run(
    connection: Connection,
    claim: RunClaim,
    *,
    pause_seconds: float = 0.0,
    error: str | None = None,
    is_counted: bool = False,
) -> None:
    """Lets another indexer go on, after a pause; an `error` of ours that made us give up is counted as an attempt."""
    values = {
        "run_id": claim.run.id,
        "fence": claim.fence,
        "pause_seconds": pause_seconds,
        "error": error,
        "is_counted": is_counted,
    }
    connection.execute(HAND_BACK_RUN, values)


def describe_attempts(run: Run) -> str:
    """Why a run that was claimed so often is given up."""
    last = f" The last error was: {run.error}" if run.error else ""
    return (
        f"The run was tried {run.attempt - 1} times in phase {run.phase} and did not come through: its indexer ended "
        f"or failed each time (VECTORMILL_MAX_ATTEMPTS).{last}"
    )


def fail_exhausted(connection: Connection, claim: RunClaim, max_attempts: int) -> bool:
    """Whether the run was claimed more often than it may be; it is ended then."""
    if claim.run.attempt <= max_attempts:
        return False
    fail_run(connection, claim, describe_attempts(claim.run))
    return True


def fail_run(connection: Connection, claim: RunClaim, reason: str) -> bool:
    """End the run as failed, and the job that encodes for it; answer False if the run is no longer ours."""
    if not end_run(connection, claim, FAILED, reason):
        return False
    cancel_encoding(connection, find_run(connection, claim.run.id))
    return True
