"""Swaps: which generation is live changes in one transaction, with states, view and everything that reads them.

Searches read the generation's table and wait for nobody; a search that began before goes on in the old table. Writers
of the collection wait for the moment that it takes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import psycopg
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError

from vectormill.collections.collection import BUILDING, LIVE, Generation
from vectormill.collections.collections import find_generation, keeps_texts
from vectormill.collections.generations import (
    FROM_GENERATIONS,
    GENERATION_COLUMNS,
    find_generation_by_id,
    find_in_state,
    lock_collection,
    read_generation,
)
from vectormill.collections.rows.attributes import attributes_name
from vectormill.collections.rows.generation_tables import table_name
from vectormill.collections.views import replace_view
from vectormill.db.locks import limit_time
from vectormill.domain.errors import Conflict, RowsMissing
from vectormill.jobs.job import RECEIVED_JOB_STATES
from vectormill.jobs.jobs import draw_seq
from vectormill.runs.run import CLAIMED_RUN_STATES, GOOD_RUN_STATES, REINDEX
from vectormill.runs.runs import cancel_run, create_run

# So long submissions are held back while the last twins end.
DRAIN_SECONDS: Final = 0.5
_DRAIN_PAUSE_SECONDS: Final = 0.02

# Jobs behind `retired_seq` have not written this generation: a rollback carries their rows back.
RETIRE_LIVE = text("""
    UPDATE vectormill.generations
       SET state = 'retired', retired_at = now(), held_until = NULL,
           report = report || jsonb_build_object('retired_seq', CAST(:seq AS bigint))
     WHERE id = :generation_id AND state = 'live'
""")

MAKE_LIVE = text("""
    UPDATE vectormill.generations
       SET state = 'live', live_at = now(), retired_at = NULL,
           report = report || jsonb_build_object('live_seq', CAST(:seq AS bigint))
     WHERE id = :generation_id
""")

# An original that has ended was told to its client as searchable; one whose row is gone had ended too.
LIST_LAGGING_TWINS = text(f"""
    SELECT twin.id
      FROM vectormill.jobs AS twin
      LEFT JOIN vectormill.jobs AS original ON original.id = twin.twin_of
     WHERE twin.generation_id = :generation_id AND twin.twin_of IS NOT NULL
       AND twin.state IN {RECEIVED_JOB_STATES}
       AND (original.id IS NULL OR original.finished_at IS NOT NULL)
""")

HOLD_BACK = text("""
    UPDATE vectormill.generations SET held_until = now() + make_interval(secs => CAST(:seconds AS double precision))
     WHERE collection_id = :collection_id AND state = 'live'
""")

FIND_LATEST_RETIRED = text(f"""
    SELECT {GENERATION_COLUMNS} {FROM_GENERATIONS}
     WHERE collections.name = :name AND generations.state = 'retired' AND generations.live_at IS NOT NULL
     ORDER BY generations.retired_at DESC, generations.id DESC LIMIT 1
""")

IS_RUNNING = text(f"""
    SELECT id FROM vectormill.runs
     WHERE collection_id = :collection_id AND state IN {CLAIMED_RUN_STATES} AND NOT options ? 'carry_from'
     LIMIT 1
""")

# Not the place in which the live one became so: another may have been live between the two. That one stands for what
# was retired by a former release.
FIND_RETIRED_SEQ = text("""
    SELECT coalesce(CAST(retired.report ->> 'retired_seq' AS bigint), CAST(live.report ->> 'live_seq' AS bigint), 0)
      FROM vectormill.generations AS live
      LEFT JOIN LATERAL (
          SELECT report FROM vectormill.generations
           WHERE collection_id = live.collection_id AND state = 'retired' AND live_at IS NOT NULL
           ORDER BY retired_at DESC, id DESC LIMIT 1) AS retired ON true
     WHERE live.id = :live_id
""")

COUNT_NEWER_ROWS: Final = """
    SELECT count(*) AS num_rows, count(*) FILTER (WHERE kept.text IS NULL) AS num_missing
      FROM vectormill.{table} AS row LEFT JOIN vectormill.{attributes} AS kept ON kept.key = row.key
     WHERE greatest(row.job_seq, kept.job_seq) > :retired_seq
"""

# A rollback whose run did not complete has left rows behind: the next one carries them too.
FIND_CARRIED_SINCE = text(f"""
    SELECT least(CAST(:retired_seq AS bigint), min(CAST(options ->> 'carry_since' AS bigint)))
      FROM vectormill.runs
     WHERE collection_id = :collection_id AND state NOT IN {GOOD_RUN_STATES}
       AND CAST(options ->> 'carry_from' AS bigint) = :generation_id
""")

LIST_OPEN_CARRIES = text("""
    SELECT id FROM vectormill.runs
     WHERE collection_id = :collection_id AND finished_at IS NULL AND options ? 'carry_from'
