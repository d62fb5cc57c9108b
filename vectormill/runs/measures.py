"""Measures of a generation that Postgres alone can compute, for checks and canaries.

These are the recall of its vector index, and counts of broken vectors, scores and records. Each measurement
uses short transactions. Encoding a sample of texts again is in `vectormill/runs/samples.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from sqlalchemy import Connection, Engine, Row, text

from vectormill.collections.collection import RECORDS, VECTORS, Generation
from vectormill.collections.coverage import MOST_NAMED_KEYS
from vectormill.collections.index_plan import choose_comparison
from vectormill.collections.indexes import find_indexes
from vectormill.domain.encoding import FLOAT16, FLOAT32, INT8
from vectormill.domain.task import DENSE, RAW, SCORE, SIGMOID, SOFTMAX, TANH
from vectormill.search.matches import PREPARE_SEARCH, find_own_candidates
from vectormill.search.search import choose_num_candidates
from vectormill.vectors.representations import NORM_TOLERANCE
from vectormill.vectors.vector_types import choose_vector_type

# An exact search reads every row, at some million rows per second; this bounds the rows read by all exact
# searches of one measurement.
EXACT_ROWS_BUDGET: Final = 20_000_000
LEAST_QUERIES: Final = 10
MOST_QUERIES: Final = 50
# A block has 8 KiB, so a transaction over this many blocks takes a fraction of a second.
BLOCKS_PER_SCAN: Final = 4096
# Float16 distances that differ by less than this, or this share, count as equal, in whichever order rows are returned.
SAME_DISTANCE: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Recall:
    """The recall of an index, from 0 to 1, measured with `num_queries` rows of the generation as queries.

    `value` is the share of each query's `limit` nearest rows that the index found.
    """

    value: float
    num_queries: int
    limit: int
    index: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"value": round(self.value, 4)}


@dataclass(frozen=True, slots=True)
class Scan:
    """The findings of a scan of all results of a generation, in the columns of the statement for the collection's kind.

    `broken_keys` are examples of vectors that are NaN, infinite or zero, or of invalid scores or records, which the
    norms and the range of scores leave out. If the model normalizes, `num_odd_norms` vectors have a norm that is off 1
    by more than NORM_TOLERANCE. Of int8 codes and bits, which are always valid, rows are only counted. `num_empty`
    records are objects without any finding.
    """

    kind: str
    found: Mapping[str, Any]

    def list_problems(self) -> list[str]:
        """Return one sentence for each problem found."""
        found, problems = self.found, []
        keys = name_keys(found["broken_keys"])
        if self.kind != VECTORS:
            what = (
                "are not objects of types" if self.kind == RECORDS else "are not numbers or are out of range"
            )
            return [f"{found['num_broken']:,} {self.kind} {what} ({keys})."] if found["num_broken"] else []
        if num_broken := found["num_not_finite"] + found["num_zero"]:
            problems.append(
                f"{num_broken:,} vectors have no direction: they are zero or not finite ({keys})."
            )
        if found["num_odd_norms"]:
            problems.append(
                f"{found['num_odd_norms']:,} vectors do not have length 1, although the model normalizes; their "
                f"lengths are between {found['smallest_norm']:.3f} and {found['largest_norm']:.3f}."
            )
        return problems


def name_keys(keys: Sequence[str]) -> str:
    """Return the first keys of a list, joined for a message."""
    return ", ".join(map(repr, keys[:3]))


COUNT_BLOCKS: Final = text("""
    SELECT pg_relation_size(to_regclass(:table)) / current_setting('block_size')::bigint AS num_blocks,
           greatest(coalesce((SELECT reltuples FROM pg_class WHERE oid = to_regclass(:table)), 0), 0) AS num_rows
""")


def count_blocks(connection: Connection, generation: Generation) -> Row[Any]:
    """Return the blocks of a table, and Postgres' estimate of its rows, 0 if the table was never analyzed."""
    return connection.execute(COUNT_BLOCKS, {"table": f"vectormill.{generation.table_name}"}).one()


