"""Measures: what can be said of a generation's vectors from Postgres alone. Shared by checks and by canaries.

How much of the exact answer its index finds; which rows are no vectors. Each question is short transactions. What a
sample of its texts gives when it is encoded again: samples.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Engine, text

from vectormill.db.search.matches import PREPARE_SEARCH, choose_num_candidates
from vectormill.domain.collection import Generation
from vectormill.domain.encoding import BINARY, FLOAT16, FLOAT32, INT8
from vectormill.vectors.vector_types import VECTOR_TYPE_BY_NAME

# An exact search reads every row, at some million rows a second: so many rows are read for a whole measurement.
EXACT_ROWS_BUDGET: Final = 20_000_000
LEAST_QUERIES: Final = 10
MOST_QUERIES: Final = 50
# 8 KiB each: a transaction of so many blocks takes a fraction of a second.
BLOCKS_PER_SCAN: Final = 4096
MOST_NAMED_KEYS: Final = 20
# Distances of float16 vectors that differ by less are the same rank, whoever comes first.
SAME_DISTANCE: Final = 1e-5
# Of a vector whose model promises length 1, in float16.
NORM_TOLERANCE: Final = 0.01

DISTANCE_OPERATORS: Final = {FLOAT32: "<=>", FLOAT16: "<=>", BINARY: "<~>"}


@dataclass(frozen=True, slots=True)
class Recall:
    """Of the `limit` nearest rows to `num_queries` rows, the share that the index found; 0 to 1."""

    value: float
    num_queries: int
    limit: int
    index: str

    def to_json(self) -> dict[str, Any]:
        return {
            "value": round(self.value, 4),
            "num_queries": self.num_queries,
            "limit": self.limit,
            "index": self.index,
        }


@dataclass(frozen=True, slots=True)
class Soundness:
    """Rows that are no vectors. `broken_keys` are some that are NaN, infinite or zero; norms leave those out.

    A model that normalizes promises a norm of 1: `num_odd_norms` are off it by more than NORM_TOLERANCE. Norms are None
    where numbers are codes or bits.
    """

    num_rows: int
    num_not_finite: int
    num_zero: int
    num_odd_norms: int
    smallest_norm: float | None
    largest_norm: float | None
    broken_keys: list[str]

    @property
    def is_sound(self) -> bool:
        return self.num_not_finite == self.num_zero == self.num_odd_norms == 0

    def to_json(self) -> dict[str, Any]:
        return {
            "num_rows": self.num_rows,
            "num_not_finite": self.num_not_finite,
            "num_zero": self.num_zero,
            "num_odd_norms": self.num_odd_norms,
            "smallest_norm": self.smallest_norm,
            "largest_norm": self.largest_norm,
            "broken_keys": self.broken_keys,
        }


def vector_type_of(generation: Generation) -> str:
    return generation.spec.vector_type or FLOAT16


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


COUNT_BLOCKS: Final = text("""
    SELECT pg_relation_size(to_regclass(:table)) / current_setting('block_size')::bigint AS num_blocks,
           greatest(coalesce((SELECT reltuples FROM pg_class WHERE oid = to_regclass(:table)), 0), 0) AS num_rows
""")

# Of a few blocks: a sample of single rows would read them all. `share` is in percent.
SAMPLE_ROWS: Final = """
    SELECT key, CAST(embedding AS text) AS embedding
      FROM vectormill.{table} TABLESAMPLE SYSTEM (:share) ORDER BY random() LIMIT :limit
"""

FIND_NEAREST: Final = """
    SELECT key, distance
      FROM (SELECT key, embedding {operator} CAST(:query AS {column}) AS distance
              FROM vectormill.{table} ORDER BY distance LIMIT :limit) AS nearest
     ORDER BY distance + 0
