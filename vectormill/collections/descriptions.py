"""Descriptions of collections: their generations and settings, their size, and how fresh they are.

A list has a page of collections in short, and a description has one collection in full. Nothing here takes a lock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Row, text

from vectormill.collections.collection import STORED_GENERATION_STATES
from vectormill.collections.generation_tables import table_name
from vectormill.collections.indexes import (
    COUNT_ROWS,
    COUNTED_BYTES,
    FROM_INDEXES,
    INDEX_STATE,
    FoundIndex,
    find_index_settings,
    find_indexes,
)
from vectormill.db.locks import find_row_within
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import CollectionNotFound, SearchTimeout
from vectormill.jobs.job import OPEN_JOB_STATES
from vectormill.runs.differences import list_failed_keys
from vectormill.runs.run import IS_SYNC, OPEN_RUN_STATES, Run
from vectormill.runs.runs import list_runs
from vectormill.sources.following import COUNT_WAITING
from vectormill.sources.source import Source
from vectormill.sources.sources import find_source_by_id

# A description shows the newest runs and open jobs up to these limits, since people read it.
MOST_RUNS: Final = 5
MOST_OPEN_JOBS: Final = 20
MOST_FAILED_KEYS: Final = 20
# Waiting changes are counted only up to this limit, since the exact number does not matter beyond it.
MOST_WAITING_CHANGES: Final = 100_000


@dataclass(frozen=True, slots=True)
class GenerationDescription:
    """A generation with its size. `num_rows` is an estimate of Postgres; bytes are those on disk, with TOAST."""

    id: int
    state: str
    fingerprint: str
    spec: EncodingSpec
    created_at: datetime
    live_at: datetime | None
    retired_at: datetime | None
    report: Mapping[str, Any]
    num_rows: int
    table_bytes: int
    index_bytes: int
    attribute_bytes: int
    indexes: list[FoundIndex]

    @property
    def num_bytes(self) -> int:
        return self.table_bytes + self.index_bytes + self.attribute_bytes


@dataclass(frozen=True, slots=True)
class Coverage:
    """The coverage of a collection's source as of the last completed re-index: rows seen, and rows that failed.

    `failed_keys` are some of the keys that could not be encoded.
    """

    run_id: UUID
    at: datetime
    num_seen: int
    num_failed: int
    failed_keys: list[str]

    @property
    def share(self) -> float:
        """Return the share of the source's rows that have a result, 0 to 1; 1 for an empty source."""
        return (self.num_seen - self.num_failed) / self.num_seen if self.num_seen else 1.0


@dataclass(frozen=True, slots=True)
class CollectionRow:
    """A collection as a list shows it. `num_rows` is an estimate; `synced_at` is the end of the last good re-index."""

    id: int
    name: str
    spec: EncodingSpec
    keep_text: bool
    language: str
    num_rows: int
    num_bytes: int
    num_generations: int
    created_at: datetime
    synced_at: datetime | None
    now: datetime

    @property
    def stale_seconds(self) -> float | None:
        """Return the seconds since the last successful re-index; None if there was none."""
        return (self.now - self.synced_at).total_seconds() if self.synced_at else None


@dataclass(frozen=True, slots=True)
class CollectionDescription:
    """The full description of a collection. Exactly one of `generations` is live.

    `open_jobs` and `schedules` are rows of the SQL statements with these names.
    """

    row: CollectionRow
    index_policy: str
    index_options: Mapping[str, Any]
    filters: list[Any]
    exact_rows: int | None
    generations: list[GenerationDescription]
    coverage: Coverage | None
    num_waiting_changes: int
    oldest_change_at: datetime | None
    open_jobs: Sequence[Row[Any]]
    runs: list[Run]
    source: Source | None
    schedules: Sequence[Row[Any]]

    @property
    def live(self) -> GenerationDescription:
        return next(generation for generation in self.generations if generation.state == "live")