# Samples whole blocks, as a sample of single rows would read every block. `share` is in percent.
SAMPLE_ROWS: Final = """
    SELECT key, CAST(embedding AS text) AS embedding
      FROM vectormill.{table} TABLESAMPLE SYSTEM (:share) ORDER BY random() LIMIT :limit
"""


def sample_rows(connection: Connection, generation: Generation, size: int) -> list[tuple[str, str]]:
    """Return (key, embedding) of `size` random rows, or of all rows if there are fewer.

    Embeddings are in their SQL text form. Random blocks are sampled, so rows stored together tend to be
    sampled together; the cost does not depend on the table's size.
    """
    num_rows = count_blocks(connection, generation).num_rows
    share = 100.0 if num_rows < 50 * size else min(100.0, 1000.0 * size / num_rows)
    statement = text(SAMPLE_ROWS.format(table=generation.table_name))
    rows = connection.execute(statement, {"share": share, "limit": size}).all()
    if len(rows) < size and share < 100.0:  # the sampled blocks had mostly dead rows
        rows = connection.execute(statement, {"share": 100.0, "limit": size}).all()
    return [(row.key, row.embedding) for row in rows]


FIND_NEAREST: Final = """
    SELECT key, distance
      FROM (SELECT key, {distance} AS distance
              FROM vectormill.{table} AS vectors ORDER BY distance LIMIT :limit) AS nearest
     WHERE distance < 'NaN' ORDER BY distance + 0
"""

# Planner settings until the transaction ends. The planner can choose only between the vector index and a full
# scan.
READ_EVERY_ROW: Final = text("SET LOCAL enable_indexscan = off")
READ_THE_INDEX: Final = text("SET LOCAL enable_seqscan = off")


def find_nearest(
    connection: Connection, generation: Generation, row: tuple[str, str], limit: int, *, is_exact: bool
) -> list[tuple[str, float]]:
    """Return (key, distance) of the `limit` rows nearest to a sampled row, without that row.

    The statement is that of a search, and it reads every row if `is_exact`, else the index.
    """
    comparison = choose_comparison(generation.spec)
    distance = comparison.write(f"CAST(:query AS {comparison.query_type})")
    statement = FIND_NEAREST.format(distance=distance, table=generation.table_name)
    key, query = row
    values: dict[str, Any] = {"query": query, "limit": limit + 1}
    num_candidates = max(choose_num_candidates(limit), find_own_candidates(connection))
    settings = {"timeout": "0", "num_candidates": num_candidates}
    connection.execute(PREPARE_SEARCH, settings)
    connection.execute(READ_EVERY_ROW if is_exact else READ_THE_INDEX)
    rows = connection.execute(text(statement), values).all()
    return [(found.key, float(found.distance)) for found in rows if found.key != key][:limit]


def measure_recall(
    engine: Engine,
    generation: Generation,
    *,
    check: Callable[[], None],
    limit: int = 10,
    max_queries: int = MOST_QUERIES,
) -> Recall | None:
    """Measure the recall of a generation's vector index, with sampled rows of the generation as queries.

    Each sampled row is left out of its own results. Return None if there is no usable index, as for int8
    codes, scores and records, or if there are fewer rows than `limit`. `check` is called between
    transactions.
    """
    if not generation.spec.has_output(DENSE) or generation.spec.vector_type == INT8:
        return None
    served = choose_comparison(generation.spec).operator_class
    with engine.connect() as connection:
        found = find_indexes(connection, generation.id)
        index = next((each.name for each in found if each.is_valid and each.operator_class == served), None)
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
        if not exact:
            continue  # the sampled row has no direction
        if len(exact) < limit:
            return None
        with engine.connect() as connection:
            near = find_nearest(connection, generation, query, limit, is_exact=False)
        worst = max(distance for _, distance in exact)
        worst += SAME_DISTANCE * max(1.0, abs(worst))
        num_wanted += limit
        num_found += sum(distance <= worst for _, distance in near)
    return Recall(num_found / num_wanted, len(queries), limit, index) if num_wanted else None


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
    SELECT count(*) AS num_rows, 0 AS num_not_finite, 0 AS num_zero, 0 AS num_odd_norms,
           NULL AS smallest_norm, NULL AS largest_norm, NULL AS broken_keys
      FROM vectormill.{table}
     WHERE ctid >= CAST(:first AS tid) AND ctid < CAST(:end AS tid)
