"""Checks of a generation that Postgres alone can make, for runs of the kind check and for canaries.

These are the recall of its vector index, counts of broken vectors, scores and records, rows that it should have and
lacks, items that could not be encoded, and rows and tables that belong to nothing. Each measurement uses short
transactions. Encoding a sample of texts again is in `vectormill/runs/samples.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Engine, Row, text

from vectormill.collections.collection import STORED_GENERATION_STATES, Generation
from vectormill.collections.generation_tables import attributes_name, table_name
from vectormill.collections.index_plan import choose_comparison, find_operator_class
from vectormill.collections.indexes import find_indexes
from vectormill.collections.removals import LIST_ORPHANS, LIST_TABLES_OF_VIEW
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import DENSE, RESULTS, VECTORS
from vectormill.jobs.item import EMPTY_TEXT, LONE_SURROGATE, NUL_CHARACTER, TEXT_TOO_LONG, TOO_MANY_TOKENS
from vectormill.jobs.job import FINISHED_JOB_STATES, RECEIVED_JOB_STATES
from vectormill.results.table import RESULT_KINDS
from vectormill.search.matches import PREPARE_SEARCH, find_own_candidates
from vectormill.search.search import choose_num_candidates

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

    spec: EncodingSpec
    found: Mapping[str, Any]

    def list_problems(self) -> list[str]:
        """Return one sentence for each problem found."""
        found, problems = self.found, []
        keys = name_keys(found["broken_keys"])
        kept_as = RESULTS[self.spec.result].kept_as
        if kept_as != VECTORS:
            fault = RESULT_KINDS[self.spec.result].fault
            return [f"{found['num_broken']:,} {kept_as} {fault} ({keys})."] if found["num_broken"] else []
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
    spec = generation.spec
    served, _ = find_operator_class(spec.kept_type, spec.dimensions, spec.similarity)
    if served is None or not spec.has_output(DENSE):
        return None
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


def scan_results(engine: Engine, generation: Generation, *, check: Callable[[], None]) -> Scan:
    """Read every result once, BLOCKS_PER_SCAN blocks per transaction. Call `check` between transactions.

    The columns of the scans are sums, the smallest and the largest values, and the first keys.
    """
    statement, own = RESULT_KINDS[generation.spec.result].scan(generation.spec)
    scan = text(statement.format(table=generation.table_name))
    values = {"limit": MOST_NAMED_KEYS, **own}
    with engine.connect() as connection:
        num_blocks = count_blocks(connection, generation).num_blocks
    scans: list[Row[Any]] = []
    for first in range(0, max(num_blocks, 1), BLOCKS_PER_SCAN):
        check()
        blocks = {"first": f"({first},0)", "end": f"({first + BLOCKS_PER_SCAN},0)"}
        with engine.connect() as connection:
            scans.append(connection.execute(scan, values | blocks).one())
    columns = zip(scans[0]._fields, *scans, strict=True)
    return Scan(generation.spec, {name: _merge(name, column) for name, *column in columns})


def _merge(name: str, found: Sequence[Any]) -> Any:
    """Return one value for the values of a column, which its name says how to merge."""
    if name.startswith("num_"):
        return sum(found)
    if name == "broken_keys":
        return tuple(key for keys in found for key in keys or ())[:MOST_NAMED_KEYS]
    choose = min if name.startswith("smallest") else max
    return choose((value for value in found if value is not None), default=None)


MOST_NAMED_KEYS: Final = 20
# No model can encode a text with one of these errors.
OWN_FAULTS: Final = (EMPTY_TEXT, LONE_SURROGATE, NUL_CHARACTER, TEXT_TOO_LONG, TOO_MANY_TOKENS)

# A key that a client deleted since the run began to read does not count as missing, nor does a key with an item error.
_IS_MISSING: Final = """
      FROM {wanted} AS wanted
     WHERE {condition}
       AND NOT EXISTS (SELECT 1 FROM vectormill.{table} AS written WHERE written.key = wanted.key)
       AND NOT EXISTS (
           SELECT 1 FROM vectormill.tombstones
            WHERE tombstones.collection_id = :collection_id AND tombstones.key = wanted.key AND tombstones.seq > :seq)
       AND NOT EXISTS (
           SELECT 1 FROM vectormill.item_errors
            WHERE item_errors.job_id = ANY(CAST(:job_ids AS uuid[])) AND item_errors.key = wanted.key)