# The estimate is the planner's: rows per page at the last ANALYZE or VACUUM, times the current number of pages. Before
# the first of these it is the number of live rows by the server's statistics.
ESTIMATE_ROWS: Final = """
    CASE WHEN class.relpages > 0 AND class.reltuples >= 0
         THEN CAST(class.reltuples / class.relpages * (pg_relation_size(class.oid) / 8192) AS bigint)
         ELSE pg_stat_get_live_tuples(class.oid) END
"""

LIST_COLLECTIONS = text(f"""
    SELECT collections.id, collections.name, live.spec, collections.keep_text, collections.language,
           collections.created_at, now() AS now,
           coalesce({ESTIMATE_ROWS}, 0) AS num_rows,
           (SELECT coalesce(sum(pg_total_relation_size(to_regclass('vectormill.generation_' || id || suffix))), 0)
              FROM vectormill.generations
             CROSS JOIN unnest(ARRAY['', '_attributes', '_fill', '_fill_attributes']) AS suffix
             WHERE collection_id = collections.id) AS num_bytes,
           (SELECT count(*) FROM vectormill.generations WHERE collection_id = collections.id) AS num_generations,
           (SELECT finished_at FROM vectormill.runs
             WHERE collection_id = collections.id AND {IS_SYNC}
             ORDER BY created_at DESC LIMIT 1) AS synced_at
      FROM vectormill.collections
      JOIN vectormill.generations AS live ON live.collection_id = collections.id AND live.state = 'live'
      LEFT JOIN pg_class AS class ON class.oid = to_regclass('vectormill.generation_' || live.id)
     WHERE (CAST(:name AS text) IS NULL OR collections.name = :name)
       AND (CAST(:after AS bigint) IS NULL
            OR collections.name > (SELECT before.name FROM vectormill.collections AS before WHERE before.id = :after))
     ORDER BY collections.name
     LIMIT :limit
""")


def list_collection_rows(connection: Connection, *, after: int | None, limit: int) -> list[CollectionRow]:
    """Return a page of collections in the order of their names.

    `after` is the id of the last collection of the previous page, or None; a `limit` of None returns all.
    """
    rows = connection.execute(LIST_COLLECTIONS, {"name": None, "after": after, "limit": limit})
    return [_collection_row(row) for row in rows]


def _collection_row(row: Row[Any]) -> CollectionRow:
    values = row._asdict() | {"spec": EncodingSpec.from_json(row.spec), "num_bytes": int(row.num_bytes)}
    return CollectionRow(**values)


LIST_GENERATIONS = text(f"""
    SELECT generation.id, generation.state, generation.fingerprint, generation.spec, generation.created_at,
           generation.live_at, generation.retired_at, generation.report,
           coalesce({ESTIMATE_ROWS}, 0) AS num_rows,
           coalesce(pg_table_size(class.oid), 0) AS table_bytes,
           coalesce(pg_indexes_size(class.oid), 0) AS index_bytes,
           coalesce(pg_total_relation_size(coalesce(
               to_regclass('vectormill.generation_' || generation.id || '_fill_attributes'),
               to_regclass('vectormill.generation_' || generation.id || '_attributes'))), 0) AS attribute_bytes
      FROM vectormill.generations AS generation
      LEFT JOIN pg_class AS class ON class.oid = coalesce(
               to_regclass('vectormill.generation_' || generation.id || '_fill'),
               to_regclass('vectormill.generation_' || generation.id))
     WHERE generation.collection_id = :id AND generation.state IN {STORED_GENERATION_STATES}
     ORDER BY generation.id DESC
""")

FIND_LAST_SYNC = text(f"""
    SELECT id, finished_at, num_seen, num_failed, job_id FROM vectormill.runs
     WHERE collection_id = :id AND {IS_SYNC}
     ORDER BY created_at DESC LIMIT 1
""")

