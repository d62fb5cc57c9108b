"""Indexes of a generation: find the existing ones, plan the wanted ones, build them, and list those that need work.

A build is one SQL statement that may take hours. It runs on its own connection, outside a transaction, while another
connection reads its progress; the session is closed afterwards, so that none of its settings remain.
"""

import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg import sql
from sqlalchemy import Connection, Engine, text

from vectormill.collections.codebooks import LEAST_ROWS, find_codebook
from vectormill.collections.collection import LIVE, Generation
from vectormill.collections.generation_tables import attributes_name, table_name
from vectormill.collections.index_plan import (
    IS_INDEXED,
    IS_TOO_LONG,
    SHAPE_OPTIONS,
    SPARSE_CLASS,
    WEIGHTS_BYTES,
    BuildLimits,
    IndexPlan,
    IndexSettings,
    ServerCapacity,
    find_operator_class,
    plan_index,
    plan_sparse_index,
)
from vectormill.db.parameters import to_jsonb
from vectormill.db.session import driver_of
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import DENSE, SPARSE, VECTORS
from vectormill.domain.vector_type import VectorType
from vectormill.jobs.job import MOVING_JOB_STATES
from vectormill.runs.run import BROKEN_RUN_STATES, OPEN_RUN_STATES
from vectormill.settings import Settings

# Rows of tables up to this size are counted exactly; for larger ones the estimate of Postgres is good enough.
COUNTED_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class FoundIndex:
    """One index of a generation, as the catalog of Postgres describes it. No query uses an index that is not valid.

    `state` is ready, building or invalid, and `definition` the statement that would create it. `is_ours` is true for
    an index that Vectormill makes and drops by the collection's settings; any other is never changed. `idle_seconds`
    have passed since a statement used it; None if none did.
    """

    name: str
    table: str
    method: str
    operator_class: str
    is_valid: bool
    is_ours: bool
    options: Mapping[str, int]
    num_bytes: int
    last_used_at: datetime | None
    idle_seconds: float | None
    state: str
    definition: str

    @property
    def is_vector_index(self) -> bool:
        return self.method == "hnsw"


# The state of an index that is a row `entry` of pg_index. One that is being built concurrently is there already.
INDEX_STATE: Final = """
    CASE WHEN entry.indisvalid THEN 'ready'
         WHEN EXISTS (SELECT 1 FROM pg_stat_progress_create_index WHERE index_relid = entry.indexrelid)
         THEN 'building' ELSE 'invalid' END
"""

# An index `entry` with its own row of pg_class. indclass counts from 0, unlike an array.
FROM_INDEXES: Final = """
      FROM pg_index AS entry
      JOIN pg_class AS own ON own.oid = entry.indexrelid
      JOIN pg_am AS method ON method.oid = own.relam
      JOIN pg_opclass AS operator_class ON operator_class.oid = entry.indclass[0]
"""

LIST_INDEXES: Final = text(f"""
    SELECT own.relname AS name, home.relname AS "table", method.amname AS method,
           operator_class.opcname AS operator_class, entry.indisvalid AND entry.indisready AS is_valid,
           CAST(own.relname AS text) ^@ ANY(CAST(:ours AS text[])) AS is_ours,
           coalesce((SELECT jsonb_object_agg(option_name, CAST(option_value AS integer))
                       FROM pg_options_to_table(own.reloptions) WHERE method.amname = 'hnsw'), '{{}}') AS options,
           pg_relation_size(own.oid) AS num_bytes, pg_stat_get_lastscan(own.oid) AS last_used_at,
           CAST(extract(epoch FROM now() - pg_stat_get_lastscan(own.oid)) AS double precision) AS idle_seconds,
           {INDEX_STATE} AS state, pg_get_indexdef(own.oid) AS definition
      {FROM_INDEXES}
      JOIN pg_class AS home ON home.oid = entry.indrelid
     WHERE entry.indrelid IN (to_regclass(:vectors), to_regclass(:attributes)) AND NOT entry.indisprimary
     ORDER BY own.relname
""")


