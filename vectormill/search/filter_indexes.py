"""Filter indexes: how a field of the metadata is written in SQL, so that a filter and its index mean the same.

jsonb orders values: numbers as numbers, texts as texts. A B-tree entry may have about 2,700 bytes, and a worker whose
row had a longer one could write neither that row nor the chunk it is in. So a longer value, and what is no scalar,
counts as none here: in the index, and in the filter that is to be served by it.
"""

import hashlib
from typing import Final

from psycopg import sql

from vectormill.collections.rows.attributes import attributes_name

# Instead of a field: one index over all metadata, for `metadata @> '{"tags": ["new"]}'` and `metadata ? 'year'`.
ANY_FIELD: Final = "*"

MOST_VALUE_BYTES: Final = 2000


def write_value(field: str) -> str:
    """The value of a field as its index has it; `field` is its SQL, such as `metadata -> 'year'`.

    An expression, and no partial index: Postgres gathers how often which value of it comes, and so knows how many rows
    a filter leaves.
    """
    return (
        f"(CASE WHEN octet_length(CAST({field} AS text)) <= {MOST_VALUE_BYTES}"
        f" AND jsonb_typeof({field}) NOT IN ('array', 'object') THEN {field} END)"
    )


def name_filter_index(generation_id: int, field: str) -> str:
    """Make the name of an index on a field, whatever the field, of at most 63 bytes."""
    if field == ANY_FIELD:
        return f"{attributes_name(generation_id)}_on_any"
    return f"{attributes_name(generation_id)}_on_{hashlib.blake2b(field.encode(), digest_size=6).hexdigest()}"


def define_filter_index(field: str) -> sql.Composable:
    """Return the text behind `CREATE INDEX … ON the attributes table`. A dot leads into an object, as in a
    filter.
    """
    if field == ANY_FIELD:
        return sql.SQL("USING gin (metadata jsonb_ops)")
    names = [sql.Literal(name) for name in field.split(".")]
    template = write_value("metadata" + " -> {}" * len(names))
    return sql.SQL("({value})").format(value=sql.SQL(template).format(*names, *names, *names))


def name_text_index(generation_id: int) -> str:
    return f"{attributes_name(generation_id)}_search"


def define_text_index() -> sql.Composable:
    """Return the definition of the index of the words of kept texts, for hybrid searches."""
    return sql.SQL("USING gin (search)")
