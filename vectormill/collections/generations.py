"""Generations: the builds of a collection. At most one is live, at most one is built beside it, others are retired.

Whoever writes to a collection holds its name shared until COMMIT, whoever changes which generations it has holds it
alone. The name and not the row: a lock on the row would be written to disk with every put.
"""

from typing import Any

from sqlalchemy import Connection, Row, text

from vectormill.collections.collection import (
    BUILDING,
    LIVE,
    RETIRED,
    Generation,
)
from vectormill.collections.generation_tables import table_name
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import Conflict

GENERATION_COLUMNS = (
    "generations.id, generations.collection_id, collections.name, generations.spec, generations.state"
)

FROM_GENERATIONS = """
      FROM vectormill.generations
      JOIN vectormill.collections ON collections.id = generations.collection_id
"""

# A rollback still takes rows and open jobs from it.
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

# Any generation that is kept, retired ones too, so that a client can be told what tells it from its own.
FIND_SPEC = text("SELECT spec FROM vectormill.generations WHERE fingerprint = :fingerprint LIMIT 1")


def read_generation(row: Row[Any]) -> Generation:
    """Read a generation from a row of GENERATION_COLUMNS."""
    spec = EncodingSpec.from_json(row.spec)
    return Generation(row.id, row.collection_id, row.name, spec, table_name(row.id), row.state)


def share_collection(connection: Connection, name: str) -> None:
    """Keep the collection's generations as they are until the transaction ends; others may do the same
    meanwhile.
    """
    connection.execute(SHARE_COLLECTION, {"name": name})


def lock_collection(connection: Connection, name: str) -> None:
    """Keep all others from writing to the collection or changing its generations until the transaction ends."""
    connection.execute(LOCK_COLLECTION, {"name": name})


def find_in_state(connection: Connection, collection: str, state: str) -> Generation | None:
    """Return the collection's generation that is live, or that is being built; there is at most one of each."""
    row = connection.execute(LIST_GENERATIONS, {"name": collection, "states": [state]}).one_or_none()
    return None if row is None else read_generation(row)


def find_building(connection: Connection, collection: str) -> Generation | None:
    """Return the generation that is being built beside the live one."""
    return find_in_state(connection, collection, BUILDING)


def find_generation_by_id(connection: Connection, generation_id: int) -> Generation | None:
    """Return the generation with this id, whatever its state."""
    row = connection.execute(FIND_GENERATION, {"generation_id": generation_id}).one_or_none()
    return None if row is None else read_generation(row)


def find_spec(connection: Connection, fingerprint: str) -> EncodingSpec | None:
    """Return the spec that a fingerprint names, if any generation has it."""
    spec = connection.execute(FIND_SPEC, {"fingerprint": fingerprint}).scalar_one_or_none()
    return None if spec is None else EncodingSpec.from_json(spec)


def find_written(connection: Connection, generation_id: int) -> Generation:
    """Return a generation that is live or being built, and stays so until the transaction ends. Raise Conflict."""
    generation = find_generation_by_id(connection, generation_id)
    if generation is not None:
        share_collection(connection, generation.collection)
        generation = find_generation_by_id(connection, generation_id)
    if generation is None or generation.state not in (LIVE, BUILDING):
        state = "is there no more" if generation is None else f"is {generation.state}"
        raise Conflict(
            f"Generation {generation_id} {state}, so nothing is written into it; start the run again."
        )
    return generation


def list_written_generations(
    connection: Connection, collection: str, *, is_deletion: bool = False
) -> list[Generation]:
    """List the generations that a put or a deletion writes: the live one, the one being built; a deletion the
    retired too.

    By id, and the same until the transaction ends. A retired one is not put into, so that a rollback finds it as it
    was; but what was deleted does not come back with it.
    """
    share_collection(connection, collection)
    states = [LIVE, BUILDING, RETIRED] if is_deletion else [LIVE, BUILDING]
    rows = connection.execute(LIST_GENERATIONS, {"name": collection, "states": states})
    return [read_generation(row) for row in rows]