def find_indexes(connection: Connection, generation_id: int) -> list[FoundIndex]:
    """Return the indexes of a generation's tables without primary keys, in the order of their names."""
    attributes = attributes_name(generation_id)
    ours = [
        hnsw_prefix(generation_id),
        name_weights_index(generation_id),
        f"{attributes}_on_",
        f"{attributes}_search",
    ]
    rows = connection.execute(LIST_INDEXES, _tables(generation_id) | {"ours": ours})
    return [FoundIndex(**row._mapping) for row in rows]


def hnsw_prefix(generation_id: int) -> str:
    return f"{table_name(generation_id)}_hnsw_"


def name_weights_index(generation_id: int) -> str:
    """Return the name of the index of the rows with more sparse weights than HNSW can have."""
    return f"{table_name(generation_id)}_weights"


def name_next_hnsw(generation_id: int, found: list[FoundIndex]) -> str:
    """Return an unused name for an HNSW index, since a new index is built while searches still use the old one."""
    taken = {index.name for index in found}
    names = (f"{hnsw_prefix(generation_id)}{number}" for number in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)


@dataclass(frozen=True, slots=True)
class StoredIndexSettings:
    """The index settings of a collection, as they are stored: policy, options, filtered fields and texts."""

    policy: str
    options: Mapping[str, Any]
    filters: Sequence[str]
    keep_text: bool
    language: str


FIND_INDEX_SETTINGS: Final = text("""
    SELECT index_policy, index_options, filters, keep_text, language
      FROM vectormill.collections
      JOIN vectormill.generations ON generations.collection_id = collections.id
     WHERE generations.id = :generation_id
""")


def find_index_settings(connection: Connection, generation_id: int) -> StoredIndexSettings:
    return StoredIndexSettings(
        *connection.execute(FIND_INDEX_SETTINGS, {"generation_id": generation_id}).one()
    )


SET_INDEX_SETTINGS: Final = text("""
    UPDATE vectormill.collections
       SET index_policy = coalesce(:policy, index_policy),
           index_options = coalesce(CAST(:options AS jsonb), index_options),
           filters = coalesce(CAST(:filters AS jsonb), filters)
     WHERE name = :name
    RETURNING index_options ->> 'bm25' IS DISTINCT FROM 'true' OR keep_text AND to_regtype('bm25query') IS NOT NULL
              AND current_setting('pg_textsearch.library_version', true) IS NOT NULL
""")


def set_index_settings(
    connection: Connection,
    collection: str,
    *,
    policy: str | None,
    options: Mapping[str, Any] | None,
    filters: list[str] | None,
) -> None:
    """Store the index settings of a collection. None leaves a setting unchanged. Raise InvalidOption."""
    values = {
        "name": collection,
        "policy": policy,
        "options": None if options is None else to_jsonb(dict(options)),
        "filters": None if filters is None else to_jsonb(filters),
    }
    if not connection.execute(SET_INDEX_SETTINGS, values).scalar_one():
        raise InvalidOption(
            f"bm25 needs kept texts in collection {collection!r}, and the extension pg_textsearch in its database: a "
            "superuser creates it in the schema public, once its library is in shared_preload_libraries."
        )


# Row versions are removed that were deleted or updated since Postgres last reset its statistics.
MEASURE_TABLE: Final = text("""
    SELECT pg_relation_size(to_regclass(:table)) AS num_bytes,
           pg_stat_get_tuples_deleted(to_regclass(:table)) + pg_stat_get_tuples_updated(to_regclass(:table))
               AS num_removed
""")


COUNT_ROWS: Final = "SELECT count(*) FROM vectormill.{table}"
ESTIMATE_ROWS: Final = "EXPLAIN (FORMAT JSON) SELECT 1 FROM vectormill.{table}"