# This is cheap because few jobs are open, and a partial index lists them.
LIST_OPEN_JOBS = text(f"""
    SELECT job.id, job.state, job.num_items, job.num_done, job.num_failed
      FROM vectormill.jobs AS job
      JOIN vectormill.generations AS generation ON generation.id = job.generation_id
     WHERE generation.collection_id = :id
       AND job.state IN {OPEN_JOB_STATES}
     ORDER BY job.seq LIMIT :limit
""")

LIST_SCHEDULES = text("""
    SELECT name, cron, timezone, next_due_at, paused_at IS NOT NULL AS is_paused
      FROM vectormill.schedules WHERE collection_id = :id ORDER BY name
""")


def describe_collection(
    connection: Connection, name: str, *, counts_rows: bool = False, timeout_seconds: float = 30.0
) -> CollectionDescription:
    """Return the full description of a collection; a small one's rows are counted, any one's with `counts_rows`.

    Raise CollectionNotFound, and SearchTimeout if counting takes longer than `timeout_seconds`.
    """
    found = connection.execute(LIST_COLLECTIONS, {"name": name, "after": None, "limit": 1}).one_or_none()
    if found is None:
        raise CollectionNotFound.named(name)
    row = _collection_row(found)
    of_it = {"id": row.id}
    generations = [
        GenerationDescription(
            **(each._asdict() | {"spec": EncodingSpec.from_json(each.spec)}),
            indexes=find_indexes(connection, each.id),
        )
        for each in connection.execute(LIST_GENERATIONS, of_it).all()
    ]
    live = next(generation for generation in generations if generation.state == "live")
    stored = find_index_settings(connection, live.id)
    limit = {"collection_id": row.id, "limit": MOST_WAITING_CHANGES}
    waiting = connection.execute(COUNT_WAITING, limit).one()
    return CollectionDescription(
        row=row,
        index_policy=stored.policy,
        index_options=stored.options,
        filters=list(stored.filters),
        generations=generations,
        coverage=_find_coverage(connection, row.id),
        num_waiting_changes=waiting.num_waiting,
        oldest_change_at=waiting.oldest_at,
        open_jobs=connection.execute(LIST_OPEN_JOBS, of_it | {"limit": MOST_OPEN_JOBS}).all(),
        runs=list_runs(connection, collection=name, limit=MOST_RUNS),
        source=find_source_by_id(connection, row.id),
        schedules=connection.execute(LIST_SCHEDULES, of_it).all(),
        # Rows are counted last because a time-out aborts the transaction.
        exact_rows=count_rows(connection, live.id, timeout_seconds)
        if counts_rows or live.table_bytes <= COUNTED_BYTES
        else None,
    )


def _find_coverage(connection: Connection, collection_id: int) -> Coverage | None:
    run = connection.execute(FIND_LAST_SYNC, {"id": collection_id}).one_or_none()
    if run is None:
        return None
    failed = list_failed_keys(connection, run.job_id, after=-1, limit=MOST_FAILED_KEYS) if run.job_id else ()
    keys = [key for _, key, _ in failed]
    return Coverage(run.id, run.finished_at, run.num_seen, run.num_failed, keys)


def count_rows(connection: Connection, generation_id: int, timeout_seconds: float) -> int:
    """Count the rows of a generation exactly. Raise SearchTimeout, which aborts the caller's transaction."""
    statement = text(COUNT_ROWS.format(table=table_name(generation_id)))
    row = find_row_within(connection, timeout_seconds, statement)
    if row is None:
        raise SearchTimeout(
            f"Counting every row took more than {timeout_seconds:g} s and was stopped; omit `exact` for an estimate."
        )
    return int(row[0])


MOST_OPEN_RUNS: Final = 20


