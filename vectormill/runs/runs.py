"""Runs: made, found, listed, cancelled and confirmed by clients; claimed and carried out by indexers, phase by phase.

One run of a collection is carried out at a time: a unique index says so, and what is queued waits. A run stays
`running` when its indexer dies; whoever claims it after the lease goes on in its phase.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid4

from sqlalchemy import Connection, Row, text
from sqlalchemy.exc import IntegrityError

from vectormill.db.parameters import to_jsonb
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import (
    CollectionNotFound,
    JobNotFound,
    RunCancelled,
    RunNotFound,
    SourceNotFound,
    WrongJobState,
)
from vectormill.jobs.deletion import discard_upload
from vectormill.jobs.jobs import cancel_job, find_job
from vectormill.runs.run import (
    CANCELLED,
    CANCELLING,
    CLAIMED_RUN_STATES,
    GOOD_RUN_STATES,
    PHASES_BY_KIND,
    QUEUED,
    RUNNING,
    Run,
    RunCounts,
    state_after_cancel,
    state_after_confirm,
)
from vectormill.work.work import Lease, Work, claim

COUNT_NAMES = tuple(field.name for field in fields(RunCounts))

RUN_COLUMNS = f"""
    runs.id, runs.seq, runs.collection_id, collections.name AS collection, runs.kind, runs.state, runs.phase,
    runs.generation_id, runs.job_id, runs.spec, runs.options, {", ".join(f"runs.{name}" for name in COUNT_NAMES)},
    runs.report, runs.error, runs.schedule_id, runs.due_at, runs.attempt, runs.created_at, runs.started_at,
    runs.finished_at, now() AS now
"""

FROM_RUNS = """
      FROM vectormill.runs
      JOIN vectormill.collections ON collections.id = runs.collection_id
"""

FIND_RUN = text(f"SELECT {RUN_COLUMNS} {FROM_RUNS} WHERE runs.id = :run_id")

# clock_timestamp() and not now(): runs that one transaction makes have an order, which pages are cut by. A due
# time of a schedule has one run, whoever makes it.
CREATE_RUN = text("""
    INSERT INTO vectormill.runs
        (id, collection_id, kind, state, spec, options, schedule_id, due_at, created_at, finished_at, error)
    SELECT :id, id, :kind, :state, CAST(:spec AS jsonb), CAST(:options AS jsonb),
           CAST(:schedule_id AS bigint), CAST(:due_at AS timestamptz), clock_timestamp(),
           CASE WHEN CAST(:state AS text) IN ('skipped', 'failed') THEN clock_timestamp() END, CAST(:error AS text)
      FROM vectormill.collections WHERE name = :collection
    ON CONFLICT (schedule_id, due_at) DO NOTHING
    RETURNING id
""")

FIND_COLLECTION = text("SELECT id FROM vectormill.collections WHERE name = :name")


def create_run(
    connection: Connection,
    collection: str,
    kind: str,
    *,
    options: Mapping[str, Any] | None = None,
    spec: EncodingSpec | None = None,
    state: str = QUEUED,
    schedule_id: int | None = None,
    due_at: datetime | None = None,
    error: str | None = None,
) -> Run | None:
    """Make a run that an indexer claims after COMMIT; return None if its schedule has one of this due time.

    `spec` is that asked for, None for the live generation's; an `error` is that of one made `skipped` or `failed`.
    Raise CollectionNotFound.
    """
    values = {
        "id": uuid4(),
        "collection": collection,
        "kind": kind,
        "state": state,
        "spec": None if spec is None else to_jsonb(spec.to_json()),
        "options": to_jsonb(dict(options or {})),
        "schedule_id": schedule_id,
        "due_at": due_at,
        "error": error,
    }
    made = connection.execute(CREATE_RUN, values).one_or_none()
    if made is not None:
        return find_run(connection, made.id)
    if connection.execute(FIND_COLLECTION, {"name": collection}).one_or_none() is None:
        raise CollectionNotFound(f"There is no collection {collection!r}.")
    return None


HAS_TEXTS = text("""
    SELECT collections.keep_text OR EXISTS (
               SELECT 1 FROM vectormill.sources WHERE sources.collection_id = collections.id)
      FROM vectormill.collections WHERE name = :name
