"""Matches: the rows of a collection that are nearest to a query, and whether an index found them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psycopg
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError

from vectormill.db.attributes import attributes_name
from vectormill.db.calibrations import find_ranges
from vectormill.db.vector_types import choose_vector_type
from vectormill.domain.collection import Generation
from vectormill.domain.encoding import BINARY, FLOAT16, FLOAT32, INT8
from vectormill.domain.errors import SearchTimeout

# hnsw.ef_search: so many candidates an index keeps while it looks, 40 by pgvector's default and 1,000 at the most. With
# as many as rows are asked for the last ones are often missed: of 20,000 random vectors, the worst case there is, 200
# candidates held 73 % of the 200 nearest, and 400 held 93 %.
LEAST_CANDIDATES: Final = 100
CANDIDATES_PER_ROW: Final = 2
MOST_CANDIDATES: Final = 1000


@dataclass(frozen=True, slots=True)
class Match:
    """One search result; `score` is the cosine similarity, -1 to 1; in a binary collection, that of the signs."""

    key: str
    score: float
    metadata: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Nearest:
    """Matches, best first. `num_rows_read` is about how many rows the collection has when all were read, else None."""

    matches: list[Match]
    num_rows_read: int | None


# The distance is of the column as it is, so that an index on it can serve: cosine for floats, differing bits for
# binary. int8 codes are restored first, since every dimension has a scale and an offset of its own. Sorted at the end
# by another expression: Postgres takes rows from an index for sorted by the distance, which they are nearly.
SEARCH_VECTORS = """
    SELECT nearest.key, 1 - distance * :unit AS score, attributes.metadata
      FROM (SELECT key, {distance} AS distance
              FROM vectormill.{table} ORDER BY distance LIMIT :limit) AS nearest
      LEFT JOIN vectormill.{attributes} AS attributes ON attributes.key = nearest.key
     ORDER BY score DESC
"""
# Until the end of the transaction. The time-out, for a client that has gone leaves its search behind. An index gives
# its candidates and no more, unless it may go on looking: in relaxed order, since the statement sorts what was found. A
# larger ef_search of the operator's own stands. And the plan that is explained must be the plan that is run.
PREPARE_SEARCH: Final = text("""
    SELECT set_config('statement_timeout', :timeout, true),
           set_config('hnsw.iterative_scan', 'relaxed_order', true),
           set_config('hnsw.ef_search', CAST(greatest(
               CAST(:num_candidates AS integer), CAST(nullif(current_setting('hnsw.ef_search', true), '') AS integer)
           ) AS text), true),
           set_config('plan_cache_mode', 'force_custom_plan', true)
""")
DISTANCES: Final[Mapping[str, str]] = {
    FLOAT32: "embedding <=> CAST(:query AS vector)",
    FLOAT16: "embedding <=> CAST(:query AS halfvec)",
    INT8: "(CAST(embedding AS vector) * CAST(:steps AS vector) + CAST(:offsets AS vector)) <=> CAST(:query AS vector)",
    BINARY: "embedding <~> CAST(:query AS bit({dimensions}))",
}


def search_collection(
    connection: Connection,
    generation: Generation,
    embedding: npt.NDArray[np.float32],
    limit: int,
    *,
    timeout_seconds: float = 30.0,
) -> Nearest:
    """The `limit` rows that are nearest to `embedding`, finite float32 [dimensions], best first.

    Nearest means the highest cosine similarity; in a binary collection, that of the signs, which is 1 - 2 × the
    share of bits that differ. With an HNSW index (pgvector 0.8 or newer) nearly the nearest, and as many as there are.
    Raises SearchTimeout: without an index the search reads every row.
    """
    spec = generation.spec
    kind = choose_vector_type(spec, in_collection=True)
    values: dict[str, object] = {"limit": limit, "unit": 1.0, "query": write_vector(embedding)}
    if kind.name == BINARY:
        values |= {
            "unit": 2 / spec.dimensions,
            "query": "".join("01"[sign] for sign in (embedding > 0).tolist()),
        }
    if kind.name == INT8:
        ranges = find_ranges(connection, spec)
        if ranges is None:
            return Nearest([], 0)  # measured before the first row is written
        values |= {"steps": write_vector(ranges.steps), "offsets": write_vector(ranges.offsets)}
    distance = DISTANCES[kind.name].format(dimensions=spec.dimensions)
    statement = SEARCH_VECTORS.format(
        distance=distance, table=generation.table_name, attributes=attributes_name(generation.id)
    )
    timeout = f"{math.ceil(timeout_seconds * 1000)}ms"
    connection.execute(
        PREPARE_SEARCH, {"timeout": timeout, "num_candidates": choose_num_candidates(limit)}
    ).all()
    try:
        num_rows_read = estimate_rows_read(connection, generation.table_name, statement, values)
        rows = connection.execute(text(statement), values).all()
    except OperationalError as error:
        if not isinstance(error.orig, psycopg.errors.QueryCanceled):
            raise
        raise SearchTimeout(
            f"Searching {generation.collection!r} took more than {timeout_seconds:g} s and was ended. Without an index "
            f'on vectormill.{generation.table_name} every row is read: docs/OPERATIONS.md, "What to do when …".'
        ) from error
    return Nearest([Match(row.key, float(row.score), row.metadata) for row in rows], num_rows_read)


def choose_num_candidates(limit: int) -> int:
    return min(MOST_CANDIDATES, max(LEAST_CANDIDATES, CANDIDATES_PER_ROW * limit))


def estimate_rows_read(
    connection: Connection, table: str, statement: str, values: Mapping[str, object]
) -> int | None:
    """How many rows of the table the planner expects to read when no index serves, else None. Reads no row."""
    (plan,) = connection.execute(text(f"EXPLAIN (FORMAT JSON) {statement}"), values).scalar_one()
    nodes = [node for node in walk_plan(plan["Plan"]) if node.get("Relation Name") == table]
    if any(node["Node Type"] == "Index Scan" for node in nodes):
        return None
    # Of all processes that read it together.
    return sum(int(node["Plan Rows"]) for node in nodes) * num_readers(plan["Plan"])


def num_readers(plan: Mapping[str, Any]) -> int:
    """How many processes run the plan's parallel part, or 1."""
    planned = max((int(node.get("Workers Planned", 0)) for node in walk_plan(plan)), default=0)
    return planned + 1


def walk_plan(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The node and all below it."""
    yield node
    for below in node.get("Plans", ()):
        yield from walk_plan(below)


def write_vector(values: npt.NDArray[np.float32]) -> str:
    """A vector as pgvector reads it."""
    return "[" + ",".join(repr(float(value)) for value in values) + "]"
