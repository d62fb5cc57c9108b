"""Standings of collections, a page of them at a time, and what is being built in one. Reads, and locks
nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, text

from vectormill.collections.indexes.builds import BuildProgress, find_progress
from vectormill.runs.run import GOOD_RUN_STATES, OPEN_RUN_STATES

MOST_OPEN_RUNS: Final = 20


@dataclass(frozen=True, slots=True)
class Standing:
    """The line of a list about a collection, beside its spec and size.

    `num_seen` and `num_failed` are of the last re-index that came to its end; the open run is the newest one.
    `index_state` is of the live generation's vector index: ready, building, invalid, or None where there is none.
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
        """Return the share of the source's rows that have a result, 0 to 1; None while no re-index has ended."""
        if self.num_seen is None or self.num_failed is None:
            return None
        return (self.num_seen - self.num_failed) / self.num_seen if self.num_seen else 1.0


# Each look-up has an index: runs by (collection_id, created_at), changes by (collection_id, id), generations by their
# collection. The oldest change is the one with the lowest id.
LIST_STANDINGS = text(f"""
    SELECT collections.id, sync.num_seen, sync.num_failed, change.changed_at AS oldest_change_at,
           run.id AS run_id, run.kind AS run_kind, run.state AS run_state, run.phase AS run_phase,
           EXISTS (SELECT 1 FROM vectormill.generations
                    WHERE collection_id = collections.id AND state = 'building') AS is_building,
           vector_index.state AS index_state, sources.kind AS source_kind
      FROM vectormill.collections
      LEFT JOIN vectormill.sources ON sources.collection_id = collections.id
      LEFT JOIN LATERAL (SELECT num_seen, num_failed FROM vectormill.runs
                          WHERE collection_id = collections.id AND kind = 'reindex'
                            AND state IN {GOOD_RUN_STATES}
                          ORDER BY created_at DESC LIMIT 1) AS sync ON true
      LEFT JOIN LATERAL (SELECT id, kind, state, phase FROM vectormill.runs
                          WHERE collection_id = collections.id
                            AND state IN {OPEN_RUN_STATES}
                          ORDER BY created_at DESC LIMIT 1) AS run ON true
      LEFT JOIN LATERAL (SELECT changed_at FROM vectormill.source_changes
                          WHERE collection_id = collections.id ORDER BY collection_id, id LIMIT 1) AS change ON true
      LEFT JOIN vectormill.generations AS live ON live.collection_id = collections.id AND live.state = 'live'
      LEFT JOIN LATERAL (SELECT CASE WHEN index.indisvalid THEN 'ready'
                                     WHEN EXISTS (SELECT 1 FROM pg_stat_progress_create_index
                                                   WHERE index_relid = index.indexrelid) THEN 'building'
                                     ELSE 'invalid' END AS state
                           FROM pg_index AS index
                           JOIN pg_class AS own ON own.oid = index.indexrelid
                           JOIN pg_am AS method ON method.oid = own.relam
                          WHERE index.indrelid = to_regclass('vectormill.generation_' || live.id)
                            AND method.amname IN ('hnsw', 'ivfflat')
                          ORDER BY index.indisvalid DESC LIMIT 1) AS vector_index ON true
     WHERE collections.id = ANY(CAST(:ids AS bigint[]))
""")


def list_standings(connection: Connection, ids: Sequence[int]) -> dict[int, Standing]:
    """Return the standings of these collections by id; one that was deleted meanwhile is left out."""
    rows = connection.execute(LIST_STANDINGS, {"ids": list(ids)})
    return {row.id: Standing(**row._mapping) for row in rows}


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run that has not ended, with how far the job is that encodes for it."""

    id: UUID
    kind: str
    state: str
    phase: str | None
    error: str | None
    generation_id: int | None
    num_seen: int
    job_id: UUID | None
    num_items: int | None
    num_ended: int | None
    created_at: datetime

    @property
    def share(self) -> float | None:
        """Return the share of its job's items that are encoded, 0 to 1; None while it has no job."""
        return self.num_ended / self.num_items if self.num_items and self.num_ended is not None else None


LIST_OPEN_RUNS = text(f"""
    SELECT run.id, run.kind, run.state, run.phase, run.error, run.generation_id, run.num_seen, run.job_id,
           job.num_items, job.num_done + job.num_failed AS num_ended, run.created_at
      FROM vectormill.runs AS run LEFT JOIN vectormill.jobs AS job ON job.id = run.job_id
     WHERE run.collection_id = :id AND run.state IN {OPEN_RUN_STATES}
     ORDER BY run.created_at LIMIT :limit
""")


def list_open_runs(connection: Connection, collection_id: int) -> list[OpenRun]:
    """The oldest first: the one that works, then those that wait for it."""
    values = {"id": collection_id, "limit": MOST_OPEN_RUNS}
    return [OpenRun(**row._mapping) for row in connection.execute(LIST_OPEN_RUNS, values)]


def find_index_progress(connection: Connection, generation_ids: Sequence[int]) -> dict[int, BuildProgress]:
    """Return the progress of indexes that are being built, by the id of their generation."""
    found: dict[int, Any] = {each: find_progress(connection, each) for each in generation_ids}
    return {each: progress for each, progress in found.items() if progress is not None}
