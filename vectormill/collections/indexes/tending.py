"""Collections whose vector index may want something done: one look at the catalog, which reads no rows of theirs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, text

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import VECTOR
from vectormill.jobs.job import MOVING_JOB_STATES
from vectormill.runs.run import BROKEN_RUN_STATES, OPEN_RUN_STATES


@dataclass(frozen=True, slots=True)
class TendedCollection:
    """A live generation with neither a run nor a failed build lately. `num_waiting` are items on their way into it.

    `num_removed` counts rows that were deleted or replaced, `record` is what the index was built of, and `is_in_use`
    whether a search has used it lately.
    """

    collection: str
    generation_id: int
    policy: str
    spec: EncodingSpec
    record: Mapping[str, Any]
    num_rows: int
    num_removed: int
    num_waiting: int
    has_index: bool
    has_own_index: bool
    is_in_use: bool


# After a build that failed, or that somebody cancelled, nobody asks for another for so long.
HELD_BACK_SECONDS: Final = 3600.0

LIST_TENDED: Final = text(f"""
    WITH loads AS (
        SELECT generation_id, sum(num_items - num_done - num_failed) AS num_waiting
          FROM vectormill.jobs
         WHERE state IN {MOVING_JOB_STATES} AND generation_id IS NOT NULL
         GROUP BY generation_id
    )
    SELECT collections.name AS collection, generations.id AS generation_id, collections.index_policy AS policy,
           generations.spec, coalesce(nullif(generations.report -> 'index', 'null'), '{{}}') AS record,
           counted.num_rows,
           pg_stat_get_tuples_deleted(class.oid) + pg_stat_get_tuples_updated(class.oid) AS num_removed,
           CAST(coalesce(loads.num_waiting, 0) AS bigint) AS num_waiting,
           coalesce(present.has_index, false) AS has_index, coalesce(present.has_own_index, false) AS has_own_index,
           coalesce(present.is_in_use, false) AS is_in_use
      FROM vectormill.generations
      JOIN vectormill.collections ON collections.id = generations.collection_id
      JOIN pg_class AS class ON class.oid = to_regclass('vectormill.generation_' || generations.id)
     CROSS JOIN LATERAL (
        SELECT CASE WHEN pg_stat_get_live_tuples(class.oid) > 0 THEN pg_stat_get_live_tuples(class.oid)
                    ELSE greatest(CAST(class.reltuples AS bigint), 0) END AS num_rows
     ) AS counted
      LEFT JOIN loads ON loads.generation_id = generations.id
      LEFT JOIN LATERAL (
        SELECT bool_or(true) AS has_index,
               bool_or(starts_with(home.relname, 'generation_' || generations.id || '_hnsw_')) AS has_own_index,
               bool_or(pg_stat_get_lastscan(home.oid)
                       > now() - make_interval(secs => CAST(:in_use_seconds AS double precision))) AS is_in_use
          FROM pg_index AS entry
          JOIN pg_class AS home ON home.oid = entry.indexrelid
          JOIN pg_am AS method ON method.oid = home.relam AND method.amname = 'hnsw'
         WHERE entry.indrelid = class.oid AND entry.indisvalid
     ) AS present ON true
     WHERE generations.state = 'live' AND collections.index_policy <> 'none'
       AND counted.num_rows >= CASE collections.index_policy WHEN 'auto' THEN CAST(:least_rows AS bigint) ELSE 1 END
       AND NOT EXISTS (
            SELECT 1 FROM vectormill.runs
             WHERE runs.collection_id = collections.id
               AND (runs.state IN {OPEN_RUN_STATES}
                    OR runs.kind = 'index' AND runs.state IN {BROKEN_RUN_STATES}
                       AND runs.finished_at
                           > now() - make_interval(secs => CAST(:held_back_seconds AS double precision))))
     ORDER BY collections.name
""")


def list_tended(connection: Connection, *, least_rows: int, in_use_seconds: float) -> list[TendedCollection]:
    """Collections of vectors with a policy of `hnsw`, or of `auto` and so many rows."""
    values = {
        "least_rows": least_rows,
        "in_use_seconds": in_use_seconds,
        "held_back_seconds": HELD_BACK_SECONDS,
    }
    rows = connection.execute(LIST_TENDED, values).mappings()
    found = [TendedCollection(**{**row, "spec": EncodingSpec.from_json(row["spec"])}) for row in rows]
    return [each for each in found if each.spec.result == VECTOR]
