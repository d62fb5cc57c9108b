"""Runs in the database: clients create, find, list, cancel and confirm them, and indexers carry them out.

A unique index allows one active run per collection; others stay queued. If its indexer dies, a run stays
`running` until its lease expires, and the next indexer to claim it continues in the same phase.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
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
    TERMINAL_RUN_STATES,
    Run,
    RunCounts,
    state_after_cancel,
    state_after_confirm,
)
from vectormill.work.work import Lease, Work, claim

COUNT_NAMES = tuple(field.name for field in fields(RunCounts))

RUN_COLUMNS = f"""
    runs.id, runs.seq, runs.collection_id, collections.name AS collection, runs.kind, runs.state,
    CASE WHEN runs.finished_at IS NULL THEN runs.phase END AS phase, runs.generation_id, runs.job_id, runs.spec,
    runs.options, {", ".join(f"runs.{name}" for name in COUNT_NAMES)},
    runs.report, runs.error, runs.schedule_id, runs.due_at, runs.attempt, runs.created_at, runs.started_at,
    runs.finished_at, now() AS now
"""

FROM_RUNS = """
      FROM vectormill.runs
      JOIN vectormill.collections ON collections.id = runs.collection_id
"""

FIND_RUN = text(f"SELECT {RUN_COLUMNS} {FROM_RUNS} WHERE runs.id = :run_id")

LIST_RUNS_BY_ID = text(
    "SELECT id FROM vectormill.runs WHERE id BETWEEN :least AND :most ORDER BY id LIMIT :limit"
)

# Uses clock_timestamp() instead of now(), so that runs created in one transaction have an order for paging. A
# due time of a schedule has at most one run.
CREATE_RUN = text(f"""
    INSERT INTO vectormill.runs
        (id, collection_id, kind, state, spec, options, schedule_id, due_at, created_at, finished_at, error)
    SELECT :id, id, :kind, :state, CAST(:spec AS jsonb), CAST(:options AS jsonb),
           CAST(:schedule_id AS bigint), CAST(:due_at AS timestamptz), clock_timestamp(),
           CASE WHEN CAST(:state AS text) IN {TERMINAL_RUN_STATES} THEN clock_timestamp() END, CAST(:error AS text)
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
    """Create a run for indexers to claim after COMMIT; return None if its schedule's due time has a run.

    `spec` is the requested spec, None for that of the live generation. `error` is given for a run that is
    created `skipped` or `failed`. Raise CollectionNotFound.
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
        raise CollectionNotFound.named(collection)
    return None


HAS_TEXTS = text("""
    SELECT collections.keep_text OR EXISTS (
               SELECT 1 FROM vectormill.sources WHERE sources.collection_id = collections.id)
      FROM vectormill.collections WHERE name = :name
""")


def refuse_without_texts(connection: Connection, collection: str) -> None:
    """Raise SourceNotFound if the collection has neither a source nor kept texts to encode again."""
    if connection.execute(HAS_TEXTS, {"name": collection}).scalar_one_or_none() is False:
        raise SourceNotFound(
            f"Collection {collection!r} has no source and stores no texts: `vectormill sources set {collection} "
            "--help` shows how to set a source."
        )


def find_run(connection: Connection, run_id: UUID) -> Run:
    """Return a run in its current state. Raise RunNotFound."""
    row = connection.execute(FIND_RUN, {"run_id": run_id}).one_or_none()
    if row is None:
        raise RunNotFound
    return read_run(row)


def read_run(row: Row[Any]) -> Run:
    """Convert a row of RUN_COLUMNS to a Run."""
    values = dict(row._mapping)
    counts = RunCounts(**{name: values.pop(name) for name in COUNT_NAMES})
    spec = values.pop("spec")
    return Run(**values, spec=None if spec is None else EncodingSpec.from_json(spec), counts=counts)


# Runs created before a moment; the first page uses a moment in the far future. Each statement has an index in this
# order.
_RUNS_BEFORE: Final = f"""
    SELECT {RUN_COLUMNS} {FROM_RUNS}
     WHERE {{condition}} runs.created_at < CAST(:before AS timestamptz)
     ORDER BY runs.created_at DESC LIMIT :limit