"""

# Until the transaction ends. What an index is, is the planner's only other choice.
READ_EVERY_ROW: Final = text("SET LOCAL enable_indexscan = off")
READ_THE_INDEX: Final = text("SET LOCAL enable_seqscan = off")


def measure_recall(
    engine: Engine,
    generation: Generation,
    *,
    check: Callable[[], None],
    limit: int = 10,
    max_queries: int = MOST_QUERIES,
) -> Recall | None:
    """How much of the exact answer the index finds, for rows of the generation itself as queries.

    The row itself is left out of both answers. None when no index serves, as for int8 codes, or there are fewer rows
    than are asked for. `check` is called between transactions.
    """
    kind = vector_type_of(generation)
    if kind == INT8:
        return None
    with engine.connect() as connection:
        index = find_vector_index(connection, generation)
        if index is None:
            return None
        queries = sample_rows(connection, generation, max_queries)
        size = connection.execute(COUNT_BLOCKS, {"table": f"vectormill.{generation.table_name}"}).one()
    affordable = int(EXACT_ROWS_BUDGET / max(size.num_rows, 1))
    queries = queries[: max(LEAST_QUERIES, min(max_queries, affordable))]
    column = VECTOR_TYPE_BY_NAME[kind].column
    operator = DISTANCE_OPERATORS[kind]
    if kind == BINARY:
        column = f"bit({int(generation.spec.dimensions)})"
    statement = FIND_NEAREST.format(operator=operator, column=column, table=generation.table_name)
    num_found = num_wanted = 0
    for key, query in queries:
        check()
        values = {"query": query, "limit": limit + 1}
        exact = _find_nearest(engine, statement, values, key, limit, is_exact=True)
        if len(exact) < limit:
            return None
        found = _find_nearest(engine, statement, values, key, limit, is_exact=False)
        worst = max(distance for _, distance in exact) + SAME_DISTANCE
        num_wanted += limit
        num_found += sum(distance <= worst for _, distance in found)
    return Recall(num_found / num_wanted, len(queries), limit, index) if num_wanted else None


def _find_nearest(
    engine: Engine, statement: str, values: dict[str, Any], key: str, limit: int, *, is_exact: bool
) -> list[tuple[str, float]]:
    """(key, distance) without the row itself. The index is asked as a search asks it."""
    with engine.connect() as connection:
        prepared = {"timeout": "0", "num_candidates": choose_num_candidates(limit)}
        connection.execute(PREPARE_SEARCH, prepared)
        connection.execute(READ_EVERY_ROW if is_exact else READ_THE_INDEX)
        rows = connection.execute(text(statement), values).all()
    return [(row.key, float(row.distance)) for row in rows if row.key != key][:limit]


def sample_rows(connection: Connection, generation: Generation, size: int) -> list[tuple[str, str]]:
    """(key, embedding as SQL writes it) of so many rows by chance, or of all when there are fewer.

    From blocks by chance, so that rows which lie together are met together; cheap whatever the table's size.
    """
    table = f"vectormill.{generation.table_name}"
    found = connection.execute(COUNT_BLOCKS, {"table": table}).one()
    share = 100.0 if found.num_rows < 50 * size else min(100.0, 1000.0 * size / found.num_rows)
    statement = text(SAMPLE_ROWS.format(table=generation.table_name))
    rows = connection.execute(statement, {"share": share, "limit": size}).all()
    if len(rows) < size and share < 100.0:  # the rows that chance found are dead ones
        rows = connection.execute(statement, {"share": 100.0, "limit": size}).all()
    return [(row.key, row.embedding) for row in rows]


SCAN_NORMS: Final = """
    SELECT count(*) AS num_rows,
           count(*) FILTER (WHERE norm IN ('NaN', 'Infinity')) AS num_not_finite,
           count(*) FILTER (WHERE norm = 0) AS num_zero,
           count(*) FILTER (WHERE norm > 0 AND norm < 'Infinity'
                              AND abs(norm - 1) > CAST(:tolerance AS double precision)) AS num_odd_norms,
           min(norm) FILTER (WHERE norm > 0 AND norm < 'Infinity') AS smallest_norm,
           max(norm) FILTER (WHERE norm > 0 AND norm < 'Infinity') AS largest_norm,
           (array_agg(key) FILTER (WHERE norm = 0 OR norm IN ('NaN', 'Infinity')))[1 : CAST(:limit AS integer)]
               AS broken_keys
      FROM (SELECT key, CAST({norm}(embedding) AS double precision) AS norm FROM vectormill.{table}
             WHERE ctid >= CAST(:first AS tid) AND ctid < CAST(:end AS tid)) AS scanned
"""

COUNT_ROWS_OF_BLOCKS: Final = """
    SELECT count(*) AS num_rows FROM vectormill.{table}
     WHERE ctid >= CAST(:first AS tid) AND ctid < CAST(:end AS tid)
"""


def scan_vectors(engine: Engine, generation: Generation, *, check: Callable[[], None]) -> Soundness:
    """Reads every vector once, some thousand blocks to a transaction. `check` is called between them.

    Codes and bits have no norm: all of theirs are vectors, and only counted.
    """
    kind = vector_type_of(generation)
    norms_mean_something = kind in (FLOAT16, FLOAT32)
    template = SCAN_NORMS if norms_mean_something else COUNT_ROWS_OF_BLOCKS
    norm = "vector_norm" if kind == FLOAT32 else "l2_norm"
    statement = text(template.format(table=generation.table_name, norm=norm))
    tolerance = NORM_TOLERANCE if generation.spec.normalize else float("inf")
    num_rows = num_not_finite = num_zero = num_odd = 0
    norms: list[float] = []
    broken: list[str] = []
    with engine.connect() as connection:
        size = connection.execute(COUNT_BLOCKS, {"table": f"vectormill.{generation.table_name}"}).one()
    for first in range(0, max(size.num_blocks, 1), BLOCKS_PER_SCAN):
        check()
        values: dict[str, Any] = {"first": f"({first},0)", "end": f"({first + BLOCKS_PER_SCAN},0)"}
        if norms_mean_something:
            values |= {"tolerance": tolerance, "limit": MOST_NAMED_KEYS}
        with engine.connect() as connection:
            row = connection.execute(statement, values).one()
        num_rows += row.num_rows
        if norms_mean_something:
            num_not_finite += row.num_not_finite
            num_zero += row.num_zero
            num_odd += row.num_odd_norms
            norms += [norm for norm in (row.smallest_norm, row.largest_norm) if norm is not None]
            broken += row.broken_keys or []
    return Soundness(
        num_rows,
        num_not_finite,
        num_zero,
        num_odd,
        min(norms, default=None),
        max(norms, default=None),
        broken[:MOST_NAMED_KEYS],
    )
