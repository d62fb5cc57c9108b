"""Collections and their generations: which vectors a name means now. What is nearest to a query: matches.py."""

from typing import Any

from sqlalchemy import Connection, Row, text

from vectormill.db.jsonb import to_jsonb
from vectormill.db.tables import SCHEMA, metadata
from vectormill.db.vector_types import choose_vector_type
from vectormill.db.vectors import create_vector_table, point_view_at, table_name
from vectormill.domain.collection import LIVE, Generation, check_new_name
from vectormill.domain.encoding import FLOAT16, EncodingSpec
from vectormill.domain.errors import CollectionNotFound, Conflict, SpecMismatch, TooManyCollections

FIND_LIVE_GENERATION = text("""
    SELECT generations.id, collections.name, generations.spec, generations.state
      FROM vectormill.collections
      JOIN vectormill.generations ON generations.collection_id = collections.id AND generations.state = 'live'
     WHERE collections.name = :name
""")

COUNT_COLLECTIONS = text("SELECT count(*) FROM vectormill.collections")

LIST_LIVE_GENERATIONS = text("""
    SELECT generations.id, collections.name, generations.spec, generations.state
      FROM vectormill.collections
      JOIN vectormill.generations ON generations.collection_id = collections.id AND generations.state = 'live'
     WHERE CAST(:after AS bigint) IS NULL
        OR collections.name > (SELECT earlier.name
                                 FROM vectormill.collections AS earlier
                                 JOIN vectormill.generations AS last ON last.collection_id = earlier.id
                                WHERE last.id = :after)
     ORDER BY collections.name
     LIMIT :limit
""")


def find_generation(connection: Connection, name: str) -> Generation:
    """The live generation of a collection. Raises CollectionNotFound."""
    row = connection.execute(FIND_LIVE_GENERATION, {"name": name}).one_or_none()
    if row is None:
        raise CollectionNotFound(
            f"There is no collection {name!r}; submit a job with this collection name to make it."
        )
    return _generation(row)


def list_collections(connection: Connection, *, after: int | None, limit: int) -> list[Generation]:
    """The live generations of collections by name; `after` is the id of the last one that is known already."""
    rows = connection.execute(LIST_LIVE_GENERATIONS, {"after": after, "limit": limit})
    return [_generation(row) for row in rows]


def _generation(row: Row[Any]) -> Generation:
    return Generation(row.id, row.name, EncodingSpec.from_json(row.spec), table_name(row.id), row.state)


def check_spec_fits(generation: Generation, spec: EncodingSpec) -> None:
    """Raises SpecMismatch, naming what differs, unless both specs mean the same vector space."""
    if generation.spec.fingerprint() == spec.fingerprint():
        return
    default = {"vector_type": FLOAT16}
    theirs, ours = default | generation.spec.vector_space(), default | spec.vector_space()
    differences = ", ".join(
        f"{name} is {theirs[name]!r}, not {ours[name]!r}" for name in theirs if theirs[name] != ours[name]
    )
    raise SpecMismatch(
        f"Collection {generation.collection!r} holds vectors of another encoding spec ({differences}). "
        "Vector spaces are never mixed: use the same options, or another collection name."
    )


def check_collection(connection: Connection, name: str, spec: EncodingSpec, max_collections: int) -> None:
    """Raises what `open_collection` would, before an upload and not at its end, and TooManyCollections."""
    try:
        check_spec_fits(find_generation(connection, name), spec)
    except CollectionNotFound:
        refuse_taken_name(connection, name)
        if connection.execute(COUNT_COLLECTIONS).scalar_one() >= max_collections:
            raise TooManyCollections(
                f"There are {max_collections:,} collections, as many as VECTORMILL_MAX_COLLECTIONS allows, and "
                f"{name!r} is none of them; use one that exists, or raise the limit."
            ) from None


def open_collection(connection: Connection, name: str, spec: EncodingSpec) -> Generation:
    """The live generation for `name`, made now (table and view) when the collection is new.

    Two first submissions to one name are serialized by an advisory lock. Raises SpecMismatch, and Conflict when a table
    or view of another owner already has the name.
    """
    connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 7))"), {"name": name})
    try:
        generation = find_generation(connection, name)
    except CollectionNotFound:
        return _create_collection(connection, name, spec)
    check_spec_fits(generation, spec)
    return generation


def refuse_taken_name(connection: Connection, name: str) -> None:
    """Raises InvalidOption for a reserved word, and Conflict when the name means something else in this database."""
    check_new_name(name)
    # A role named like our schema has it first in its search path, where our own tables would hide the view.
    is_ours = f"{SCHEMA}.{name}" in metadata.tables
    taken = text("SELECT to_regclass('public.' || quote_ident(:name))")
    is_taken = connection.execute(taken, {"name": name}).scalar() is not None
    # Asked afterwards: the first job of a collection may have made it since the caller looked for it.
    made = text("SELECT EXISTS (SELECT 1 FROM vectormill.collections WHERE name = :name)")
    if is_ours or (is_taken and not connection.execute(made, {"name": name}).scalar_one()):
        raise Conflict(
            f"A table or view named {name!r} exists already and is no collection; choose another collection name."
        )


def _create_collection(connection: Connection, name: str, spec: EncodingSpec) -> Generation:
    refuse_taken_name(connection, name)
    collection_id = connection.execute(
        text("INSERT INTO vectormill.collections (name) VALUES (:name) RETURNING id"), {"name": name}
    ).scalar_one()
    generation_id: int = connection.execute(
        text("""
            INSERT INTO vectormill.generations (collection_id, spec, fingerprint, state)
            VALUES (:collection_id, CAST(:spec AS jsonb), :fingerprint, 'live') RETURNING id
        """),
        {"collection_id": collection_id, "spec": to_jsonb(spec.to_json()), "fingerprint": spec.fingerprint()},
    ).scalar_one()
    kind = choose_vector_type(spec, in_collection=True)
    create_vector_table(connection, generation_id, kind, spec.dimensions)
    point_view_at(connection, name, generation_id)
    return Generation(generation_id, name, spec, table_name(generation_id), LIVE)
