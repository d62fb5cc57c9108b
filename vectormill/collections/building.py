"""A generation that is built beside the live one: begun, and given up. What makes it live: swaps.py."""

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Connection, Engine, text

from vectormill.collections.collection import (
    BUILDING,
    LIVE,
    RETIRED,
    UNSEARCHED_GENERATION_STATES,
    Generation,
    check_kind,
)
from vectormill.collections.generations import (
    find_building,
    find_generation_by_id,
    find_in_state,
    lock_collection,
)
from vectormill.collections.rows.generation_tables import create_generation_tables, table_name
from vectormill.db.locks import act_in_short_locks
from vectormill.db.parameters import to_jsonb
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import CollectionNotFound, Conflict
from vectormill.jobs.jobs import draw_seq
from vectormill.jobs.twins import add_missing_twins

# In a generation's report: jobs behind this place came while it was being built.
SINCE_SEQ: Final = "since_seq"

INSERT_BUILDING = text("""
    INSERT INTO vectormill.generations (collection_id, spec, fingerprint, state, report)
    SELECT collections.id, CAST(:spec AS jsonb), :fingerprint, 'building', CAST(:report AS jsonb)
      FROM vectormill.collections WHERE collections.id = :collection_id
    RETURNING id, (SELECT language FROM vectormill.collections WHERE id = :collection_id) AS language
""")

# live_at is that of a generation to which a rollback is possible.
GIVE_UP_GENERATION = text(f"""
    UPDATE vectormill.generations SET state = 'retired', retired_at = now(), live_at = NULL
     WHERE id = :generation_id AND state IN {UNSEARCHED_GENERATION_STATES}
""")

HAS_FAILED = text("""
    SELECT report -> 'canary' ->> 'is_good' IS NOT DISTINCT FROM 'false'
      FROM vectormill.generations WHERE id = :generation_id
""")

FIND_SINCE_SEQ = text("""
    SELECT CAST(report ->> 'since_seq' AS bigint) FROM vectormill.generations WHERE id = :generation_id
""")


# So long a build whose last run failed waits to be gone on with: encoding may have taken days.
KEPT_BUILD_SECONDS: Final = 3 * 86400.0

# A generation that its canary refused, or that a client cancelled, is of no use.
IS_WORTH_KEEPING = text("""
    SELECT generations.report -> 'canary' ->> 'is_good' IS DISTINCT FROM 'false'
           AND last.state = 'failed'
           AND last.finished_at > now() - make_interval(secs => CAST(:kept_seconds AS double precision))
      FROM vectormill.generations
      JOIN LATERAL (SELECT state, finished_at FROM vectormill.runs
                     WHERE runs.collection_id = generations.collection_id
                       AND runs.generation_id = generations.id
                     ORDER BY created_at DESC LIMIT 1) AS last ON true
     WHERE generations.id = :generation_id
""")


def is_worth_keeping(connection: Connection, building: Generation) -> bool:
    """Tell whether the last run of a build failed a short time ago, and the next one can go on from what is there."""
    values = {"generation_id": building.id, "kept_seconds": KEPT_BUILD_SECONDS}
    return bool(connection.execute(IS_WORTH_KEEPING, values).scalar_one_or_none())


KEEP_CANARY_REPORT = text("""
    UPDATE vectormill.generations
       SET report = report || jsonb_build_object('canary', CAST(:canary AS jsonb))
     WHERE id = :generation_id
""")


def keep_canary_report(connection: Connection, generation_id: int, report: Mapping[str, Any]) -> None:
    connection.execute(KEEP_CANARY_REPORT, {"generation_id": generation_id, "canary": to_jsonb(dict(report))})


def open_building_generation(connection: Connection, collection: str, spec: EncodingSpec) -> Generation:
    """The generation of this spec that is being built beside the live one; begun now if there is none.

    One of another vector space that an earlier run has left is given up, for two are never built at once; and so is
    one that its canary has found unfit. Jobs that are
    queued from this transaction's COMMIT on have twins; for earlier ones see `follow_live_jobs`. Raises
    CollectionNotFound, and WrongKind for a spec of another kind than the live one's.
    """
    lock_collection(connection, collection)
    live = find_in_state(connection, collection, LIVE)
    if live is None:
        raise CollectionNotFound(f"There is no collection {collection!r}.")
    check_kind(collection, live.kind, spec)
    building = find_building(connection, collection)
    if building is not None:
        has_failed = connection.execute(HAS_FAILED, {"generation_id": building.id}).scalar_one()
        if building.spec.fingerprint() == spec.fingerprint() and not has_failed:
            return building
        connection.execute(GIVE_UP_GENERATION, {"generation_id": building.id})
    values = {
        "collection_id": live.collection_id,
        "spec": to_jsonb(spec.to_json()),
        "fingerprint": spec.fingerprint(),
        "report": to_jsonb({SINCE_SEQ: draw_seq(connection)}),
    }
    row = connection.execute(INSERT_BUILDING, values).one()
    create_generation_tables(connection, row.id, spec, row.language)
    return Generation(row.id, live.collection_id, collection, spec, table_name(row.id), BUILDING)


def open_target_generation(
    engine: Engine, collection: str, spec: EncodingSpec | None, **patience: Any
) -> Generation:
    """The generation that a run for this spec writes: the live one if it is of the same vector space, or if None.

    Else one that is being built beside it, with twins of the jobs that were open before. When the live one is the
    target, a generation that an earlier run has left is given up unless it is worth keeping. `patience` is that of
    `act_in_short_locks`.
    """

    def open_target(connection: Connection) -> Generation:
        live = find_in_state(connection, collection, LIVE)
        if live is None:
            raise CollectionNotFound(f"There is no collection {collection!r}.")
        if spec is not None and live.spec.fingerprint() != spec.fingerprint():
            return open_building_generation(connection, collection, spec)
        if find_building(connection, collection) is None:
            return live
        lock_collection(connection, collection)
        building = find_building(connection, collection)
        if building is not None and not is_worth_keeping(connection, building):
            connection.execute(GIVE_UP_GENERATION, {"generation_id": building.id})
        return live

    target = act_in_short_locks(engine, open_target, **patience)
    if target.state == BUILDING:
        follow_live_jobs(engine, target)
    return target


def follow_live_jobs(engine: Engine, building: Generation) -> int:
    """Twins for jobs of the live generation that have none: queued before the build began, or by an older API."""
    with engine.connect() as connection:
        live = find_in_state(connection, building.collection, LIVE)
        since_seq = connection.execute(FIND_SINCE_SEQ, {"generation_id": building.id}).scalar_one_or_none()
    if live is None or since_seq is None:
        return 0
    return add_missing_twins(engine, building, live.id, since_seq)


def discard_generation(connection: Connection, generation_id: int) -> Generation:
    """Gives up a generation that is being built, or one to which nobody wants to roll back.

    The scheduler ends its jobs and removes its tables soon. Raises Conflict for the live one, and for one that is gone.
    """
    generation = find_generation_by_id(connection, generation_id)
    if generation is not None:
        lock_collection(connection, generation.collection)
        generation = find_generation_by_id(connection, generation_id)
    if generation is None or generation.state not in (BUILDING, RETIRED):
        state = "is there no more" if generation is None else f"is {generation.state}"
        raise Conflict(
            f"Generation {generation_id} {state}; only one that is being built, or is retired, is discarded."
        )
    connection.execute(GIVE_UP_GENERATION, {"generation_id": generation_id})
    return generation