"""

# NOT BETWEEN finds NaN too: Postgres sorts it above every number.
SCAN_SCORES: Final = """
    SELECT count(*) AS num_rows, count(*) FILTER (WHERE is_broken) AS num_broken,
           min(score) FILTER (WHERE NOT is_broken) AS smallest, max(score) FILTER (WHERE NOT is_broken) AS largest,
           (array_agg(key) FILTER (WHERE is_broken))[1 : CAST(:limit AS integer)] AS broken_keys
      FROM (SELECT key, score, NOT (score BETWEEN CAST(:least AS real) AND CAST(:most AS real)) AS is_broken
              FROM vectormill.{table}
             WHERE ctid >= CAST(:first AS tid) AND ctid < CAST(:end AS tid)) AS scanned
"""

SCAN_RECORDS: Final = """
    SELECT count(*) AS num_rows, count(*) FILTER (WHERE is_broken) AS num_broken,
           count(*) FILTER (WHERE is_empty) AS num_empty,
           (array_agg(key) FILTER (WHERE is_broken))[1 : CAST(:limit AS integer)] AS broken_keys
      FROM (SELECT key, jsonb_typeof(output) <> 'object' AS is_broken, output = '{{}}' AS is_empty
              FROM vectormill.{table}
             WHERE ctid >= CAST(:first AS tid) AND ctid < CAST(:end AS tid)) AS scanned
"""

# The valid range of float32 scores by their activation; scores without an activation are cosines.
_LARGEST_FLOAT: Final = 3.4e38
SCALES: Final[Mapping[str, tuple[float, float]]] = {
    SOFTMAX: (0.0, 1.00001),
    SIGMOID: (0.0, 1.00001),
    TANH: (-1.00001, 1.00001),
    RAW: (-_LARGEST_FLOAT, _LARGEST_FLOAT),
    "": (-1.00001, 1.00001),
}


def scan_results(engine: Engine, generation: Generation, *, check: Callable[[], None]) -> Scan:
    """Read every result once, BLOCKS_PER_SCAN blocks per transaction. Call `check` between transactions.

    The columns of the scans are sums, the smallest and the largest values, and the first keys.
    """
    spec = generation.spec
    values: dict[str, Any] = {"limit": MOST_NAMED_KEYS}
    statement, norm = SCAN_RECORDS, ""
    if generation.kind == VECTORS:
        kind = choose_vector_type(spec, in_collection=True).name
        norm = "vector_norm" if kind == FLOAT32 else "l2_norm"
        statement = SCAN_NORMS if kind in (FLOAT16, FLOAT32) and spec.has_output(DENSE) else COUNT_ROWS
        values["tolerance"] = NORM_TOLERANCE if spec.normalize else float("inf")
    elif spec.result == SCORE:
        statement = SCAN_SCORES
        values["least"], values["most"] = SCALES[spec.activation]
    scan = text(statement.format(table=generation.table_name, norm=norm))
    with engine.connect() as connection:
        num_blocks = count_blocks(connection, generation).num_blocks
    scans: list[Row[Any]] = []
    for first in range(0, max(num_blocks, 1), BLOCKS_PER_SCAN):
        check()
        blocks = {"first": f"({first},0)", "end": f"({first + BLOCKS_PER_SCAN},0)"}
        with engine.connect() as connection:
            scans.append(connection.execute(scan, values | blocks).one())
    columns = zip(scans[0]._fields, *scans, strict=True)
    return Scan(generation.kind, {name: _merge(name, column) for name, *column in columns})


def _merge(name: str, found: Sequence[Any]) -> Any:
    """Return one value for the values of a column, which its name says how to merge."""
    if name.startswith("num_"):
        return sum(found)
    if name == "broken_keys":
        return tuple(key for keys in found for key in keys or ())[:MOST_NAMED_KEYS]
    choose = min if name.startswith("smallest") else max
    return choose((value for value in found if value is not None), default=None)