@dataclass(frozen=True, slots=True)
class CollectionSummary:
    """The state of a collection that a list shows alongside its spec and size.

    `num_seen` and `num_failed` are counts of the last completed re-index; the open run is the newest one.
    `index_state` is that of the live generation's vector index: ready, building, invalid, or None without an index.
    """

    id: int
    num_seen: int | None
    num_failed: int | None
    oldest_change_at: datetime | None
    run_id: UUID | None
    run_kind: str | None
    run_state: str | None
    run_phase: str | None
    is_building: bool
    index_state: str | None
    source_kind: str | None

    @property
    def coverage(self) -> float | None:
        """Return the share of the source's rows that have a result, 0 to 1; None if no re-index has completed."""
        if self.num_seen is None or self.num_failed is None:
            return None
        return (self.num_seen - self.num_failed) / self.num_seen if self.num_seen else 1.0


# An index serves each subquery: runs by (collection_id, created_at), changes by (collection_id, id), generations by
# their collection. The oldest change has the lowest id.
LIST_SUMMARIES = text(f"""
    SELECT collections.id, sync.num_seen, sync.num_failed, change.changed_at AS oldest_change_at,
           run.id AS run_id, run.kind AS run_kind, run.state AS run_state, run.phase AS run_phase,
           EXISTS (SELECT 1 FROM vectormill.generations
                    WHERE collection_id = collections.id AND state = 'building') AS is_building,
           vector_index.state AS index_state, sources.kind AS source_kind
      FROM vectormill.collections
      LEFT JOIN vectormill.sources ON sources.collection_id = collections.id
      LEFT JOIN LATERAL (SELECT num_seen, num_failed FROM vectormill.runs
                          WHERE collection_id = collections.id AND {IS_SYNC}
                          ORDER BY created_at DESC LIMIT 1) AS sync ON true
      LEFT JOIN LATERAL (SELECT id, kind, state, phase FROM vectormill.runs
                          WHERE collection_id = collections.id
                            AND state IN {OPEN_RUN_STATES}
                          ORDER BY created_at DESC LIMIT 1) AS run ON true
      LEFT JOIN LATERAL (SELECT changed_at FROM vectormill.source_changes
                          WHERE collection_id = collections.id ORDER BY collection_id, id LIMIT 1) AS change ON true
      LEFT JOIN vectormill.generations AS live ON live.collection_id = collections.id AND live.state = 'live'
      LEFT JOIN LATERAL (SELECT {INDEX_STATE} AS state {FROM_INDEXES}
                          WHERE entry.indrelid = to_regclass('vectormill.generation_' || live.id)
                            AND method.amname IN ('hnsw', 'ivfflat')
                          ORDER BY entry.indisvalid DESC LIMIT 1) AS vector_index ON true
     WHERE collections.id = ANY(CAST(:ids AS bigint[]))
""")


def list_summaries(connection: Connection, ids: Sequence[int]) -> dict[int, CollectionSummary]:
    """Return the state of these collections by id, without those that have been deleted meanwhile."""
    rows = connection.execute(LIST_SUMMARIES, {"ids": list(ids)})
    return {row.id: CollectionSummary(**row._mapping) for row in rows}


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run that has not ended, with the progress of the job that encodes its items."""

    id: UUID
    state: str
    phase: str | None
    generation_id: int | None
    num_items: int | None
    num_ended: int | None

    @property
    def share(self) -> float | None:
        """Return the finished share of the items of the run's job, 0 to 1; None while the run has no job."""
        return self.num_ended / self.num_items if self.num_items and self.num_ended is not None else None


LIST_OPEN_RUNS = text(f"""
    SELECT run.id, run.state, run.phase, run.generation_id, job.num_items, job.num_done + job.num_failed AS num_ended
      FROM vectormill.runs AS run LEFT JOIN vectormill.jobs AS job ON job.id = run.job_id
     WHERE run.collection_id = :id AND run.state IN {OPEN_RUN_STATES}
     ORDER BY run.created_at LIMIT :limit
""")


def list_open_runs(connection: Connection, collection_id: int) -> list[OpenRun]:
    """Return the open runs of a collection, the oldest first: the one at work, then those that wait for it."""
    values = {"id": collection_id, "limit": MOST_OPEN_RUNS}
    return [OpenRun(**row._mapping) for row in connection.execute(LIST_OPEN_RUNS, values)]
