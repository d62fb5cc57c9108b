"""Generations: each is built alongside the live one, becomes the live one, is retired, and is finally dropped.

A swap changes the states of both generations and the SQL view in one transaction. Searches read the generation's table
and never wait; a search that has already begun finishes on the old table. Writers of the collection wait while the
transaction lasts. Tables of a retired generation are dropped once nobody uses them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from vectormill.collections.collection import (
    BUILDING,
    LIVE,
    UNSEARCHED_GENERATION_STATES,
    WRITTEN_GENERATION_STATES,
    Generation,
    check_kind,
)
from vectormill.collections.collections import (
    IS_CARRIED_FROM,
    SELECT_GENERATIONS,
    find_building,
    find_generation,
    find_in_state,
    find_locked,
    keeps_texts,
    lock_collection,
    read_generation,
)
from vectormill.collections.generation_tables import (
    attributes_name,
    create_generation,
    filled_names,
    table_name,
)
from vectormill.collections.views import replace_view
from vectormill.db.locks import act_in_short_locks, drop_if_unused, find_row_within
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import Conflict, RowsMissing
from vectormill.jobs.dual_writes import add_missing_twins, cancel_unwanted_jobs, list_without_twin
from vectormill.jobs.job import OPEN_JOB_STATES, RECEIVED_JOB_STATES
from vectormill.jobs.jobs import draw_seq
from vectormill.runs.run import CLAIMED_RUN_STATES, GOOD_RUN_STATES, REINDEX
from vectormill.runs.runs import cancel_run, create_run

# Submissions to the collection wait at most this long for the last twins to end.
DRAIN_SECONDS: Final = 0.5
_DRAIN_PAUSE_SECONDS: Final = 0.02

# This generation may lack rows of jobs with a larger seq than `retired_seq`, which a rollback copies to it: it has been
# retired since then, or the run that should have copied them before was not complete at that moment.
RETIRE_LIVE = text(f"""
    UPDATE vectormill.generations
       SET state = 'retired', retired_at = now(), held_until = NULL,
           report = report || jsonb_build_object('retired_seq', (
               SELECT least(CAST(:seq AS bigint), min(CAST(options ->> 'carry_since' AS bigint)))
                 FROM vectormill.runs
                WHERE collection_id = generations.collection_id AND state NOT IN {GOOD_RUN_STATES}
                  AND CAST(options ->> 'carry_to' AS bigint) = generations.id
                  AND created_at >= generations.live_at))
     WHERE id = :generation_id AND state = 'live'
""")

MAKE_LIVE = text("""
    UPDATE vectormill.generations
       SET state = 'live', live_at = now(), retired_at = NULL,
           report = report || jsonb_build_object('live_seq', CAST(:seq AS bigint))
     WHERE id = :generation_id
""")

# Once an original job has ended, its client was told that its items are searchable, so its twin must have ended too. An
# original whose row is gone had ended.
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

FIND_LATEST_RETIRED = text(f"""{SELECT_GENERATIONS}
     WHERE collections.name = :name AND generations.state = 'retired' AND generations.live_at IS NOT NULL
     ORDER BY generations.retired_at DESC, generations.id DESC LIMIT 1
""")

IS_RUNNING = text(f"""
    SELECT id FROM vectormill.runs
     WHERE collection_id = :collection_id AND state IN {CLAIMED_RUN_STATES} AND NOT options ? 'carry_from'
     LIMIT 1
""")

# The live generation's live_seq is only the fallback, for generations that an earlier release retired: a third
# generation may have been live between the two.
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

LIST_OPEN_CARRIES = text("""
    SELECT id FROM vectormill.runs
     WHERE collection_id = :collection_id AND finished_at IS NULL AND options ? 'carry_from'
