"""Runs as clients see them: made, found, listed, cancelled, confirmed. How indexers hold them: run_claims.py."""

from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Connection, Row, text

from vectormill.db.jsonb import to_jsonb
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import (
    CollectionNotFound,
    JobNotFound,
    RunNotFound,
    SourceNotFound,
    WrongJobState,
)
from vectormill.jobs.deletion import discard_upload
from vectormill.jobs.jobs import cancel_job, find_job
from vectormill.runs.run import (
    CANCELLED,
    GOOD_RUN_STATES,
    QUEUED,
    Run,
    RunCounts,
    state_after_cancel,
    state_after_confirm,
)

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
    Raises CollectionNotFound.
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
    """Return the run as it stands now. Raises RunNotFound."""
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


def list_runs(
    connection: Connection, *, collection: str | None = None, before: int | None = None, limit: int
) -> list[Run]:
    """List runs, newest first, of one collection or of all; `before` is position_of the last one that is known.

    Raises CollectionNotFound.
    """
    last = position_of_last()
    values: dict[str, Any] = {
        "before": _EPOCH + timedelta(microseconds=last if before is None else min(before, last)),
        "limit": limit,
    }
    if collection is None:
        rows = connection.execute(LIST_RUNS, values)
    else:
        collection_id = connection.execute(FIND_COLLECTION, {"name": collection}).scalar_one_or_none()
        if collection_id is None:
            raise CollectionNotFound(f"There is no collection {collection!r}.")
        rows = connection.execute(LIST_RUNS_OF_COLLECTION, {**values, "collection_id": collection_id})
    return [read_run(row) for row in rows]


def position_of_last() -> int:
    return (_LAST - _EPOCH) // _MICROSECOND


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

    Raises RunNotFound, and WrongRunState unless it is held.
    """
    run = _lock(connection, run_id)
    connection.execute(CONFIRM_RUN, {"run_id": run_id, "state": state_after_confirm(run.state)})
    return find_run(connection, run_id)


def _lock(connection: Connection, run_id: UUID) -> Run:
    """Lock the run until the transaction ends, and return it. Raises RunNotFound."""
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
