"""Sources in the database: save, find and delete the source of a collection, which has at most one."""

from typing import Any, Final

from sqlalchemy import Connection, Row, text

from vectormill.db.parameters import to_jsonb
from vectormill.domain.errors import CollectionNotFound, SourceNotFound
from vectormill.sources.source import SavedSource, Source

SAVE_SOURCE = text("""
    INSERT INTO vectormill.sources (collection_id, kind, options, split)
    SELECT id, :kind, CAST(:options AS jsonb), CAST(:split AS jsonb)
      FROM vectormill.collections WHERE name = :collection
    ON CONFLICT (collection_id) DO UPDATE
       SET kind = excluded.kind, options = excluded.options, split = excluded.split, updated_at = now()
    RETURNING created_at, updated_at
""")

# A row of a collection, in which the columns of its source are NULL if it has none.
_SELECT_SOURCE: Final = """
    SELECT collections.id, collections.name, sources.kind, sources.options, sources.split, sources.created_at,
           sources.updated_at, now() AS now
      FROM vectormill.collections LEFT JOIN vectormill.sources ON sources.collection_id = collections.id
"""
FIND_SOURCE = text(f"{_SELECT_SOURCE} WHERE collections.name = :collection")
FIND_SOURCE_BY_ID = text(f"{_SELECT_SOURCE} WHERE collections.id = :collection_id")
# The collection cannot be deleted until the transaction ends.
LOCK_SOURCE = text(f"{_SELECT_SOURCE} WHERE collections.name = :collection FOR KEY SHARE OF collections")

DELETE_SOURCE = text("""
    DELETE FROM vectormill.sources USING vectormill.collections
     WHERE sources.collection_id = collections.id AND collections.name = :collection
    RETURNING sources.collection_id
""")


def save_source(connection: Connection, collection: str, source: Source) -> SavedSource:
    """Save the source of a collection, replacing the one it had. Raise CollectionNotFound."""
    values = {
        "collection": collection,
        "kind": source.kind,
        "options": to_jsonb(dict(source.options)),
        "split": to_jsonb(dict(source.split)),
    }
    row = connection.execute(SAVE_SOURCE, values).one_or_none()
    if row is None:
        raise CollectionNotFound.named(collection)
    return SavedSource(collection, source, row.created_at, row.updated_at)


def find_source(connection: Connection, collection: str) -> SavedSource:
    """Return the source of a collection. Raise CollectionNotFound or SourceNotFound."""
    row = connection.execute(FIND_SOURCE, {"collection": collection}).one_or_none()
    if row is None:
        raise CollectionNotFound.named(collection)
    source = read_source(row)
    if source is None:
        raise SourceNotFound(
            f"Collection {collection!r} has no source: `vectormill sources set {collection} --help` shows how to set "
            "one."
        )
    return SavedSource(collection, source, row.created_at, row.updated_at)


def find_source_by_id(connection: Connection, collection_id: int) -> Source | None:
    """Return the source of the collection with this id; None if it has no source, or does not exist."""
    row = connection.execute(FIND_SOURCE_BY_ID, {"collection_id": collection_id}).one_or_none()
    return None if row is None else read_source(row)


def read_source(row: Row[Any]) -> Source | None:
    """Return the source in a row of one of the statements above; None if the collection has none."""
    return None if row.kind is None else Source(row.kind, row.options, row.split)


def delete_source(connection: Connection, collection: str) -> None:
    """Delete the source of a collection but not its rows. Raise CollectionNotFound or SourceNotFound."""
    find_source(connection, collection)
    connection.execute(DELETE_SOURCE, {"collection": collection})
