"""A generation's table, read block by block: how large it is, and which of its rows are no results of its kind."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, text

from vectormill.collections.collection import Generation
from vectormill.domain.encoding import FLOAT16, FLOAT32
from vectormill.domain.tasks.task import RAW, SCORE, SIGMOID, SOFTMAX
from vectormill.vectors.vector_types import choose_vector_type


@dataclass(frozen=True, slots=True)
class TableSize:
    """`num_rows` is what Postgres takes it for; 0 where it has never counted."""

    num_blocks: int
    num_rows: float


@dataclass(frozen=True, slots=True)
class ScannedBlocks:
    """The numbers of scanned rows; where they are codes or bits, rows are only counted. `broken_keys` are
    some bad ones.
    """

    num_rows: int
    num_not_finite: int = 0
    num_zero: int = 0
    num_odd_norms: int = 0
    smallest_norm: float | None = None
    largest_norm: float | None = None
    broken_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ScannedResults:
    """Scores that are no number of their scale, or records that are no object: `broken_keys` are some of them.

    `num_empty` are records in which nothing was found; `smallest` and `largest` are of scores.
    """

    num_rows: int
    num_broken: int
    num_empty: int
    smallest: float | None
    largest: float | None
    broken_keys: tuple[str, ...]


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


# NaN is above every number to Postgres, and not between any two.
SCAN_SCORES: Final = """
    SELECT count(*) AS num_rows, count(*) FILTER (WHERE is_broken) AS num_broken, 0 AS num_empty,
           min(score) FILTER (WHERE NOT is_broken) AS smallest, max(score) FILTER (WHERE NOT is_broken) AS largest,
           (array_agg(key) FILTER (WHERE is_broken))[1 : CAST(:limit AS integer)] AS broken_keys
      FROM (SELECT key, score, NOT (score BETWEEN CAST(:least AS real) AND CAST(:most AS real)) AS is_broken
              FROM vectormill.{table}
             WHERE ctid >= CAST(:first AS tid) AND ctid < CAST(:end AS tid)) AS scanned
"""

SCAN_RECORDS: Final = """
    SELECT count(*) AS num_rows, count(*) FILTER (WHERE is_broken) AS num_broken,
           count(*) FILTER (WHERE is_empty) AS num_empty, CAST(NULL AS real) AS smallest, CAST(NULL AS real) AS largest,
           (array_agg(key) FILTER (WHERE is_broken))[1 : CAST(:limit AS integer)] AS broken_keys
      FROM (SELECT key, jsonb_typeof(output) <> 'object' AS is_broken, output = '{{}}' AS is_empty
              FROM vectormill.{table}
             WHERE ctid >= CAST(:first AS tid) AND ctid < CAST(:end AS tid)) AS scanned
"""

# The range of a score, in float32, by its activation; without one it is a cosine.
_LARGEST_FLOAT: Final = 3.4e38
SCALES: Final[Mapping[str, tuple[float, float]]] = {
    SOFTMAX: (0.0, 1.00001),
    SIGMOID: (0.0, 1.00001),
    RAW: (-_LARGEST_FLOAT, _LARGEST_FLOAT),
    "": (-1.00001, 1.00001),
}


def scan_results(
    connection: Connection, generation: Generation, blocks: range, *, max_keys: int
) -> ScannedResults:
    """Reads every row of these blocks of scores or records once."""
    values: dict[str, Any] = {"first": f"({blocks.start},0)", "end": f"({blocks.stop},0)", "limit": max_keys}
    statement = SCAN_RECORDS
    if generation.spec.result == SCORE:
        least, most = SCALES[generation.spec.activation]
        statement, values = SCAN_SCORES, values | {"least": least, "most": most}
    row = connection.execute(text(statement.format(table=generation.table_name)), values).one()
    return ScannedResults(
        row.num_rows, row.num_broken, row.num_empty, row.smallest, row.largest, tuple(row.broken_keys or ())
    )
