"""Describe the schema of a migrated database as the page docs/SCHEMA.md."""

from collections.abc import Iterator
from typing import Any, Final

from sqlalchemy import Connection, Engine, Row, text

HEAD: Final = """# Schema

<!-- written by `pytest tests/integration/jobs/test_migrations.py --write-schema` from a migrated database -->

This is what the migrations create in the schema `vectormill`. The rows of collections are in further tables, which are
created at run time (`vectormill/collections/generation_tables.py`). Columns of one name mean the same everywhere:
`fence`, `attempt`, `lease_owner`, `lease_until` and `available_at` are those of
[leased work](decisions/0047-one-kernel-for-leased-work.md).
"""

# Partitions are left out: they have the columns and indexes of their table.
LIST_RELATIONS = text("""
    SELECT oid, relname AS name,
           coalesce(obj_description(oid, 'pg_class'), obj_description(reltype, 'pg_type')) AS comment,
           'PARTITION BY ' || pg_get_partkeydef(oid) AS partitions,
           (SELECT 'WITH (' || string_agg(option, ', ' ORDER BY option) || ')' FROM unnest(reloptions) AS option)
           AS storage
      FROM pg_class
     WHERE relnamespace = 'vectormill'::regnamespace AND relkind IN ('r', 'p', 'c') AND NOT relispartition
       AND relname <> 'alembic_version'
     ORDER BY relname
""")

LIST_COLUMNS = text("""
    SELECT attname AS name,
           concat_ws(' ', format_type(atttypid, atttypmod), CASE WHEN attnotnull THEN 'not null' END,
                     CASE WHEN attidentity <> '' THEN 'identity' END,
                     'default ' || pg_get_expr(adbin, adrelid)) AS type,
           col_description(attrelid, attnum) AS comment
      FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
     WHERE attrelid = :oid AND attnum > 0 AND NOT attisdropped
     ORDER BY attnum
""")

# Constraints, other indexes and triggers, in this order.
LIST_PARTS = text("""
    SELECT 'CONSTRAINT ' || conname || ' ' || pg_get_constraintdef(oid) AS definition,
           CASE WHEN contype = 'u' THEN obj_description(conindid, 'pg_class') END AS comment,
           strpos('puf', contype::text) AS place, conname::text AS name
      FROM pg_constraint WHERE conrelid = :oid AND contype IN ('p', 'u', 'f', 'c')
     UNION ALL
    SELECT pg_get_indexdef(indexrelid), obj_description(indexrelid, 'pg_class'), 4, indexrelid::regclass::text
      FROM pg_index
     WHERE indrelid = :oid
       AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = indexrelid AND contype IN ('p', 'u'))
     UNION ALL
    SELECT pg_get_triggerdef(oid), NULL, 5, tgname FROM pg_trigger WHERE tgrelid = :oid AND NOT tgisinternal
     ORDER BY place, name
""")

LIST_FUNCTIONS = text("""
    SELECT proname AS name, pg_get_functiondef(oid) AS definition
      FROM pg_proc WHERE pronamespace = 'vectormill'::regnamespace ORDER BY proname
""")


def describe_schema(engine: Engine) -> str:
    """Return the page: each table and type with its columns, constraints, indexes and triggers, then the functions."""
    with engine.connect() as connection:
        relations = [
            "\n".join(describe_relation(connection, row)) for row in connection.execute(LIST_RELATIONS)
        ]
        functions = [
            f"## {row.name}()\n\n```postgresql\n{row.definition.strip()}\n```\n"
            for row in connection.execute(LIST_FUNCTIONS)
        ]
    return "\n".join([HEAD, *relations, *functions])


def describe_relation(connection: Connection, relation: Row[Any]) -> Iterator[str]:
    yield f"## {relation.name}\n"
    if relation.comment:
        yield f"{relation.comment}\n"
    yield "| column | type | |\n| --- | --- | --- |"
    for column in connection.execute(LIST_COLUMNS, {"oid": relation.oid}):
        kind = column.type.replace("timestamp with time zone", "timestamptz")
        yield f"| `{column.name}` | {kind} | {column.comment or ''} |"
    parts = [
        (f"-- {part.comment}\n" if part.comment else "") + part.definition.replace("'::text", "'")
        for part in connection.execute(LIST_PARTS, {"oid": relation.oid})
    ]
    if lines := [*parts, *filter(None, [relation.partitions, relation.storage])]:
        yield "\n".join(["\n```postgresql", *lines, "```"])
    yield ""