def count_rows(connection: Connection, table: str) -> int:
    """Count the rows of a table exactly if it is small (COUNTED_BYTES); else return the planner's estimate."""
    measured = connection.execute(MEASURE_TABLE, {"table": f"vectormill.{table}"}).one()
    if measured.num_bytes <= COUNTED_BYTES:
        return int(connection.execute(text(COUNT_ROWS.format(table=table))).scalar_one())
    (plan,) = connection.execute(text(ESTIMATE_ROWS.format(table=table))).scalar_one()
    return int(plan["Plan"]["Plan Rows"])


FIND_RECORD: Final = text(
    "SELECT report -> 'index' AS record FROM vectormill.generations WHERE id = :generation_id"
)


def find_record(connection: Connection, generation_id: int) -> Mapping[str, Any]:
    """Return from what a generation's index was built, as its report says; empty if there is none."""
    return connection.execute(FIND_RECORD, {"generation_id": generation_id}).scalar_one_or_none() or {}


def share_removed(record: Mapping[str, Any], num_removed: int) -> float:
    """Return the share of an index's rows that were deleted or replaced since it was built; 0 if unknown.

    `num_removed` is the present count of the table. Postgres loses its counts in a crash, and then starts from zero.
    """
    since = num_removed - int(record.get("num_removed", num_removed))
    num_rows = int(record.get("num_rows", 0))
    changed_share = since / num_rows if num_rows and since > 0 else 0.0
    return (
        max(changed_share, share_removed(record[SPARSE], num_removed)) if SPARSE in record else changed_share
    )


def analyze_table(connection: Connection, table: str) -> None:
    """Run ANALYZE, which gathers statistics of the table's columns and of the expressions of its indexes."""
    connection.execute(text(f"ANALYZE vectormill.{table}"))


logger = logging.getLogger(__name__)

# A build that outlived its indexer is recognized by this name.
APPLICATION_NAME: Final = "vectormill index build"
PAUSE_SECONDS: Final = 1.0
CANCEL_SECONDS: Final = 10.0

POOLED: Final = (
    "Built with the server's own maintenance_work_mem and workers, because a pooler does not let sessions set "
    "them."
)

# CREATE INDEX CONCURRENTLY waits for long transactions, such as an export, and blocks nobody meanwhile: no time-outs.
# The connection check lets the server end a build whose indexer is gone within seconds, instead of after hours.
SESSION: Final[Mapping[str, str]] = {
    "application_name": APPLICATION_NAME,
    "lock_timeout": "0",
    "statement_timeout": "0",
    "client_connection_check_interval": "5s",
}


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """The progress of an index build. `num_waiting` is the number of sessions that wait for locks of the build."""

    phase: str
    tuples_done: int
    tuples_total: int
    blocks_done: int
    blocks_total: int
    num_waiting: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def share(self) -> float | None:
        """Return the finished share of the current phase, 0 to 1; None while Postgres reports no total."""
        done, total = self.blocks_done, self.blocks_total
        if not total:
            done, total = self.tuples_done, self.tuples_total
        return min(1.0, done / total) if total else None


# A build is found by its table, since the process id of its backend is unknown behind a connection pooler.
READ_PROGRESS: Final = text("""
    SELECT build.phase, build.tuples_done, build.tuples_total, build.blocks_done, build.blocks_total,
           (SELECT count(*) FROM pg_locks
             WHERE NOT granted AND build.pid = ANY (pg_blocking_pids(pg_locks.pid))) AS num_waiting
      FROM pg_stat_progress_create_index AS build
     WHERE build.relid IN (to_regclass(:vectors), to_regclass(:attributes))
     LIMIT 1
""")


def find_progress(connection: Connection, generation_id: int) -> BuildProgress | None:
    """Return the progress of an index build on one of the generation's tables, whoever started it; None if there is
    no build.
    """
    row = connection.execute(READ_PROGRESS, _tables(generation_id)).one_or_none()
    return BuildProgress(**row._mapping) if row else None


