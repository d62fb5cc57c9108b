"""Rows of a generation by chance, with their results and a value of their metadata: for a picture of a collection.

Blocks are chosen by chance, and a bounded number of them is read, however large the table is.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from sqlalchemy import Connection

from vectormill.db.kinds.kinds import choose_kind
from vectormill.db.kinds.row_kind import Results
from vectormill.db.measures.blocks import count_blocks
from vectormill.db.rows.attributes import attributes_name
from vectormill.db.short_locks import limit_time
from vectormill.domain.collection import Generation
from vectormill.domain.errors import SearchTimeout

# So many blocks more than rows are wanted, since some are not full.
SPARE: Final = 1.3
# Chance takes each block by itself: of one or two that are wanted it may take none, and rows of one block are alike.
LEAST_BLOCKS: Final = 50
MOST_FIELDS: Final = 20


@dataclass(frozen=True, slots=True)
class RowSample:
    """Rows in no order. `values` are of the metadata's field that was asked for, None where there is none.

    `fields` are the names in the metadata of these rows, the commonest first. `share` is that of the table's blocks
    which were read, 0 to 1.
    """

    keys: list[str]
    values: list[str | None]
    results: Results
    fields: list[str]
    share: float


# The order is drawn among keys alone, and results are read of the rows that are drawn: a vector may lie in TOAST.
SAMPLE_ROWS: Final = """
    WITH drawn AS MATERIALIZED (
        SELECT key FROM vectormill.{table} TABLESAMPLE SYSTEM (%(percent)s) ORDER BY random() LIMIT %(limit)s
    )
    SELECT drawn.key, kept.metadata ->> CAST(%(field)s AS text) AS value, {result} AS result,
           CASE WHEN jsonb_typeof(kept.metadata) = 'object'
                THEN ARRAY(SELECT jsonb_object_keys(kept.metadata) LIMIT %(fields)s) END AS fields
      FROM drawn
      JOIN vectormill.{table} AS live ON live.key = drawn.key
      LEFT JOIN vectormill.{attributes} AS kept ON kept.key = drawn.key
"""


def choose_percent(num_blocks: int, num_rows: float, size: int) -> float:
    """Of the blocks, so that about `size` rows are in them or more; where nobody has counted, a block a row."""
    rows_per_block = max(1.0, num_rows / max(1, num_blocks))
    wanted_blocks = max(LEAST_BLOCKS, SPARE * size / rows_per_block)
    return min(100.0, 100 * wanted_blocks / max(1, num_blocks))


def sample_rows(
    connection: Connection, generation: Generation, size: int, field: str | None, timeout_seconds: float
) -> RowSample:
    """So many rows of vectors or scores, or fewer where there are no more, and the value `field` of their metadata.

    Raises SearchTimeout; the caller's transaction is over then.
    """
    table = count_blocks(connection, generation)
    percent = choose_percent(table.num_blocks, table.num_rows, size)
    kind, spec = choose_kind(generation.spec), generation.spec
    statement = SAMPLE_ROWS.format(
        table=generation.table_name,
        attributes=attributes_name(generation.id),
        result=kind.sent(spec, "live"),
    )
    values: dict[str, Any] = {"percent": percent, "limit": size, "field": field, "fields": MOST_FIELDS}
    limit_time(connection, timeout_seconds)
    driver = connection.connection.driver_connection
    assert driver is not None
    try:
        with driver.cursor(binary=True) as cursor:
            rows = cursor.execute(statement, values).fetchall()
    except psycopg.errors.QueryCanceled as error:
        raise SearchTimeout(f"Drawing {size:,} rows took more than {timeout_seconds:g} s.") from error
    named = Counter(name for row in rows for name in row[3] or () if name != "_passage")
    return RowSample(
        keys=[row[0] for row in rows],
        values=[row[1] for row in rows],
        results=kind.read(b"".join(row[2] for row in rows), spec) if rows else kind.missing(0, spec),
        fields=[name for name, _ in named.most_common(MOST_FIELDS)],
        share=percent / 100,
    )
