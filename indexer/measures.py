"""Measures: what can be said of a generation's rows from Postgres alone. Shared by checks and by canaries.

How much of the exact answer its index finds; which rows are no vectors, no scores or no records. Each question is short
transactions. What a sample of its texts gives when it is encoded again: samples.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Engine

from vectormill.collections.collection import RECORDS, VECTORS, Generation
from vectormill.domain.encoding import INT8
from vectormill.runs.measures.blocks import (
    ScannedBlocks,
    ScannedResults,
    count_blocks,
    scan_blocks,
    scan_results,
)
from vectormill.runs.measures.rankings import find_nearest, find_vector_index, sample_rows

# An exact search reads every row, at some million rows a second: so many rows are read for a whole measurement.
EXACT_ROWS_BUDGET: Final = 20_000_000
LEAST_QUERIES: Final = 10
MOST_QUERIES: Final = 50
# 8 KiB each: a transaction of so many blocks takes a fraction of a second.
BLOCKS_PER_SCAN: Final = 4096
MOST_NAMED_KEYS: Final = 20
# Distances of float16 vectors that differ by less are the same rank, whoever comes first.
SAME_DISTANCE: Final = 1e-5
# The tolerance for a vector whose model promises length 1, in float16.
NORM_TOLERANCE: Final = 0.01


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Recall:
    """The recall of an index: the share of the `limit` nearest rows to `num_queries` rows that it found, 0 to 1."""

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


@dataclass(frozen=True, slots=True)
class Validity:
    """Rows of scores or of records that are none: `broken_keys` are some. In `num_empty` records nothing was found.

    `smallest` and `largest` are of scores that are numbers of their scale.
    """

    kind: str
    num_rows: int
    num_broken: int
    num_empty: int
    smallest: float | None
    largest: float | None
    broken_keys: list[str]

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"num_rows": self.num_rows, "num_broken": self.num_broken}
        if self.kind == RECORDS:
            found["num_empty"] = self.num_empty
        else:
            found |= {"smallest": self.smallest, "largest": self.largest}
        return found | {"broken_keys": self.broken_keys}

    def list_problems(self) -> list[str]:
        """Sentences about what is wrong."""
        if not self.num_broken:
            return []
        named = ", ".join(map(repr, self.broken_keys[:3]))
        what = "are no objects of types" if self.kind == RECORDS else "are no numbers, or not of their scale"
        return [f"{self.num_broken:,} {self.kind} {what} ({named})."]


def measure_recall(
    engine: Engine,
    generation: Generation,
    *,
    check: Callable[[], None],
    limit: int = 10,
    max_queries: int = MOST_QUERIES,
) -> Recall | None:
    """Return how much of the exact answer the index finds, with rows of the generation as queries.

    The row itself is left out of both answers. None when no index serves, as for int8 codes, scores and records, or
    there are fewer rows than are asked for. `check` is called between transactions.
    """
    if generation.kind != VECTORS or generation.spec.vector_type == INT8:
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
    """Read every vector once, some thousand blocks to a transaction. `check` is called between them.

    Codes and bits have no norm: all of theirs are vectors, and only counted.
    """
    tolerance = NORM_TOLERANCE if generation.spec.normalize else float("inf")

    def scan(connection: Connection, blocks: range) -> ScannedBlocks:
        return scan_blocks(connection, generation, blocks, norm_tolerance=tolerance, max_keys=MOST_NAMED_KEYS)

    scans = _scan(engine, generation, scan, check)
    return Soundness(
        sum(scan.num_rows for scan in scans),
        sum(scan.num_not_finite for scan in scans),
        sum(scan.num_zero for scan in scans),
        sum(scan.num_odd_norms for scan in scans),
        min((scan.smallest_norm for scan in scans if scan.smallest_norm is not None), default=None),
        max((scan.largest_norm for scan in scans if scan.largest_norm is not None), default=None),
        [key for scan in scans for key in scan.broken_keys][:MOST_NAMED_KEYS],
    )


def scan_validity(engine: Engine, generation: Generation, *, check: Callable[[], None]) -> Validity:
    """Read every score or record of a generation once, as scan_vectors does with vectors."""

    def scan(connection: Connection, blocks: range) -> ScannedResults:
        return scan_results(connection, generation, blocks, max_keys=MOST_NAMED_KEYS)

    scans = _scan(engine, generation, scan, check)
    return Validity(
        generation.kind,
        sum(scan.num_rows for scan in scans),
        sum(scan.num_broken for scan in scans),
        sum(scan.num_empty for scan in scans),
        min((scan.smallest for scan in scans if scan.smallest is not None), default=None),
        max((scan.largest for scan in scans if scan.largest is not None), default=None),
        [key for scan in scans for key in scan.broken_keys][:MOST_NAMED_KEYS],
    )


def _scan(
    engine: Engine,
    generation: Generation,
    scan: Callable[[Connection, range], T],
    check: Callable[[], None],
) -> list[T]:
    """Call `scan` for all blocks of a generation's table, some thousand to a transaction, and return its answers."""
    with engine.connect() as connection:
        num_blocks = count_blocks(connection, generation).num_blocks
    scans = []
    for first in range(0, max(num_blocks, 1), BLOCKS_PER_SCAN):
        check()
        with engine.connect() as connection:
            scans.append(scan(connection, range(first, first + BLOCKS_PER_SCAN)))
    return scans