"""
LIST_RUNS, LIST_RUNS_OF_COLLECTION, LIST_RUNS_OF_SCHEDULE = (
    text(_RUNS_BEFORE.format(condition=condition))
    for condition in ("", "runs.collection_id = :collection_id AND", "runs.schedule_id = :schedule_id AND")
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
# The last day that both Python and Postgres can represent.
_LAST = datetime(9999, 12, 31, tzinfo=UTC)


def position_of(run: Run) -> int:
    """Return the page cursor of a run: the time of its creation in microseconds since 1970."""
    return (run.created_at - _EPOCH) // _MICROSECOND


def moment_of(position: int | None) -> datetime:
    """Return the time of a page cursor; the largest possible one for None or a cursor beyond it."""
    last = (_LAST - _EPOCH) // _MICROSECOND
    return _EPOCH + timedelta(microseconds=last if position is None else min(position, last))


def list_runs(
    connection: Connection,
    *,
    collection: str | None = None,
    schedule_id: int | None = None,
    before: int | None = None,
    limit: int,
) -> list[Run]:
    """List runs of one collection, of one schedule or of all, newest first.

    `before` is the position_of the last run of the previous page. Raise CollectionNotFound.
    """
    statement = LIST_RUNS if schedule_id is None else LIST_RUNS_OF_SCHEDULE
    values: dict[str, Any] = {"schedule_id": schedule_id, "before": moment_of(before), "limit": limit}
    if collection is not None:
        collection_id = connection.execute(FIND_COLLECTION, {"name": collection}).scalar_one_or_none()
        if collection_id is None:
            raise CollectionNotFound.named(collection)
        statement, values["collection_id"] = LIST_RUNS_OF_COLLECTION, collection_id
    return [read_run(row) for row in connection.execute(statement, values)]


LOCK_RUN = text("SELECT id FROM vectormill.runs WHERE id = :run_id FOR NO KEY UPDATE")

CANCEL_RUN = text("""
    UPDATE vectormill.runs
       SET state = :state, finished_at = CASE WHEN CAST(:is_over AS boolean) THEN now() END, updated_at = now()
     WHERE id = :run_id
""")


def cancel_run(connection: Connection, run_id: UUID) -> Run:
    """Cancel a run; what it has already written stays. Cancelling twice has no further effect.

    The indexer that holds the run notices at its next heartbeat and cancels the run's encoding job. Raise
    RunNotFound, or WrongRunState if the run has already ended otherwise.
    """
    run = _lock(connection, run_id)
    state = state_after_cancel(run.state)
    if state == run.state:
        return run
    connection.execute(CANCEL_RUN, {"run_id": run_id, "state": state, "is_over": state == CANCELLED})
    return find_run(connection, run_id)


# A confirmed run reads its source again, because that may have changed; shares of rows were confirmed, not
# the rows themselves.
CONFIRM_RUN = text("""
    UPDATE vectormill.runs
       SET state = :state, error = NULL, available_at = now(), updated_at = now(), attempt = 0,
           phase = 'reading', options = options || jsonb_build_object('confirmed', report -> 'comparing' -> 'held_for')
     WHERE id = :run_id
""")


def confirm_run(connection: Connection, run_id: UUID) -> Run:
    """Queue a held run again, and allow it to change as large a share of rows as it was held for.

    A larger change is held again. Raise RunNotFound, or WrongRunState unless the run is held.
    """
    run = _lock(connection, run_id)
    connection.execute(CONFIRM_RUN, {"run_id": run_id, "state": state_after_confirm(run.state)})
    return find_run(connection, run_id)


def _lock(connection: Connection, run_id: UUID) -> Run:
    """Lock a run until the transaction ends, and return it. Raise RunNotFound."""
    connection.execute(LOCK_RUN, {"run_id": run_id})
    return find_run(connection, run_id)


# Keeps the newest run and the newest successful run of each kind, collection and schedule (or none), because
# the status of collections and schedules is read from these. Also keeps the unsuccessful run of a rollback while its
# generation is live: it tells from where on that generation lacks rows (RETIRE_LIVE in generations.py).
PRUNE_RUNS = text(f"""
    DELETE FROM vectormill.runs
     WHERE id IN (
        SELECT run.id FROM vectormill.runs AS run
         WHERE run.created_at < now() - make_interval(secs => CAST(:seconds AS double precision))
           AND run.finished_at < now() - make_interval(secs => CAST(:seconds AS double precision))
           AND EXISTS (SELECT 1 FROM vectormill.runs AS other
                        WHERE other.collection_id = run.collection_id AND other.created_at > run.created_at
                          AND other.kind = run.kind AND other.schedule_id IS NOT DISTINCT FROM run.schedule_id
                          AND (other.options ? 'carry_from') = (run.options ? 'carry_from')
                          AND (other.state IN {GOOD_RUN_STATES}
                               OR run.state NOT IN {GOOD_RUN_STATES}))
           AND NOT EXISTS (SELECT 1 FROM vectormill.generations
                            WHERE generations.id = CAST(run.options ->> 'carry_to' AS bigint)
                              AND generations.state = 'live' AND run.state NOT IN {GOOD_RUN_STATES})
         ORDER BY run.created_at
         LIMIT :limit
           FOR UPDATE SKIP LOCKED)