"""

COUNT_MISSING: Final = f"SELECT count(*) {_IS_MISSING}"

LIST_MISSING: Final = f"SELECT wanted.key {_IS_MISSING} ORDER BY wanted.key LIMIT :limit"

# The jobs that wrote a generation and have item errors.
LIST_WRITERS = text("""
    SELECT id FROM vectormill.jobs
     WHERE generation_id = :generation_id AND num_failed > 0 AND state <> 'deleting' ORDER BY seq
""")

COUNT_FAILED = text("""
    SELECT count(*) AS num_failed,
           count(*) FILTER (WHERE code <> ALL(CAST(:own_faults AS text[]))) AS num_unexpected
      FROM vectormill.item_errors WHERE job_id = ANY(CAST(:job_ids AS uuid[]))
""")

LIST_FAILED = text("""
    SELECT key, code FROM vectormill.item_errors
     WHERE job_id = ANY(CAST(:job_ids AS uuid[]))
     ORDER BY code = ANY(CAST(:own_faults AS text[])), key LIMIT :limit
""")

# Jobs that are being cancelled count too: no job of the run itself may still be at work when its rows are counted.
COUNT_OPEN_JOBS = text(f"""
    SELECT count(*) FROM vectormill.jobs
     WHERE generation_id = :generation_id AND twin_of IS NULL
       AND state IN {RECEIVED_JOB_STATES}
""")


# This condition holds for a row that clients wrote since the run began. Such a row needs to be there only if its twin
# job has finished: not while the twin is open, nor if it was cancelled.
HAS_BEEN_PUT: Final = f"""
    wanted.job_seq > :seq
       AND NOT EXISTS (
           SELECT 1 FROM vectormill.jobs AS twin
            WHERE twin.generation_id = :generation_id AND coalesce(twin.place, twin.seq) = wanted.job_seq
              AND twin.state NOT IN {FINISHED_JOB_STATES})