def run_build(
    engine: Engine,
    generation_id: int,
    statement: sql.Composed,
    settings: Mapping[str, str],
    watch: Callable[[BuildProgress | None], None],
) -> list[str]:
    """Run the build statement on its own connection and return the server's notices.

    `watch` is called every second with the progress; if it raises, the build is cancelled and the error is raised
    here. Raise psycopg.Error if the build fails. A concurrent build that ends early leaves an invalid index behind.
    """
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        driver = driver_of(connection)
        connection.detach()  # frees its slot in the connection pool; the session ends with this block
        # Behind a pooler in transaction mode, SET would reach the sessions of others and not this one.
        chosen = {} if driver.prepare_threshold is None else {**SESSION, **settings}
        notices = [] if chosen else [POOLED]
        driver.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
        failures: list[BaseException] = []

        def execute() -> None:
            try:
                for name, value in chosen.items():
                    driver.execute(sql.SQL("SET {} = {}").format(sql.Identifier(name), sql.Literal(value)))
                driver.execute(statement)
            except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
                failures.append(error)

        thread = threading.Thread(target=execute, name="index build", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(PAUSE_SECONDS)
                if thread.is_alive():
                    with engine.connect() as watching:
                        progress = find_progress(watching, generation_id)
                    watch(progress)
        except BaseException:
            try:  # as pg_cancel_backend does
                driver.cancel_safe(timeout=CANCEL_SECONDS)
            except psycopg.Error as error:
                logger.warning("Could not cancel the build of an index; closing its connection: %s", error)
                driver.close()
            thread.join()
            raise
        if failures:
            raise failures[0]
        return notices


# Terminating is asynchronous, so it waits: the locks must be free before the next build begins.
END_FORMER_BUILDS: Final = text("""
    SELECT count(*) FILTER (WHERE pg_terminate_backend(activity.pid, 10000))
      FROM pg_stat_progress_create_index AS build
      JOIN pg_stat_activity AS activity ON activity.pid = build.pid
      LEFT JOIN pg_class AS class ON class.oid = build.index_relid
     WHERE build.relid IN (to_regclass(:vectors), to_regclass(:attributes))
       AND (activity.application_name = :application_name OR starts_with(class.relname, :prefix))
""")


def end_former_builds(engine: Engine, generation_id: int) -> int:
    """Terminate builds left behind by an indexer that died or lost its lease, and return their number.

    Every build that Vectormill began is left behind at this point, since one run at a time works on a collection.
    """
    values = {"application_name": APPLICATION_NAME, "prefix": hnsw_prefix(generation_id)}
    with engine.begin() as connection:
        values |= _tables(generation_id)
        return int(connection.execute(END_FORMER_BUILDS, values).scalar_one())


def drop_index(
    engine: Engine, generation_id: int, name: str, *, is_live: bool, watch: Callable[[], None]
) -> None:
    """Drop an index if it exists. For a live generation it is dropped concurrently, so that searches do not wait."""
    statement = sql.SQL("DROP INDEX CONCURRENTLY IF EXISTS {}" if is_live else "DROP INDEX IF EXISTS {}")
    run_build(
        engine,
        generation_id,
        statement.format(sql.Identifier("vectormill", name)),
        {} if is_live else {"lock_timeout": "20s"},
        lambda _: watch(),
    )


def _tables(generation_id: int) -> dict[str, Any]:
    return {
        "vectors": f"vectormill.{table_name(generation_id)}",
        "attributes": f"vectormill.{attributes_name(generation_id)}",
    }


@dataclass(frozen=True, slots=True)
class PlannedIndex:
    """Index plans with their inputs. `changed_share` of the rows, 0 to 1, were deleted or replaced since the build.

    `plan` is for dense vectors; `sparse_plan` is None if the generation has no sparse weights.
    """

    kept: StoredIndexSettings
    chosen: IndexSettings
    plan: IndexPlan
    sparse_plan: IndexPlan | None
    vector_type: VectorType
    num_rows: int
    num_removed: int
    changed_share: float
    record: Mapping[str, Any]


# A sample is enough, since only the memory of a build depends on it.
MEASURE_WEIGHTS: Final = """
    SELECT coalesce(avg({bytes}), 0)
      FROM (SELECT sparse FROM vectormill.{table} LIMIT 1000) AS sample
     WHERE {is_indexed}
"""
COUNT_TOO_LONG: Final = "SELECT count(*) FROM vectormill.{table} WHERE {is_too_long}"


def count_unindexed(connection: Connection, table: str) -> int:
    """Count the rows with more sparse weights than pgvector indexes, by the index that finds them."""
    statement = COUNT_TOO_LONG.format(table=table, is_too_long=IS_TOO_LONG)
    return int(connection.execute(text(statement)).scalar_one())


def plan_for(
    connection: Connection, generation: Generation, settings: Settings, options: Mapping[str, Any]
) -> PlannedIndex:
    """Return the index plan of a generation with its inputs.

    `options` are those of a run, of which SHAPE_OPTIONS override the collection's settings for this one build.
    Raise InvalidOption for values that pgvector refuses.
    """
    kept = find_index_settings(connection, generation.id)
    asked = {name: options[name] for name in SHAPE_OPTIONS if options.get(name) is not None}
    chosen = IndexSettings.from_options(kept.policy, {**kept.options, **asked})
    vector_type = generation.spec.kept_type
    num_rows = count_rows(connection, generation.table_name)
    measured = connection.execute(MEASURE_TABLE, {"table": f"vectormill.{generation.table_name}"}).one()
    num_removed = int(measured.num_removed or 0)
    record = find_record(connection, generation.id)
    capacity = read_server_capacity(connection)
    limits: BuildLimits = {
        "is_live": generation.state == LIVE,
        "least_rows": settings.index_rows,
        "memory_share": settings.index_memory_share,
    }
    lacking = f"only {generation.spec.outputs}" if generation.kind == VECTORS else generation.kind
    plan = plan_index(
        num_rows,
        generation.spec.dimensions,
        vector_type,
        chosen,
        capacity,
        similarity=generation.spec.similarity,
        lacking="" if generation.spec.has_output(DENSE) else lacking,
        **limits,
    )
    sparse_plan = None
    if generation.spec.has_output(SPARSE):
        statement = MEASURE_WEIGHTS.format(
            bytes=WEIGHTS_BYTES, table=generation.table_name, is_indexed=IS_INDEXED
        )
        weights_bytes = float(connection.execute(text(statement)).scalar_one())
        sparse_plan = plan_sparse_index(num_rows, weights_bytes, chosen, capacity, **limits)
    changed_share = share_removed(record, num_removed)
    return PlannedIndex(
        kept, chosen, plan, sparse_plan, vector_type, num_rows, num_removed, changed_share, record
    )


READ_SETTINGS: Final = text("""
    SELECT pg_size_bytes(current_setting('maintenance_work_mem')) AS maintenance_bytes,
           pg_size_bytes(current_setting('effective_cache_size')) AS cache_bytes,
           CAST(current_setting('max_parallel_maintenance_workers') AS integer) AS num_workers,
           least(CAST(current_setting('max_parallel_workers') AS integer),
                 CAST(current_setting('max_worker_processes') AS integer)) AS most_workers,
           to_regprocedure('vectormill_server.read_machine()') IS NOT NULL AS can_read
""")

# Files of Linux and of a container's control group (cgroup), as `vectormill roles` lets the service read them; NULL if
# a file does not exist.
READ_MACHINE: Final = text("SELECT * FROM vectormill_server.read_machine()")


def read_server_capacity(connection: Connection) -> ServerCapacity:
    """Return the free memory and cores of the Postgres server.

    They come from the files of its operating system if a superuser made the roles, else from the settings of Postgres.
    """
    settings = connection.execute(READ_SETTINGS).one()
    free_bytes, source, num_cores = settings.cache_bytes, "the server's effective_cache_size", None
    if settings.can_read:
        machine = connection.execute(READ_MACHINE).one()
        files = {name: value or "" for name, value in machine._mapping.items()}
        num_cores = count_cores(files["processors"], files["quota"])
        found = find_free_bytes(
            files["memory"], files["most_memory"], files["used_memory"], files["memory_use"]
        )
        if found is not None:
            free_bytes, source = found, "free on the server"
    return ServerCapacity(
        free_bytes,
        source,
        num_cores,
        settings.maintenance_bytes,
        settings.num_workers,
        settings.most_workers,
    )


def find_free_bytes(meminfo: str, most: str, used: str, use: str) -> int | None:
    """Return the bytes that a process may still allocate, by /proc/meminfo and its cgroup; None if unknown.

    `most`, `used` and `use` are the cgroup's memory.max, memory.current and memory.stat. Inactive file cache counts as
    free, since the kernel reclaims it before the group runs out of memory.
    """
    available = re.search(r"^MemAvailable: +(\d+) kB", meminfo, re.MULTILINE)
    free = [int(available[1]) * 1024] if available else []
    if most.strip().isdigit() and used.strip().isdigit():
        cached = re.search(r"^inactive_file (\d+)", use, re.MULTILINE)
        free.append(max(0, int(most) - int(used) + (int(cached[1]) if cached else 0)))
    return min(free, default=None)


def count_cores(stat: str, quota: str) -> int | None:
    """Return the processors in /proc/stat, or the quota in the cgroup's cpu.max if that is less; None if unknown."""
    num = len(re.findall(r"^cpu\d+ ", stat, re.MULTILINE))
    limit = re.fullmatch(r"(\d+) (\d+)", quota.strip())
    if limit:
        num = min(num or 1 << 10, max(1, int(limit[1]) // int(limit[2])))
    return num or None


@dataclass(frozen=True, slots=True)
class MaintainedCollection:
    """A live generation whose indexes the index maintainer looks after: no run is open, and no build failed recently.

    `operator_classes` are those of its HNSW indexes. `wants_index` is false if only its multi-vectors are looked after,
    and `needs_codebook` is true if these are to become codes and have no codebook yet.

    `num_waiting` counts items of open jobs that will be written to it. `num_removed` counts rows that were deleted or
    replaced, `record` says from what the index was built, and `is_in_use` tells if a search used it recently.
    `filters` are the fields that have indexes for filters, and `attribute_indexes` the names of those that are there.
    """

    collection: str
    generation_id: int
    policy: str
    spec: EncodingSpec
    record: Mapping[str, Any]
    num_rows: int
    num_removed: int
    num_waiting: int
    operator_classes: Sequence[str]
    has_own_index: bool
    is_in_use: bool
    wants_index: bool = True
    needs_codebook: bool = False
    filters: Sequence[str] = ()
    attribute_indexes: Sequence[str] = ()


# The index maintainer waits this long after a build that failed or was cancelled before it requests another.
HELD_BACK_SECONDS: Final = 3600.0

LIST_MAINTAINED: Final = text(f"""
    WITH loads AS (
        SELECT generation_id, sum(num_items) AS num_waiting
          FROM vectormill.open_job_counts
         WHERE state IN {MOVING_JOB_STATES} AND generation_id IS NOT NULL
         GROUP BY generation_id
    )
    SELECT collections.name AS collection, generations.id AS generation_id, collections.index_policy AS policy,
           generations.spec, coalesce(nullif(generations.report -> 'index', 'null'), '{{}}') AS record,
           counted.num_rows,
           pg_stat_get_tuples_deleted(class.oid) + pg_stat_get_tuples_updated(class.oid) AS num_removed,
           CAST(coalesce(loads.num_waiting, 0) AS bigint) AS num_waiting,
           coalesce(present.operator_classes, '{{}}') AS operator_classes,
           coalesce(present.has_own_index, false) AS has_own_index,
           coalesce(present.is_in_use, false) AS is_in_use, wished.wants_index, wished.needs_codebook,
           collections.filters,
           ARRAY(SELECT CAST(home.relname AS text)
                   FROM pg_index AS entry JOIN pg_class AS home ON home.oid = entry.indexrelid AND entry.indisvalid
                  WHERE entry.indrelid = to_regclass('vectormill.generation_' || generations.id || '_attributes'))
               AS attribute_indexes
      FROM vectormill.generations
      JOIN vectormill.collections ON collections.id = generations.collection_id
      JOIN pg_class AS class ON class.oid = to_regclass('vectormill.generation_' || generations.id)
     CROSS JOIN LATERAL (
        SELECT CASE WHEN pg_stat_get_live_tuples(class.oid) > 0 THEN pg_stat_get_live_tuples(class.oid)
                    ELSE greatest(CAST(class.reltuples AS bigint), 0) END AS num_rows
     ) AS counted
      LEFT JOIN loads ON loads.generation_id = generations.id
      LEFT JOIN LATERAL (
        SELECT array_agg(CAST(operator_class.opcname AS text)) AS operator_classes,
               bool_or(starts_with(own.relname, 'generation_' || generations.id || '_hnsw_')) AS has_own_index,
               bool_or(pg_stat_get_lastscan(own.oid)
                       > now() - make_interval(secs => CAST(:in_use_seconds AS double precision))) AS is_in_use
          {FROM_INDEXES}
         WHERE entry.indrelid = class.oid AND entry.indisvalid AND method.amname = 'hnsw'
     ) AS present ON true
     CROSS JOIN LATERAL (
        SELECT collections.index_policy <> 'none' AND counted.num_rows
                   >= CASE collections.index_policy WHEN 'auto' THEN CAST(:least_rows AS bigint) ELSE 1 END
                   AS wants_index,
               coalesce(collections.index_options ->> 'multi_vector_codes' = '2', false)
                   AND counted.num_rows >= {LEAST_ROWS} AS needs_codebook
     ) AS wished
     WHERE generations.state = 'live'
       AND (wished.wants_index OR wished.needs_codebook OR collections.filters <> '[]')
       AND NOT EXISTS (
            SELECT 1 FROM vectormill.runs
             WHERE runs.collection_id = collections.id AND runs.state IN {OPEN_RUN_STATES})
       AND NOT EXISTS (
            SELECT 1 FROM vectormill.runs
             WHERE runs.collection_id = collections.id AND runs.kind = 'index' AND runs.state IN {BROKEN_RUN_STATES}
               AND runs.finished_at > now() - make_interval(secs => CAST(:held_back_seconds AS double precision)))
     ORDER BY collections.name
""")


# An index that served a search within this time is in use: it is not dropped for a load, nor before a bulk write.
IN_USE_SECONDS: Final = 600.0


def list_maintained(connection: Connection, *, least_rows: int) -> list[MaintainedCollection]:
    """Return the collections that should have an HNSW index (policy `hnsw`, or `auto` with `least_rows`) or indexes for
    filters, or whose multi-vectors should become codes.

    Those with an open run are left out, and those with a failed build in the last hour.
    """
    values = {
        "least_rows": least_rows,
        "in_use_seconds": IN_USE_SECONDS,
        "held_back_seconds": HELD_BACK_SECONDS,
    }
    rows = connection.execute(LIST_MAINTAINED, values).mappings()
    found = [MaintainedCollection(**{**row, "spec": EncodingSpec.from_json(row["spec"])}) for row in rows]
    return [
        replace(each, needs_codebook=each.needs_codebook and find_codebook(connection, each.spec) is None)
        for each in found
    ]


def list_operator_classes(spec: EncodingSpec) -> list[str]:
    """Return the operator classes of the HNSW indexes that pgvector can build for the outputs of a spec."""
    dense = None
    if spec.has_output(DENSE):
        dense, _ = find_operator_class(spec.kept_type, spec.dimensions, spec.similarity)
    classes = [dense, SPARSE_CLASS if spec.has_output(SPARSE) else None]
    return [each for each in classes if each is not None]
