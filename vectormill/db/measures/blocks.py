"""A generation's table, read block by block: how large it is, and which of its rows are no vectors."""

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, text

from vectormill.domain.collection import Generation
from vectormill.domain.encoding import FLOAT16, FLOAT32
from vectormill.vectors.vector_types import choose_vector_type


@dataclass(frozen=True, slots=True)
class TableSize:
    """`num_rows` is what Postgres takes it for; 0 where it has never counted."""

    num_blocks: int
    num_rows: float


@dataclass(frozen=True, slots=True)
class ScannedBlocks:
    """Where numbers are codes or bits, rows are only counted. `broken_keys` are some that are NaN, infinite or zero."""

    num_rows: int
    num_not_finite: int = 0
    num_zero: int = 0
    num_odd_norms: int = 0
    smallest_norm: float | None = None
    largest_norm: float | None = None
    broken_keys: tuple[str, ...] = ()


COUNT_BLOCKS: Final = text("""
    SELECT pg_relation_size(to_regclass(:table)) / current_setting('block_size')::bigint AS num_blocks,
           greatest(coalesce((SELECT reltuples FROM pg_class WHERE oid = to_regclass(:table)), 0), 0) AS num_rows
""")


def count_blocks(connection: Connection, generation: Generation) -> TableSize:
    found = connection.execute(COUNT_BLOCKS, {"table": f"vectormill.{generation.table_name}"}).one()
    return TableSize(found.num_blocks, found.num_rows)


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

COUNT_ROWS: Final = """
    SELECT count(*) AS num_rows FROM vectormill.{table}
     WHERE ctid >= CAST(:first AS tid) AND ctid < CAST(:end AS tid)
"""


def scan_blocks(
    connection: Connection, generation: Generation, blocks: range, *, norm_tolerance: float, max_keys: int
) -> ScannedBlocks:
    """Reads every row of these blocks once. A norm is odd that is off 1 by more than the tolerance."""
    kind = choose_vector_type(generation.spec, in_collection=True).name
    values: dict[str, Any] = {"first": f"({blocks.start},0)", "end": f"({blocks.stop},0)"}
    if kind not in (FLOAT16, FLOAT32):
        statement = text(COUNT_ROWS.format(table=generation.table_name))
        return ScannedBlocks(connection.execute(statement, values).scalar_one())
    norm = "vector_norm" if kind == FLOAT32 else "l2_norm"
    statement = text(SCAN_NORMS.format(table=generation.table_name, norm=norm))
    row = connection.execute(statement, values | {"tolerance": norm_tolerance, "limit": max_keys}).one()
    return ScannedBlocks(
        row.num_rows,
        row.num_not_finite,
        row.num_zero,
        row.num_odd_norms,
        row.smallest_norm,
        row.largest_norm,
        tuple(row.broken_keys or ()),
    )
