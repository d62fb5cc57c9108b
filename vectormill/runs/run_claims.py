"""Claims of runs, and what is written under them: an indexer carries a run out, phase by phase.

One run of a collection is carried out at a time: a unique index says so, and what is queued waits. A run stays
`running` when its indexer dies; whoever claims it after the lease goes on in its phase.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from vectormill.db.jsonb import to_jsonb
from vectormill.domain.errors import RunCancelled
from vectormill.runs.run import (
    CANCELLING,
    CLAIMED_RUN_STATES,
    PHASES_BY_KIND,
    QUEUED,
    RUNNING,
    Run,
    RunCounts,
)
from vectormill.runs.runs import COUNT_NAMES, cancel_encoding, find_run
from vectormill.work.work import Lease, Work, claim

# The status tells why a run was handed back. It stays running, so that no other of its collection comes
# between.
RUNS: Final = Work(
    table="vectormill.runs",
    row="run",
    begins={QUEUED: RUNNING},
    working=CLAIMED_RUN_STATES,
    last_error="error",
)

# A queued run waits while another of its collection is carried out, or waits longer. One that follows a rollback goes
# first: a swap in between would make rows that it carries older than the generation into which it carries them.
CLAIM_RUN = RUNS.compose_claim(
    f"""
        SELECT run.id
          FROM vectormill.runs AS run
         WHERE {{claimable}}
           AND (run.state <> 'queued' OR NOT EXISTS (
                    SELECT 1 FROM vectormill.runs AS other
                     WHERE other.collection_id = run.collection_id
                       AND (other.state IN {CLAIMED_RUN_STATES}
                            OR (other.state = 'queued'
                                AND (NOT other.options ? 'carry_from', other.created_at)
                                    < (NOT run.options ? 'carry_from', run.created_at)))))
         ORDER BY run.created_at
         LIMIT 1
         {{lock}}
    """,
    sets="""
        phase = coalesce(run.phase, CAST(CAST(:first_phases AS jsonb) ->> run.kind AS text)),
        started_at = coalesce(run.started_at, now())
    """,
)

FIRST_PHASES: Final = to_jsonb({kind: phases[0] for kind, phases in PHASES_BY_KIND.items()})


def claim_run(connection: Connection, owner: str, lease_seconds: float) -> tuple[Lease, Run] | None:
    """Claim the oldest run that can be carried out now; None if there is none.

    Takes a transaction of its own, which may be rolled back.
    """
    try:
        claimed = claim(
            connection, RUNS, CLAIM_RUN, owner=owner, lease_seconds=lease_seconds, first_phases=FIRST_PHASES
        )
    except IntegrityError:  # another run of the collection was claimed at this moment
        connection.rollback()
        return None
    for lease, _ in claimed:
        return lease, find_run(connection, lease.key)
    return None


# `attempt` counts claims since the run last came to another phase.
SAVE_RUN = RUNS.compose_keeping(
    *(f"{name} = :{name}" for name in COUNT_NAMES),
    "attempt = CASE WHEN phase IS DISTINCT FROM CAST(:phase AS text) THEN 1 ELSE attempt END",
    "phase = CAST(:phase AS text)",
    "seq = coalesce(CAST(:seq AS bigint), seq)",
    "job_id = coalesce(CAST(:job_id AS uuid), job_id)",
    "generation_id = coalesce(CAST(:generation_id AS bigint), generation_id)",
)


def save_run(
    connection: Connection,
    lease: Lease,
    phase: str,
    counts: RunCounts,
    *,
    seq: int | None = None,
    job_id: UUID | None = None,
    generation_id: int | None = None,
) -> None:
    """Record how far the run is; None leaves a value as it is. Raises LeaseLost."""
    values = {"seq": seq, "job_id": job_id, "generation_id": generation_id, **asdict(counts)}
    lease.keep(connection, SAVE_RUN, phase=phase, **values)


def hold_run(connection: Connection, lease: Lease) -> None:
    """Lock the run until the transaction ends: nobody cancels or claims it. Raises LeaseLost and RunCancelled."""
    if lease.keep(connection) == CANCELLING:
        raise RunCancelled


REPORT_RUN = RUNS.compose_keeping(
    "report = report || jsonb_build_object(CAST(:phase AS text), CAST(:found AS jsonb))"
)


def report_run(connection: Connection, lease: Lease, phase: str, found: Mapping[str, Any]) -> None:
    """Record what a phase found, in place of what it had found before. Raises LeaseLost."""
    lease.keep(connection, REPORT_RUN, phase=phase, found=to_jsonb(dict(found)))


FORGET_ATTEMPTS = RUNS.compose_keeping("attempt = 1")


def forget_attempts(connection: Connection, lease: Lease) -> None:
    """Count the present attempt as the first, because the run has advanced in it. Raises LeaseLost."""
    lease.keep(connection, FORGET_ATTEMPTS)


# A cancelled run ends cancelled, whatever else its indexer says of it.
END_RUN = RUNS.compose_release("""
    state = CASE WHEN state = 'cancelling' THEN 'cancelled' ELSE :state END,
    error = CAST(:error AS text),
    finished_at = CASE WHEN CAST(:state AS text) <> 'held' OR state = 'cancelling' THEN now() END
""")


def end_run(connection: Connection, lease: Lease, state: str, error: str | None = None) -> None:
    """End the run in this state, or hold it. Raises LeaseLost."""
    lease.release(connection, END_RUN, state=state, error=error)


def abandon_run(connection: Connection, lease: Lease, state: str, reason: str | None = None) -> None:
    """End the run in this state, and cancel the job that encodes for it. Raises LeaseLost."""
    end_run(connection, lease, state, reason)
    cancel_encoding(connection, find_run(connection, lease.key))