""")


@dataclass(frozen=True, slots=True)
class Swap:
    """The result of a swap: the generation that was live before, and the one that is live now."""

    retired: Generation
    live: Generation


@dataclass(frozen=True, slots=True)
class Rollback(Swap):
    """A swap back to the previous generation, and the run that copies newer rows into it."""

    run_id: UUID


@dataclass(frozen=True, slots=True)
class NewerRows:
    """The number of rows that were written since the live generation became live, which the retired one lacks.

    `num_missing` of them have no kept text, so a rollback cannot encode them again.
    """

    num_rows: int
    num_missing: int


NOTHING_NEWER: Final = NewerRows(0, 0)


def list_lagging_twins(connection: Connection, generation_id: int) -> set[UUID]:
    """Return the ids of twin jobs that have not ended although their original has."""
    return set(connection.execute(LIST_LAGGING_TWINS, {"generation_id": generation_id}).scalars())


def hold_back_jobs(connection: Connection, building: Generation, seconds: float) -> None:
    """Stop dispatching chunks of the live generation's jobs for `seconds`, so that no job ends before its twin.

    New jobs are still accepted; they wait.
    """
    connection.execute(HOLD_BACK, {"collection_id": building.collection_id, "seconds": float(seconds)})


def swap_generations(
    connection: Connection, building_id: int, wait: Callable[[float], None] = time.sleep
) -> Swap | None:
    """Make a generation live that was being built; do nothing if it is live already.

    Return None if jobs have no twin yet or twins lag behind, so that the caller tries again. Call in a transaction with
    short lock time-outs. Raise Conflict if the generation was discarded, SwapRefused if the view cannot be replaced.
    """
    building = find_locked(connection, building_id)
    if building is None or building.state not in WRITTEN_GENERATION_STATES:
        raise Conflict(f"Generation {building_id} was discarded meanwhile, so it does not become live.")
    if building.state == LIVE:
        return Swap(building, building)
    live = find_in_state(connection, building.collection, LIVE)
    assert live is not None  # a collection has a live generation from its creation on
    if list_without_twin(connection, building_id):
        return None
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
    # This comes last because users' queries of the view wait from here until COMMIT.
    replace_view(connection, next_live)
    return Swap(live, next_live)


def count_newer_rows(
    connection: Connection, collection: str, timeout_seconds: float = 30.0
) -> NewerRows | None:
    """Count the rows that a rollback has to copy into the retired generation.

    Reads all rows; return None if that takes longer than `timeout_seconds`. Raise CollectionNotFound.
    """
    live = find_generation(connection, collection)
    retired_seq = connection.execute(FIND_RETIRED_SEQ, {"live_id": live.id}).scalar_one()
    statement = COUNT_NEWER_ROWS.format(table=table_name(live.id), attributes=attributes_name(live.id))
    row = find_row_within(connection, timeout_seconds, text(statement), {"retired_seq": retired_seq})
    return None if row is None else NewerRows(row.num_rows, row.num_missing)


def refuse_missing(connection: Connection, live: Generation, newer: NewerRows | None) -> None:
    """Raise RowsMissing if a rollback would lose rows, as their texts are not kept.

    `newer` is None if they could not be counted in time: then raise it unless the collection keeps texts.
    """
    if newer is None:
        if keeps_texts(connection, live.collection_id):
            return
        said = "the texts of rows put"
    elif newer.num_missing == 0:
        return
    elif newer.num_missing == 1:
        said = "the text of 1 row put"
    else:
        said = f"the texts of {newer.num_missing:,} rows put"
    raise RowsMissing(
        f"Collection {live.collection!r} does not keep {said} since its generation became live. A rollback cannot "
        "encode them again, and would lose those that no job still has. Nothing was changed; to roll back "
        "anyway, set allow_missing."
    )


def roll_back(
    connection: Connection,
    collection: str,
    *,
    newer: NewerRows | None = NOTHING_NEWER,
    allow_missing: bool = False,
) -> Rollback:
    """Make the previously live generation live again, retire the live one, and queue a run that copies newer rows.

    Call in a transaction with short lock time-outs. `newer` is the result of `count_newer_rows`. With `allow_missing`
    the run takes texts that are not kept from jobs that still have them; else raise RowsMissing if there are such rows.
    Raise CollectionNotFound, Conflict and SwapRefused.
    """
    of_collection = {"collection_id": find_generation(connection, collection).collection_id}
    # Runs are locked before the collection, in the same order as an indexer locks them.
    for carry_id in connection.execute(LIST_OPEN_CARRIES, of_collection).scalars().all():
        cancel_run(connection, carry_id)
    lock_collection(connection, collection)
    live = find_generation(connection, collection)
    run_id = connection.execute(IS_RUNNING, of_collection).scalar_one_or_none()
    if run_id is not None:
        raise Conflict(
            f"Run {run_id} is working on collection {collection!r}; cancel it or wait until it ends, then roll back."
        )
    row = connection.execute(FIND_LATEST_RETIRED, {"name": collection}).one_or_none()
    if row is None:
        raise Conflict(
            f"Collection {collection!r} has no generation to roll back to: it never had another, or its retired ones "
            "were removed after VECTORMILL_RETIRED_GENERATION_DAYS."
        )
    if not allow_missing:
        refuse_missing(connection, live, newer)
    options = {
        "carry_from": live.id,
        "carry_to": row.id,
        "carry_since": connection.execute(FIND_RETIRED_SEQ, {"live_id": live.id}).scalar_one(),
        "allow_missing": allow_missing,
        "is_complete": False,
        "confirm": True,
    }
    run = create_run(connection, collection, REINDEX, options=options)
    assert run is not None  # create_run returns None only for a run of a schedule
    swap = _exchange(connection, live, read_generation(row))
    return Rollback(swap.retired, swap.live, run.id)


# The key in a generation's report of the seq at which its build began: jobs with a larger one came later.
SINCE_SEQ: Final = "since_seq"


# live_at becomes NULL because only a generation with a live_at can be rolled back to.
GIVE_UP_GENERATION = text(f"""
    UPDATE vectormill.generations SET state = 'retired', retired_at = now(), live_at = NULL
     WHERE id = :generation_id AND state IN {UNSEARCHED_GENERATION_STATES}
