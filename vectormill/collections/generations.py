"""Generations: the builds of a collection. At most one is live, at most one is built alongside it, others are retired.

A writer holds a shared advisory lock on the collection's name until COMMIT; a change of its generations holds it
exclusively. The lock is not on the row, since a row lock would be written to disk with every put.
"""

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection, Row, text

from vectormill.collections.collection import (
    BUILDING,
    LIVE,
    RETIRED,
    Generation,
)
from vectormill.collections.generation_tables import table_name
from vectormill.db.parameters import to_jsonb
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import Conflict

GENERATION_COLUMNS = (
    "generations.id, generations.collection_id, collections.name, generations.spec, generations.state"
)

FROM_GENERATIONS = """
      FROM vectormill.generations
      JOIN vectormill.collections ON collections.id = generations.collection_id
"""

# True while the run of a rollback still copies rows and open jobs from this generation.
IS_CARRIED_FROM = """
    EXISTS (SELECT 1 FROM vectormill.runs
             WHERE runs.collection_id = generations.collection_id AND runs.finished_at IS NULL
               AND CAST(runs.options ->> 'carry_from' AS bigint) = generations.id)
"""

SHARE_COLLECTION = text("SELECT pg_advisory_xact_lock_shared(hashtextextended(:name, 7))")

LOCK_COLLECTION = text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 7))")

FIND_GENERATION = text(f"""
    SELECT {GENERATION_COLUMNS} {FROM_GENERATIONS}
     WHERE generations.id = :generation_id
""")

LIST_GENERATIONS = text(f"""
    SELECT {GENERATION_COLUMNS} {FROM_GENERATIONS}
     WHERE collections.name = :name AND generations.state = ANY(CAST(:states AS text[]))
     ORDER BY generations.id
""")

# Retired generations count too, so that an error can say how a client's fingerprint differs.
FIND_SPEC = text("SELECT spec FROM vectormill.generations WHERE fingerprint = :fingerprint LIMIT 1")


def read_generation(row: Row[Any]) -> Generation:
    """Make a Generation of a row with GENERATION_COLUMNS."""
    spec = EncodingSpec.from_json(row.spec)
    return Generation(row.id, row.collection_id, row.name, spec, table_name(row.id), row.state)


def share_collection(connection: Connection, name: str) -> None:
    """Take the shared lock of a collection: nobody changes its generations until the transaction ends."""
    connection.execute(SHARE_COLLECTION, {"name": name})


def lock_collection(connection: Connection, name: str) -> None:
    """Take the exclusive lock of a collection: nobody else writes to it or changes its generations until the
    transaction ends.
    """
    connection.execute(LOCK_COLLECTION, {"name": name})


ADD_TO_REPORT = text("""
    UPDATE vectormill.generations
       SET report = report || jsonb_build_object(CAST(:name AS text), CAST(:found AS jsonb))
     WHERE id = :generation_id
""")


def add_to_report(
    connection: Connection, generation_id: int, name: str, found: Mapping[str, Any] | None
) -> None:
    """Store an entry of a generation's report: `index`, from what its index was built, or `canary`."""
    values = {"generation_id": generation_id, "name": name, "found": to_jsonb(found)}
    connection.execute(ADD_TO_REPORT, values)


def find_in_state(connection: Connection, collection: str, state: str) -> Generation | None:
    """Return the collection's generation in a state of which there is at most one, LIVE or BUILDING; else None."""
    row = connection.execute(LIST_GENERATIONS, {"name": collection, "states": [state]}).one_or_none()
    return None if row is None else read_generation(row)


def find_building(connection: Connection, collection: str) -> Generation | None:
    """Return the generation that is being built alongside the live one, or None."""
    return find_in_state(connection, collection, BUILDING)


def find_generation_by_id(connection: Connection, generation_id: int) -> Generation | None:
    """Return the generation with this id, in any state, or None."""
    row = connection.execute(FIND_GENERATION, {"generation_id": generation_id}).one_or_none()
    return None if row is None else read_generation(row)


def find_locked(
    connection: Connection, generation_id: int, lock: Callable[[Connection, str], None] = lock_collection
) -> Generation | None:
    """Return the generation as it is under the lock of its collection, in any state, or None."""
    generation = find_generation_by_id(connection, generation_id)
    if generation is None:
        return None
    lock(connection, generation.collection)
    return find_generation_by_id(connection, generation_id)


def find_spec(connection: Connection, fingerprint: str) -> EncodingSpec | None:
    """Return the spec with this fingerprint, or None if no generation has it."""
    spec = connection.execute(FIND_SPEC, {"fingerprint": fingerprint}).scalar_one_or_none()
    return None if spec is None else EncodingSpec.from_json(spec)


def find_written(connection: Connection, generation_id: int) -> Generation:
    """Return a generation to write to, and lock its state until the transaction ends.

    Raise Conflict unless it is live or being built.
    """
    generation = find_locked(connection, generation_id, share_collection)
    if generation is None or generation.state not in (LIVE, BUILDING):
        state = "no longer exists" if generation is None else f"is {generation.state}"
        raise Conflict(
            f"Generation {generation_id} {state}, so nothing can be written to it; start the run again."
        )
    return generation


def list_written_generations(
    connection: Connection, collection: str, *, is_deletion: bool = False
) -> list[Generation]:
    """Return the generations, by id, that a put or a deletion writes, and lock them until the transaction ends.

    A put writes the live generation and the one being built. A deletion writes the retired ones too, so that a rollback
    does not bring deleted items back; puts leave them unchanged.
    """
    share_collection(connection, collection)
    states = [LIVE, BUILDING, RETIRED] if is_deletion else [LIVE, BUILDING]
    rows = connection.execute(LIST_GENERATIONS, {"name": collection, "states": states})
    return [read_generation(row) for row in rows]
