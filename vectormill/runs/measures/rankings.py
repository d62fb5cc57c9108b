"""The nearest rows to a row, with the index and without it; and rows by chance to begin from."""

from typing import Any, Final

from sqlalchemy import Connection, text

from vectormill.collections.collection import Generation
from vectormill.domain.encoding import BINARY, FLOAT16, FLOAT32
from vectormill.runs.measures.blocks import count_blocks
from vectormill.search.matches import PREPARE_SEARCH, choose_num_candidates
from vectormill.vectors.vector_types import choose_vector_type

# Operators of the vector types that an index can be made of.
DISTANCE_OPERATORS: Final = {FLOAT32: "<=>", FLOAT16: "<=>", BINARY: "<~>"}

FIND_INDEX: Final = text("""
    SELECT own.relname
      FROM pg_index AS index
      JOIN pg_class AS own ON own.oid = index.indexrelid
      JOIN pg_am AS method ON method.oid = own.relam
     WHERE index.indrelid = to_regclass(:table) AND index.indisvalid AND method.amname IN ('hnsw', 'ivfflat')
     ORDER BY own.relname LIMIT 1
""")


def find_vector_index(connection: Connection, generation: Generation) -> str | None:
    """The name of an index on the generation's vectors that is ready; None when there is none."""
    table = f"vectormill.{generation.table_name}"
    name: str | None = connection.execute(FIND_INDEX, {"table": table}).scalar_one_or_none()
    return name


# Rows of a few blocks: a sample of single rows would read them all. `share` is in percent.
SAMPLE_ROWS: Final = """
    SELECT key, CAST(embedding AS text) AS embedding
      FROM vectormill.{table} TABLESAMPLE SYSTEM (:share) ORDER BY random() LIMIT :limit
"""


def sample_rows(connection: Connection, generation: Generation, size: int) -> list[tuple[str, str]]:
    """(key, embedding as SQL writes it) of so many rows by chance, or of all when there are fewer.

    From blocks by chance, so that rows which lie together are met together; cheap whatever the table's size.
    """
    num_rows = count_blocks(connection, generation).num_rows
    share = 100.0 if num_rows < 50 * size else min(100.0, 1000.0 * size / num_rows)
    statement = text(SAMPLE_ROWS.format(table=generation.table_name))
    rows = connection.execute(statement, {"share": share, "limit": size}).all()
    if len(rows) < size and share < 100.0:  # the rows that chance found are dead ones
        rows = connection.execute(statement, {"share": 100.0, "limit": size}).all()
    return [(row.key, row.embedding) for row in rows]


FIND_NEAREST: Final = """
    SELECT key, distance
      FROM (SELECT key, embedding {operator} CAST(:query AS {column}) AS distance
              FROM vectormill.{table} ORDER BY distance LIMIT :limit) AS nearest
     ORDER BY distance + 0
"""

# Until the transaction ends. What an index is, is the planner's only other choice.
READ_EVERY_ROW: Final = text("SET LOCAL enable_indexscan = off")
READ_THE_INDEX: Final = text("SET LOCAL enable_seqscan = off")


def find_nearest(
    connection: Connection, generation: Generation, row: tuple[str, str], limit: int, *, is_exact: bool
) -> list[tuple[str, float]]:
    """(key, distance) of the nearest to a sampled row, without itself. The index is asked as a search asks it."""
    kind = choose_vector_type(generation.spec, in_collection=True)
    column = f"bit({int(generation.spec.dimensions)})" if kind.name == BINARY else kind.column
    statement = FIND_NEAREST.format(
        operator=DISTANCE_OPERATORS[kind.name], column=column, table=generation.table_name
    )
    key, query = row
    values: dict[str, Any] = {"query": query, "limit": limit + 1}
    connection.execute(PREPARE_SEARCH, {"timeout": "0", "num_candidates": choose_num_candidates(limit)})
    connection.execute(READ_EVERY_ROW if is_exact else READ_THE_INDEX)
    rows = connection.execute(text(statement), values).all()
    return [(found.key, float(found.distance)) for found in rows if found.key != key][:limit]