""")


_HAS_FAILED: Final = "generations.report -> 'canary' ->> 'is_good' IS NOT DISTINCT FROM 'false'"

HAS_FAILED = text(f"SELECT {_HAS_FAILED} FROM vectormill.generations WHERE id = :generation_id")


# A build whose last run failed is kept this long for another run to resume, since encoding may have taken days.
KEPT_BUILD_SECONDS: Final = 3 * 86400.0


# The next run can resume a build whose last run failed recently, unless its canary failed too.
IS_WORTH_KEEPING = text(f"""
    SELECT NOT {_HAS_FAILED} AND last.state = 'failed'
           AND last.finished_at > now() - make_interval(secs => CAST(:kept_seconds AS double precision))
      FROM vectormill.generations
      JOIN LATERAL (SELECT state, finished_at FROM vectormill.runs
                     WHERE runs.collection_id = generations.collection_id
                       AND runs.generation_id = generations.id
                     ORDER BY created_at DESC LIMIT 1) AS last ON true
     WHERE generations.id = :generation_id
""")


def open_building_generation(connection: Connection, collection: str, spec: EncodingSpec) -> Generation:
    """Return the generation of this spec that is being built alongside the live one; begin it if there is none.

    An unfinished generation of another vector space is discarded, since two are never built at once; so is one whose
    canary failed. Jobs that are queued after this transaction's COMMIT get twins; for earlier jobs see
    `add_missing_twins`. Raise CollectionNotFound, and WrongKind for a spec of another kind than the live one's.
    """
    lock_collection(connection, collection)
    live = find_generation(connection, collection)
    check_kind(collection, live.kind, spec)
    building = find_building(connection, collection)
    if building is not None:
        has_failed = connection.execute(HAS_FAILED, {"generation_id": building.id}).scalar_one()
        if building.spec.builds_as(spec) and not has_failed:
            return building
        connection.execute(GIVE_UP_GENERATION, {"generation_id": building.id})
    report = {SINCE_SEQ: draw_seq(connection)}
    return create_generation(connection, live.collection_id, collection, spec, BUILDING, report)


def open_target_generation(
    engine: Engine, collection: str, spec: EncodingSpec | None, **patience: Any
) -> Generation:
    """Return the generation that a run for this spec writes: the live one if the spec is None or of its vector space.

    Otherwise it is the one being built alongside it, with twins for jobs that were already open. If the live one is the
    target, an unfinished generation of an earlier run is discarded unless it is worth keeping. `patience` is passed to
    `act_in_short_locks`.
    """

    def open_target(connection: Connection) -> Generation:
        live = find_generation(connection, collection)
        if spec is not None and not live.spec.builds_as(spec):
            return open_building_generation(connection, collection, spec)
        if find_building(connection, collection) is None:
            return live
        lock_collection(connection, collection)
        building = find_building(connection, collection)
        if building is not None:
            values = {"generation_id": building.id, "kept_seconds": KEPT_BUILD_SECONDS}
            if not connection.execute(IS_WORTH_KEEPING, values).scalar_one_or_none():
                connection.execute(GIVE_UP_GENERATION, values)
        return live

    target = act_in_short_locks(engine, open_target, **patience)
    if target.state == BUILDING:
        add_missing_twins(engine, target, with_done=False)
    return target


def discard_generation(connection: Connection, generation_id: int) -> Generation:
    """Discard a generation that is being built or retired, so that nobody can swap or roll back to it.

    The scheduler soon ends its jobs and drops its tables. Raise Conflict if it is live or does not exist.
    """
    generation = find_locked(connection, generation_id)
    if generation is None or generation.state not in UNSEARCHED_GENERATION_STATES:
        state = "no longer exists" if generation is None else f"is {generation.state}"
        raise Conflict(
            f"Generation {generation_id} {state}; only a generation that is being built or retired can be discarded."
        )
    connection.execute(GIVE_UP_GENERATION, {"generation_id": generation_id})
    return generation


# A search or page of an export that found the generation while it was live has ended by then.
GRACE_SECONDS: Final = 300.0


# A discarded generation (live_at is NULL) is dropped at once, a retired one after its retention; neither is dropped
# while a job or a run writes it.
LIST_PRUNABLE = text(f"""{SELECT_GENERATIONS}
     WHERE generations.state = 'retired'
       AND (generations.live_at IS NULL
            OR generations.retired_at < now() - make_interval(secs => CAST(:seconds AS double precision)))
       AND NOT EXISTS (
           SELECT 1 FROM vectormill.jobs
            WHERE jobs.generation_id = generations.id
              AND jobs.state IN {OPEN_JOB_STATES})
       AND NOT EXISTS (
           SELECT 1 FROM vectormill.runs
            WHERE runs.generation_id = generations.id AND runs.state IN {CLAIMED_RUN_STATES})
       AND NOT {IS_CARRIED_FROM}
       AND generations.id = coalesce(CAST(:generation_id AS bigint), generations.id)
     ORDER BY generations.id LIMIT 100