""")


def refuse_without_texts(connection: Connection, collection: str) -> None:
    """Raise SourceNotFound for a collection that has neither a source nor texts of its own to encode again."""
    if connection.execute(HAS_TEXTS, {"name": collection}).scalar_one_or_none() is False:
        raise SourceNotFound(
            f"Collection {collection!r} has no source, and keeps no texts; set one with `vectormill sources set`."
        )


def find_run(connection: Connection, run_id: UUID) -> Run:
    """Return the run as it stands now. Raise RunNotFound."""
    row = connection.execute(FIND_RUN, {"run_id": run_id}).one_or_none()
    if row is None:
        raise RunNotFound
    return read_run(row)


def read_run(row: Row[Any]) -> Run:
    """Return the run in a row of RUN_COLUMNS."""
    values = dict(row._mapping)
    counts = RunCounts(**{name: values.pop(name) for name in COUNT_NAMES})
    spec = values.pop("spec")
    return Run(**values, spec=None if spec is None else EncodingSpec.from_json(spec), counts=counts)


# A page is what was made before a moment; without one it is the newest page. Each has an index in this order.
LIST_RUNS = text(f"""
    SELECT {RUN_COLUMNS} {FROM_RUNS}
     WHERE runs.created_at < CAST(:before AS timestamptz)
     ORDER BY runs.created_at DESC LIMIT :limit
""")

LIST_RUNS_OF_COLLECTION = text(f"""
    SELECT {RUN_COLUMNS} {FROM_RUNS}
     WHERE runs.collection_id = :collection_id AND runs.created_at < CAST(:before AS timestamptz)
     ORDER BY runs.created_at DESC LIMIT :limit
""")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
# The last moment that both Python and Postgres can name.
_LAST = datetime(9999, 12, 31, tzinfo=UTC)


def position_of(run: Run) -> int:
    """Return where a page that ends with this run is cut: microseconds since 1970."""
    return (run.created_at - _EPOCH) // _MICROSECOND


def moment_of(position: int | None) -> datetime:
    """Return the moment at which a page is cut; the last there is for None, or for a later one."""
    last = (_LAST - _EPOCH) // _MICROSECOND
    return _EPOCH + timedelta(microseconds=last if position is None else min(position, last))


def list_runs(
    connection: Connection, *, collection: str | None = None, before: int | None = None, limit: int
) -> list[Run]:
    """List runs, newest first, of one collection or of all; `before` is position_of the last one that is known.

    Raise CollectionNotFound.
    """
    values: dict[str, Any] = {"before": moment_of(before), "limit": limit}
    if collection is None:
        rows = connection.execute(LIST_RUNS, values)
    else:
        collection_id = connection.execute(FIND_COLLECTION, {"name": collection}).scalar_one_or_none()
        if collection_id is None:
            raise CollectionNotFound(f"There is no collection {collection!r}.")
        rows = connection.execute(LIST_RUNS_OF_COLLECTION, {**values, "collection_id": collection_id})
    return [read_run(row) for row in rows]


LOCK_RUN = text("SELECT id FROM vectormill.runs WHERE id = :run_id FOR NO KEY UPDATE")

CANCEL_RUN = text("""
    UPDATE vectormill.runs
       SET state = :state, finished_at = CASE WHEN CAST(:is_over AS boolean) THEN now() END, updated_at = now()
     WHERE id = :run_id
""")


def cancel_run(connection: Connection, run_id: UUID) -> Run:
    """Stop a run; what it has written until then stays. Cancelling twice is the same as once.

    An indexer that holds it hears of it within a heartbeat, and cancels the job that encodes for it. Raises
    RunNotFound, and WrongRunState for a run that has ended otherwise.
    """
    run = _lock(connection, run_id)
    state = state_after_cancel(run.state)
    if state == run.state:
        return run
    connection.execute(CANCEL_RUN, {"run_id": run_id, "state": state, "is_over": state == CANCELLED})
    return find_run(connection, run_id)


# The source is read again: it may have changed since, and what was confirmed are shares and no rows.
CONFIRM_RUN = text("""
    UPDATE vectormill.runs
       SET state = :state, error = NULL, available_at = now(), updated_at = now(), attempt = 0,
           phase = 'reading', options = options || jsonb_build_object('confirmed', report -> 'comparing' -> 'held_for')
     WHERE id = :run_id
