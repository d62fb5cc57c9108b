"""Measures: what can be said of a generation's vectors from Postgres alone. Shared by checks and by canaries.

How much of the exact answer its index finds; which rows are no vectors. Each question is short transactions. What a
sample of its texts gives when it is encoded again: samples.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Engine

from vectormill.db.measures.blocks import ScannedBlocks, count_blocks, scan_blocks
from vectormill.db.measures.rankings import find_nearest, find_vector_index, sample_rows
from vectormill.domain.collection import Generation
from vectormill.domain.encoding import INT8

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
    if generation.spec.vector_type == INT8:
        return None
    with engine.connect() as connection:
        index = find_vector_index(connection, generation)
        if index is None:
            return None
        queries = sample_rows(connection, generation, max_queries)
        num_rows = count_blocks(connection, generation).num_rows
    affordable = int(EXACT_ROWS_BUDGET / max(num_rows, 1))
    queries = queries[: max(LEAST_QUERIES, min(max_queries, affordable))]
    num_found = num_wanted = 0
    for query in queries:
        check()
        with engine.connect() as connection:
            exact = find_nearest(connection, generation, query, limit, is_exact=True)
        if len(exact) < limit:
            return None
        with engine.connect() as connection:
            found = find_nearest(connection, generation, query, limit, is_exact=False)
        worst = max(distance for _, distance in exact) + SAME_DISTANCE
        num_wanted += limit
        num_found += sum(distance <= worst for _, distance in found)
    return Recall(num_found / num_wanted, len(queries), limit, index) if num_wanted else None


def scan_vectors(engine: Engine, generation: Generation, *, check: Callable[[], None]) -> Soundness:
    """Reads every vector once, some thousand blocks to a transaction. `check` is called between them.

    Codes and bits have no norm: all of theirs are vectors, and only counted.
    """
    tolerance = NORM_TOLERANCE if generation.spec.normalize else float("inf")
    with engine.connect() as connection:
        num_blocks = count_blocks(connection, generation).num_blocks
    scans: list[ScannedBlocks] = []
    for first in range(0, max(num_blocks, 1), BLOCKS_PER_SCAN):
        check()
        blocks = range(first, first + BLOCKS_PER_SCAN)
        with engine.connect() as connection:
            scans.append(
                scan_blocks(
                    connection, generation, blocks, norm_tolerance=tolerance, max_keys=MOST_NAMED_KEYS
                )
            )
    return Soundness(
        sum(scan.num_rows for scan in scans),
        sum(scan.num_not_finite for scan in scans),
        sum(scan.num_zero for scan in scans),
        sum(scan.num_odd_norms for scan in scans),
        min((scan.smallest_norm for scan in scans if scan.smallest_norm is not None), default=None),
        max((scan.largest_norm for scan in scans if scan.largest_norm is not None), default=None),
        [key for scan in scans for key in scan.broken_keys][:MOST_NAMED_KEYS],
    )