""")


MARK_PRUNED = text("UPDATE vectormill.generations SET state = 'pruned' WHERE id = :generation_id")


def prune_retired_generations(engine: Engine, retention_seconds: float) -> int:
    """Drop the tables of discarded generations, and of those retired for `retention_seconds`. Return their number.

    A generation whose tables are in use is left for the next call.
    """
    cancel_unwanted_jobs(engine)
    seconds = max(retention_seconds, GRACE_SECONDS)
    with engine.connect() as connection:
        prunable = connection.execute(LIST_PRUNABLE, {"seconds": seconds, "generation_id": None}).all()

    def drop(connection: Connection, generation_id: int, collection: str) -> int:
        lock_collection(connection, collection)
        values = {"generation_id": generation_id, "seconds": seconds}
        if connection.execute(LIST_PRUNABLE, values).one_or_none() is None:
            return 0  # a rollback has just made it live again
        connection.execute(MARK_PRUNED, values)
        names = attributes_name(generation_id), table_name(generation_id), *filled_names(generation_id)
        for table in names:
            connection.execute(text(f"DROP TABLE IF EXISTS vectormill.{table}"))
        return 1

    return sum(
        drop_if_unused(
            engine, partial(drop, generation_id=row.id, collection=row.name), f"Generation {row.id}"
        )
        for row in prunable
    )