""")


def confirm_run(connection: Connection, run_id: UUID) -> Run:
    """Let a held run read again and change as much as it was held for; more is held again.

    Raise RunNotFound, and WrongRunState unless it is held.
    """
    run = _lock(connection, run_id)
    connection.execute(CONFIRM_RUN, {"run_id": run_id, "state": state_after_confirm(run.state)})
    return find_run(connection, run_id)


def _lock(connection: Connection, run_id: UUID) -> Run:
    """Lock the run until the transaction ends, and return it. Raise RunNotFound."""
    connection.execute(LOCK_RUN, {"run_id": run_id})
    return find_run(connection, run_id)


def cancel_encoding(connection: Connection, run: Run) -> None:
    """Cancel the job that encodes for a run, if it has one that has not ended."""
    if run.job_id is None:
        return
    discard_upload(connection, run.job_id)
    try:
        if not find_job(connection, run.job_id).is_terminal:
            cancel_job(connection, run.job_id)
    except (JobNotFound, WrongJobState):
        return


# For each schedule, and for runs without one, the newest run stays, and the newest that succeeded: what a collection
# and a schedule say of themselves is read from these.
PRUNE_RUNS = text(f"""
    DELETE FROM vectormill.runs
     WHERE id IN (
        SELECT run.id FROM vectormill.runs AS run
         WHERE run.created_at < now() - make_interval(secs => CAST(:seconds AS double precision))
           AND run.finished_at < now() - make_interval(secs => CAST(:seconds AS double precision))
           AND EXISTS (SELECT 1 FROM vectormill.runs AS other
                        WHERE other.collection_id = run.collection_id AND other.created_at > run.created_at
                          AND other.kind = run.kind AND other.schedule_id IS NOT DISTINCT FROM run.schedule_id
                          AND (other.state IN {GOOD_RUN_STATES}
                               OR run.state NOT IN {GOOD_RUN_STATES}))
         ORDER BY run.created_at
         LIMIT :limit
           FOR UPDATE SKIP LOCKED)
""")


def prune_runs(connection: Connection, retention_seconds: float, limit: int) -> int:
    """Remove up to so many runs that ended that long ago and have a successor; return how many."""
    return connection.execute(PRUNE_RUNS, {"seconds": retention_seconds, "limit": limit}).rowcount


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
    """Record how far the run is; None leaves a value as it is. Raise LeaseLost."""
    values = {"seq": seq, "job_id": job_id, "generation_id": generation_id, **asdict(counts)}
    lease.keep(connection, SAVE_RUN, phase=phase, **values)


def hold_run(connection: Connection, lease: Lease) -> None:
    """Lock the run until the transaction ends: nobody cancels or claims it. Raise LeaseLost and RunCancelled."""
    if lease.keep(connection) == CANCELLING:
        raise RunCancelled


REPORT_RUN = RUNS.compose_keeping(
    "report = report || jsonb_build_object(CAST(:phase AS text), CAST(:found AS jsonb))"
)


def report_run(connection: Connection, lease: Lease, phase: str, found: Mapping[str, Any]) -> None:
    """Record what a phase found, in place of what it had found before. Raise LeaseLost."""
    lease.keep(connection, REPORT_RUN, phase=phase, found=to_jsonb(dict(found)))


FORGET_ATTEMPTS = RUNS.compose_keeping("attempt = 1")


def forget_attempts(connection: Connection, lease: Lease) -> None:
    """Count the present attempt as the first, because the run has advanced in it. Raise LeaseLost."""
    lease.keep(connection, FORGET_ATTEMPTS)


# A cancelled run ends cancelled, whatever else its indexer says of it.
END_RUN = RUNS.compose_release("""
    state = CASE WHEN state = 'cancelling' THEN 'cancelled' ELSE :state END,
    error = CAST(:error AS text),
    finished_at = CASE WHEN CAST(:state AS text) <> 'held' OR state = 'cancelling' THEN now() END
""")


def end_run(connection: Connection, lease: Lease, state: str, error: str | None = None) -> None:
    """End the run in this state, or hold it. Raise LeaseLost."""
    lease.release(connection, END_RUN, state=state, error=error)


def abandon_run(connection: Connection, lease: Lease, state: str, reason: str | None = None) -> None:
    """End the run in this state, and cancel the job that encodes for it. Raise LeaseLost."""
    end_run(connection, lease, state, reason)
    cancel_encoding(connection, find_run(connection, lease.key))