""")


def prune_runs(connection: Connection, retention_seconds: float, limit: int) -> int:
    """Delete at most `limit` runs that ended `retention_seconds` ago; return their number.

    The newest run and the newest successful run of each kind and schedule are kept.
    """
    return connection.execute(PRUNE_RUNS, {"seconds": retention_seconds, "limit": limit}).rowcount


# The error column records why a run was handed back. The run stays `running`, so that no other run of its
# collection starts in between.
RUNS: Final = Work(
    table="vectormill.runs",
    row="run",
    begins={QUEUED: RUNNING},
    working=CLAIMED_RUN_STATES,
    last_error="error",
)

# A queued run waits while another run of its collection is active or was queued earlier. A run that follows a
# rollback goes first: after a swap in between, the rows that it carries over would be older than the
# generation they are written to.
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
    """Claim the oldest run that can be carried out now; return None if there is none.

    The connection must have a transaction to itself, because it may be rolled back.
    """
    try:
        claimed = claim(
            connection, RUNS, CLAIM_RUN, owner=owner, lease_seconds=lease_seconds, first_phases=FIRST_PHASES
        )
    except IntegrityError:  # another run of the collection was claimed at the same time
        connection.rollback()
        return None
    for lease, _ in claimed:
        return lease, find_run(connection, lease.key)
    return None


# Records a run's phase, counts and ids; None leaves an id unchanged. `attempt` counts the claims of a run in its
# current phase.
SAVE_RUN = RUNS.compose_keeping(
    *(f"{name} = :{name}" for name in COUNT_NAMES),
    "attempt = CASE WHEN phase IS DISTINCT FROM CAST(:phase AS text) THEN 1 ELSE attempt END",
    "phase = CAST(:phase AS text)",
    "seq = coalesce(CAST(:seq AS bigint), seq)",
    "job_id = coalesce(CAST(:job_id AS uuid), job_id)",
    "generation_id = coalesce(CAST(:generation_id AS bigint), generation_id)",
)


def hold_run(connection: Connection, lease: Lease) -> None:
    """Lock a run until the transaction ends, so that it is neither cancelled nor claimed.

    Raise LeaseLost if another indexer has it, or RunCancelled.
    """
    if lease.keep(connection) == CANCELLING:
        raise RunCancelled


# Records the findings of a phase, replacing earlier ones of the same phase.
REPORT_RUN = RUNS.compose_keeping(
    "report = report || jsonb_build_object(CAST(:phase AS text), CAST(:found AS jsonb))"
)


# An attempt that has made progress counts as the first.
FORGET_ATTEMPTS = RUNS.compose_keeping("attempt = 1")


# A run that is being cancelled ends as `cancelled`, whatever state its indexer reports.
END_RUN = RUNS.compose_release("""
    state = CASE WHEN state = 'cancelling' THEN 'cancelled' ELSE :state END,
    error = CAST(:error AS text),
    finished_at = CASE WHEN CAST(:state AS text) <> 'held' OR state = 'cancelling' THEN now() END
""")


def end_run(connection: Connection, lease: Lease, state: str, error: str | None = None) -> None:
    """Release a run in its final state, or as `held`. Raise LeaseLost."""
    lease.release(connection, END_RUN, state=state, error=error)


def abandon_run(connection: Connection, lease: Lease, state: str, reason: str | None = None) -> None:
    """Release a run in its final state, and cancel its encoding job. Raise LeaseLost."""
    end_run(connection, lease, state, reason)
    job_id = find_run(connection, lease.key).job_id
    if job_id is None:
        return
    discard_upload(connection, job_id)
    with suppress(JobNotFound, WrongJobState):
        if not find_job(connection, job_id).is_terminal:
            cancel_job(connection, job_id)