""")


@dataclass(frozen=True, slots=True)
class Swap:
    """The generations before and after a swap."""

    retired: Generation
    live: Generation


@dataclass(frozen=True, slots=True)
class Rollback(Swap):
    """A swap, and the run that carries what was put since into the generation that is live again."""

    run_id: UUID


@dataclass(frozen=True, slots=True)
class NewerRows:
    """Rows that only the live generation has, in the version written since it became live.

    `num_missing` of them have no kept text, so that a rollback cannot encode them again.
    """

    num_rows: int
    num_missing: int


NOTHING_NEWER: Final = NewerRows(0, 0)


def list_lagging_twins(connection: Connection, generation_id: int) -> set[UUID]:
    """Twins that are still to be encoded although their original has ended."""
    return set(connection.execute(LIST_LAGGING_TWINS, {"generation_id": generation_id}).scalars())


def hold_back_jobs(connection: Connection, building: Generation, seconds: float) -> None:
    """Dispatch no chunk of the live generation's jobs for so long, so that no job ends before its twin.

    Nothing is refused or lost: these jobs wait.
    """
    connection.execute(HOLD_BACK, {"collection_id": building.collection_id, "seconds": float(seconds)})


def swap_generations(
    connection: Connection, building_id: int, wait: Callable[[float], None] = time.sleep
) -> Swap | None:
    """Makes a generation live that was being built; None when twins lag behind, and it is to be tried again.

    In a transaction with short locks. One that is live already is left as it is. Raises Conflict when it was given up,
    and SwapRefused.
    """
    building = find_generation_by_id(connection, building_id)
    if building is not None:
        lock_collection(connection, building.collection)
        building = find_generation_by_id(connection, building_id)
    if building is None or building.state not in (BUILDING, LIVE):
        raise Conflict(
            f"Generation {building_id} was given up meanwhile, so it does not become the live one."
        )
    if building.state == LIVE:
        return Swap(building, building)
    live = find_in_state(connection, building.collection, LIVE)
    assert live is not None  # a collection has one from its first job on
    num_tries = round(DRAIN_SECONDS / _DRAIN_PAUSE_SECONDS)
    while list_lagging_twins(connection, building_id):
        num_tries -= 1
        if num_tries <= 0:
            return None
        wait(_DRAIN_PAUSE_SECONDS)
    return _exchange(connection, live, building)


def _exchange(connection: Connection, live: Generation, next_live: Generation) -> Swap:
    seq = draw_seq(connection)
    connection.execute(RETIRE_LIVE, {"generation_id": live.id, "seq": seq})
    connection.execute(MAKE_LIVE, {"generation_id": next_live.id, "seq": seq})
    # Last: from here to COMMIT users' queries wait for the view.
    replace_view(connection, next_live)
    return Swap(live, next_live)


def count_newer_rows(
    connection: Connection, collection: str, timeout_seconds: float = 30.0
) -> NewerRows | None:
    """Count what a rollback has to carry.

    Read all rows; answer None when that takes too long. Raise CollectionNotFound.
    """
    live = find_generation(connection, collection)
    retired_seq = connection.execute(FIND_RETIRED_SEQ, {"live_id": live.id}).scalar_one()
    statement = COUNT_NEWER_ROWS.format(table=table_name(live.id), attributes=attributes_name(live.id))
    limit_time(connection, timeout_seconds)
    try:
        row = connection.execute(text(statement), {"retired_seq": retired_seq}).one()
    except OperationalError as error:
        if not isinstance(error.orig, psycopg.errors.QueryCanceled):
            raise
        return None
    return NewerRows(row.num_rows, row.num_missing)


def refuse_missing(connection: Connection, live: Generation, newer: NewerRows | None) -> None:
    """Raise RowsMissing where a rollback would leave rows out, or where that could not be counted in time."""
    if newer is None:
        if keeps_texts(connection, live.collection_id):
            return
        said = "the texts of rows that were put"
    elif newer.num_missing == 0:
        return
    elif newer.num_missing == 1:
        said = "the text of 1 row, which was put"
    else:
        said = f"the texts of {newer.num_missing:,} rows, which were put"
    raise RowsMissing(
        f"Collection {live.collection!r} does not keep {said} since its generation became live, so a rollback cannot "
        "encode them again, and what no job has any more would be missing. Nothing was changed; to roll back "
        "nevertheless, say allow_missing."
    )


def roll_back(
    connection: Connection,
    collection: str,
    *,
    newer: NewerRows | None = NOTHING_NEWER,
    allow_missing: bool = False,
) -> Rollback:
    """Make the generation live that was live before, retire the live one, and queue a run that carries what is newer.

    In a transaction with short locks. `newer` was counted before. Raise RowsMissing where it has rows without a kept
    text, unless with `allow_missing`, which lets the run use the texts of jobs instead; and CollectionNotFound,
    Conflict and SwapRefused.
    """
    of_collection = {"collection_id": find_generation(connection, collection).collection_id}
    # First, as an indexer locks its run before it holds the collection.
    for carry_id in connection.execute(LIST_OPEN_CARRIES, of_collection).scalars().all():
        cancel_run(connection, carry_id)
    lock_collection(connection, collection)
    live = find_generation(connection, collection)
    run_id = connection.execute(IS_RUNNING, of_collection).scalar_one_or_none()
    if run_id is not None:
        raise Conflict(
            f"Run {run_id} is at work on collection {collection!r}; cancel it or wait for its end, then roll back."
        )
    row = connection.execute(FIND_LATEST_RETIRED, {"name": collection}).one_or_none()
    if row is None:
        raise Conflict(
            f"Collection {collection!r} has no generation to roll back to: it never had another, or its retired ones "
            "were removed after VECTORMILL_RETIRED_GENERATION_DAYS."
        )
    if not allow_missing:
        refuse_missing(connection, live, newer)
    retired_seq = connection.execute(FIND_RETIRED_SEQ, {"live_id": live.id}).scalar_one()
    since = {**of_collection, "generation_id": live.id, "retired_seq": retired_seq}
    options = {
        "carry_from": live.id,
        "carry_since": connection.execute(FIND_CARRIED_SINCE, since).scalar_one(),
        "allow_missing": allow_missing,
        "is_complete": False,
        "confirm": True,
    }
    run = create_run(connection, collection, REINDEX, options=options)
    assert run is not None  # it has no schedule
    swap = _exchange(connection, live, read_generation(row))
    return Rollback(swap.retired, swap.live, run.id)