"""


@dataclass(frozen=True, slots=True)
class MissingRows:
    """The number of rows that a generation lacks; `keys` are the first of them."""

    number: int
    keys: list[str]


@dataclass(frozen=True, slots=True)
class Failures:
    """Item errors of the jobs that wrote a generation; `num_unexpected` are those not caused by the text itself.

    `items` are the first errors as (key, code), the unexpected ones before the others.
    """

    number: int
    num_unexpected: int
    items: list[tuple[str, str]]


def count_failures(connection: Connection, job_ids: Sequence[UUID]) -> Failures:
    values = {"job_ids": list(job_ids), "own_faults": list(OWN_FAULTS), "limit": MOST_NAMED_KEYS}
    row = connection.execute(COUNT_FAILED, values).one()
    items = [(each.key, each.code) for each in connection.execute(LIST_FAILED, values)]
    return Failures(row.num_failed, row.num_unexpected, items)


def count_open_jobs(connection: Connection, generation_id: int) -> int:
    """Count the open jobs that write the generation, without twins."""
    number: int = connection.execute(COUNT_OPEN_JOBS, {"generation_id": generation_id}).scalar_one()
    return number


def find_missing(
    connection: Connection,
    building: Generation,
    wanted: str,
    seq: int,
    job_ids: Sequence[UUID],
    condition: str = "true",
) -> MissingRows:
    """Return the rows of the table `wanted` that fulfil the SQL `condition` and that the generation lacks.

    `seq` is the sequence number of the run; `job_ids` are jobs whose item errors excuse a missing key.
    """
    names = {"wanted": f"vectormill.{wanted}", "condition": condition, "table": table_name(building.id)}
    values: dict[str, Any] = {
        "collection_id": building.collection_id,
        "generation_id": building.id,
        "seq": seq,
        "job_ids": list(job_ids),
    }
    number = connection.execute(text(COUNT_MISSING.format(**names)), values).scalar_one()
    if not number:
        return MissingRows(0, [])
    values["limit"] = MOST_NAMED_KEYS
    return MissingRows(number, list(connection.execute(text(LIST_MISSING.format(**names)), values).scalars()))


HAS_TABLE = text("SELECT to_regclass('vectormill.' || quote_ident(:name)) IS NOT NULL")

HAS_ROWS: Final = "SELECT EXISTS (SELECT 1 FROM vectormill.{table})"


def has_rows(connection: Connection, name: str) -> bool:
    """Return True if the table exists and has rows. A crash of Postgres empties an unlogged table."""
    if not connection.execute(HAS_TABLE, {"name": name}).scalar_one():
        return False
    return bool(connection.execute(text(HAS_ROWS.format(table=name))).scalar_one())


@dataclass(frozen=True, slots=True)
class Inconsistencies:
    """Inconsistencies of a collection: attributes without a row, rows of deleted keys, missing and orphaned tables.

    The lists of keys hold at most MOST_NAMED_KEYS. `view_reads` names the tables that the collection's view reads.
    """

    num_attributes: int
    attribute_keys: list[str]
    num_deleted_keys: int
    deleted_keys: list[str]
    missing_tables: list[str]
    left_tables: list[str]
    view_reads: str


FIND_BARE_ATTRIBUTES: Final = """
    SELECT count(*) AS number, (array_agg(key))[1 : CAST(:limit AS integer)] AS keys
      FROM vectormill.{attributes} AS kept
     WHERE NOT EXISTS (SELECT 1 FROM vectormill.{table} AS live WHERE live.key = kept.key)
"""

# Such a row is older than the tombstone of its key, and should have been deleted.
FIND_DELETED_KEYS: Final = """
    SELECT count(*) AS number, (array_agg(live.key))[1 : CAST(:limit AS integer)] AS keys
      FROM vectormill.tombstones AS tombstone
      JOIN vectormill.{table} AS live ON live.key = tombstone.key AND live.job_seq < tombstone.seq
     WHERE tombstone.collection_id = :collection_id
"""

LIST_MISSING_TABLES: Final = text(f"""
    SELECT wanted.name
      FROM vectormill.generations
     CROSS JOIN LATERAL (VALUES ('vectormill.generation_' || generations.id),
                                ('vectormill.generation_' || generations.id || '_attributes')) AS wanted (name)
     WHERE generations.collection_id = :collection_id AND generations.state IN {STORED_GENERATION_STATES}
       AND to_regclass(wanted.name) IS NULL
     ORDER BY wanted.name
""")


def find_inconsistencies(connection: Connection, generation: Generation) -> Inconsistencies:
    """Return what the tables of a generation's collection have that they should not have, or lack."""
    names = {"table": generation.table_name, "attributes": attributes_name(generation.id)}
    limit = {"limit": MOST_NAMED_KEYS}
    of_it = {"collection_id": generation.collection_id}
    bare = connection.execute(text(FIND_BARE_ATTRIBUTES.format(**names)), limit).one()
    deleted = connection.execute(text(FIND_DELETED_KEYS.format(**names)), limit | of_it).one()
    read = connection.execute(LIST_TABLES_OF_VIEW, {"view": f"public.{generation.collection}"}).scalars()
    return Inconsistencies(
        bare.number,
        bare.keys or [],
        deleted.number,
        deleted.keys or [],
        list(connection.execute(LIST_MISSING_TABLES, of_it).scalars()),
        list(connection.execute(LIST_ORPHANS).scalars()),
        ", ".join(read),
    )
