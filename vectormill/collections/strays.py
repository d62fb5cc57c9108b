"""Strays: what the database holds of a collection and should not: attributes without a row, rows of deleted keys.

Reads, and changes nothing. Each question is one statement.
"""

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, text

from vectormill.collections.collection import Generation
from vectormill.collections.kinds import choose_kind
from vectormill.collections.removals import LIST_ORPHANS
from vectormill.collections.rows.attributes import attributes_name, send_text

MOST_NAMED_KEYS: Final = 20


@dataclass(frozen=True, slots=True)
class Strays:
    """The numbers of stray rows, tables and keys, and some of them by name."""

    num_attributes: int
    attribute_keys: list[str]
    num_deleted_keys: int
    deleted_keys: list[str]
    missing_tables: list[str]
    left_tables: list[str]
    view_reads: str


FIND_BARE_ATTRIBUTES: Final = """
    SELECT count(*) AS number, (array_agg(key))[1 : CAST(:limit AS integer)] AS keys
      FROM vectormill.{attributes} AS kept
     WHERE NOT EXISTS (SELECT 1 FROM vectormill.{table} AS live WHERE live.key = kept.key)
"""

# A row that is older than the deletion of its key.
FIND_DELETED_KEYS: Final = """
    SELECT count(*) AS number, (array_agg(live.key))[1 : CAST(:limit AS integer)] AS keys
      FROM vectormill.tombstones AS tombstone
      JOIN vectormill.{table} AS live ON live.key = tombstone.key AND live.job_seq < tombstone.seq
     WHERE tombstone.collection_id = :collection_id
"""

LIST_MISSING_TABLES: Final = text("""
    SELECT wanted.name
      FROM vectormill.generations
     CROSS JOIN LATERAL (VALUES ('vectormill.generation_' || generations.id),
                                ('vectormill.generation_' || generations.id || '_attributes')) AS wanted (name)
     WHERE generations.collection_id = :collection_id AND generations.state <> 'pruned'
       AND to_regclass(wanted.name) IS NULL
     ORDER BY wanted.name
""")

# The tables that the collection's view is made of.
LIST_TABLES_OF_VIEW: Final = text("""
    SELECT DISTINCT class.relname
      FROM pg_depend AS link
      JOIN pg_rewrite AS rule ON link.classid = CAST('pg_rewrite' AS regclass) AND link.objid = rule.oid
      JOIN pg_class AS class ON class.oid = link.refobjid AND class.relkind = 'r'
     WHERE rule.ev_class = to_regclass(:view) AND link.refclassid = CAST('pg_class' AS regclass)
     ORDER BY class.relname
""")


def find_strays(connection: Connection, generation: Generation) -> Strays:
    names = {"table": generation.table_name, "attributes": attributes_name(generation.id)}
    limit = {"limit": MOST_NAMED_KEYS}
    of_it = {"collection_id": generation.collection_id}
    bare = connection.execute(text(FIND_BARE_ATTRIBUTES.format(**names)), limit).one()
    deleted = connection.execute(text(FIND_DELETED_KEYS.format(**names)), limit | of_it).one()
    read = connection.execute(LIST_TABLES_OF_VIEW, {"view": f"public.{generation.collection}"}).scalars()
    return Strays(
        bare.number,
        bare.keys or [],
        deleted.number,
        deleted.keys or [],
        list(connection.execute(LIST_MISSING_TABLES, of_it).scalars()),
        list(connection.execute(LIST_ORPHANS).scalars()),
        ", ".join(read),
    )


SAMPLE_HASHES: Final = """
    SELECT kept.key, {content} AS content, live.content_hash
      FROM vectormill.{attributes} AS kept TABLESAMPLE SYSTEM (:share)
      JOIN vectormill.{table} AS live ON live.key = kept.key AND live.job_seq = kept.job_seq
     WHERE kept.text IS NOT NULL
     LIMIT :limit
"""


def sample_hashes(
    connection: Connection, generation: Generation, limit: int
) -> list[tuple[str, bytes, bytes]]:
    """(key, text, content_hash of its result) of so many kept texts at the most."""
    statement = text(
        SAMPLE_HASHES.format(
            table=generation.table_name,
            attributes=attributes_name(generation.id),
            content=send_text(choose_kind(generation.spec).text_columns, "kept"),
        )
    )
    rows = connection.execute(statement, {"share": 10.0, "limit": limit}).all()
    if len(rows) < limit:
        rows = connection.execute(statement, {"share": 100.0, "limit": limit}).all()
    return [(row.key, bytes(row.content), bytes(row.content_hash)) for row in rows]
