"""Dual writes: twins of a collection's jobs write the same items into a generation that is being built.

A twin is a job like any other, with the spec of the building generation. In the order of writers it has the
position of its original, however many twins there are: see docs/decisions/0041-the-newest-write-wins.md.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Final
from uuid import UUID, uuid4

from sqlalchemy import Connection, Engine, text

from vectormill.collections.collection import WRITTEN_GENERATION_STATES, Generation
from vectormill.collections.collections import (
    IS_CARRIED_FROM,
    find_building,
    find_generation_by_id,
    share_collection,
)
from vectormill.db.parameters import to_jsonb
from vectormill.domain.errors import JobNotFound, WrongJobState
from vectormill.jobs.job import FINISHED_JOB_STATES, STEERABLE_JOB_STATES, UNWANTED_JOB_STATES, Job
from vectormill.jobs.jobs import cancel_job, lock_job
from vectormill.jobs.transitions import COPY_CHUNKS, INSERT_TWIN, WAKE_DISPATCHER
from vectormill.runs.run import OPEN_RUN_STATES

# Jobs of the generation `former_id` are to be written to the generation `id` too: those that are open, and ended ones
# after `seq`. A generation that is being built gets the jobs of the live one since it was begun.
# After a rollback the live one gets the open jobs of the one before, and ended ones only if its run may take texts.
_COPYING = f"""
    (SELECT next.id, live.id, CAST(next.report ->> 'since_seq' AS bigint)
       FROM vectormill.generations AS next
       JOIN vectormill.generations AS live ON live.collection_id = next.collection_id AND live.state = 'live'
      WHERE next.state = 'building'
      UNION ALL
     SELECT live.id, CAST(options ->> 'carry_from' AS bigint),
            CASE WHEN CAST(options ->> 'allow_missing' AS boolean) THEN CAST(options ->> 'carry_since' AS bigint) END
       FROM vectormill.runs
       JOIN vectormill.generations AS live ON live.collection_id = runs.collection_id AND live.state = 'live'
      WHERE runs.state IN {OPEN_RUN_STATES} AND live.id <> CAST(options ->> 'carry_from' AS bigint)
    ) AS next (id, former_id, seq)
"""

_HAS_NO_TWIN = """
    NOT EXISTS (SELECT 1 FROM vectormill.jobs AS twin WHERE twin.twin_of = jobs.id AND twin.generation_id = next.id)
    AND NOT EXISTS (SELECT 1 FROM vectormill.runs WHERE runs.job_id = jobs.id)
    AND NOT EXISTS (SELECT 1 FROM vectormill.jobs AS original
                     WHERE original.id = jobs.twin_of AND original.generation_id = next.id)
"""

FIND_FORMER = text(f"SELECT former_id, seq FROM {_COPYING} WHERE id = :generation_id")

# These are jobs that have not ended, and jobs that ended since the generation was begun. Cancelled jobs add
# nothing. With the numbers as parameters the planner knows that few jobs are newer.
LIST_WITHOUT_TWIN = text(f"""
    SELECT jobs.id
      FROM (SELECT CAST(:generation_id AS bigint) AS id) AS next, vectormill.jobs
     WHERE jobs.generation_id = :former_id
       AND (jobs.state IN {STEERABLE_JOB_STATES}
            OR (jobs.seq > CAST(:seq AS bigint) AND jobs.state IN {FINISHED_JOB_STATES}))
       AND {_HAS_NO_TWIN}
     ORDER BY jobs.seq
""")

# True of an ended job that a run has yet to copy.
OWES_TWIN = f"""
    jobs.state IN {FINISHED_JOB_STATES} AND EXISTS (
        SELECT 1 FROM {_COPYING} WHERE next.former_id = jobs.generation_id AND next.seq < jobs.seq AND {_HAS_NO_TWIN})
"""

HAS_TWIN = text("""
    SELECT EXISTS (SELECT 1 FROM vectormill.jobs WHERE twin_of = :job_id AND generation_id = :generation_id)
""")


# Copies of more chunks are left to the run that builds the generation: of texts of usual length these have 20 MB, and
# their client waits for some tenths of a second.
MOST_CHUNKS: Final = 1000


def add_twin(connection: Connection, job_id: UUID, num_chunks: int, generation: Generation) -> None:
    """Queue the twin of a job whose chunks are written, if a generation is being built alongside `generation`.

    Call this in the transaction that queues the job. It holds a shared lock on the collection's name, so that
    a generation is begun either before or after it. A job of many chunks gets its twin from
    `add_missing_twins`, without which no generation is swapped.
    """
    building = find_building(connection, generation.collection) if num_chunks <= MOST_CHUNKS else None
    if building is not None:
        _insert_twin(connection, job_id, building, with_done=True)


def _insert_twin(connection: Connection, job_id: UUID, building: Generation, *, with_done: bool) -> None:
    values = {
        "job_id": job_id,
        "with_done": with_done,
        "twin_id": uuid4(),
        "model": building.spec.model,
        "spec": to_jsonb(building.spec.to_json()),
        "generation_id": building.id,
    }
    if connection.execute(INSERT_TWIN, values).one_or_none() is not None:
        connection.execute(COPY_CHUNKS, values)
        connection.execute(WAKE_DISPATCHER)


def list_without_twin(connection: Connection, generation_id: int) -> list[UUID]:
    """Return the jobs that are to be written to this generation too, and have no twin yet.

    They write the generation that is live while this one is being built, or the one that a rollback left: those that
    are open, and those that have ended since the generation was begun, or which a rollback may copy.
    """
    found: list[UUID] = []
    for row in connection.execute(FIND_FORMER, {"generation_id": generation_id}).all():
        values = {"generation_id": generation_id, "former_id": row.former_id, "seq": row.seq}
        found += connection.execute(LIST_WITHOUT_TWIN, values).scalars()
    return found


def add_missing_twins(engine: Engine, building: Generation, *, with_done: bool = True) -> None:
    """Add twins for the jobs that `list_without_twin` returns, each in a separate transaction.

    Without `with_done`, the twins lack the chunks that are done: for a run that has yet to read what they wrote. If its
    source does not have it, such a chunk would bring back a text that may be older than the one in the live generation.
    """
    with engine.connect() as connection:
        job_ids = list_without_twin(connection, building.id)
    for job_id in job_ids:
        with engine.begin() as connection:
            share_collection(connection, building.collection)
            lock_job(connection, job_id)  # so that none of the job's chunks is split meanwhile
            now = find_generation_by_id(connection, building.id)
            has_twin = connection.execute(HAS_TWIN, {"job_id": job_id, "generation_id": building.id})
            if now is not None and now.state in WRITTEN_GENERATION_STATES and not has_twin.scalar_one():
                _insert_twin(connection, job_id, building, with_done=with_done)


LIST_TWINS = text("SELECT id FROM vectormill.jobs WHERE twin_of = :job_id ORDER BY seq")

JobChange = Callable[[Connection, UUID], Job]


def change_twins(engine: Engine, change: JobChange, job_id: UUID) -> None:
    """Apply an action that a client requested for a job, such as a pause, to its twins.

    Each twin has its own transaction, after that of the job, because no transaction locks two jobs. A
    twin whose state does not allow the action is skipped: it has ended, or has no failed items.
    """
    with engine.connect() as connection:
        twins = list(connection.execute(LIST_TWINS, {"job_id": job_id}).scalars())
    for twin in twins:
        with suppress(JobNotFound, WrongJobState), engine.begin() as connection:
            change(connection, twin)


# These are twins that the API did not reach after it had cancelled their original, and open jobs of a
# discarded generation. If an original was cancelled because its generation was discarded, and not by a
# client, its twins go on. Of the open twins, a thousand around a random place are looked at: of more, each has its
# turn within minutes.
LIST_UNWANTED_JOBS = text(f"""
    WITH middle AS MATERIALIZED (SELECT gen_random_uuid() AS id)
    SELECT job.id
      FROM vectormill.generations JOIN vectormill.jobs AS job ON job.generation_id = generations.id
     WHERE job.state IN {STEERABLE_JOB_STATES}
       AND generations.state = 'retired' AND generations.live_at IS NULL AND NOT {IS_CARRIED_FROM}
     UNION
    SELECT twin.id
      FROM ((SELECT id, twin_of, generation_id FROM vectormill.jobs
              WHERE twin_of >= (SELECT id FROM middle) AND state IN {STEERABLE_JOB_STATES}
              ORDER BY twin_of LIMIT 500)
             UNION ALL
            (SELECT id, twin_of, generation_id FROM vectormill.jobs
              WHERE twin_of < (SELECT id FROM middle) AND state IN {STEERABLE_JOB_STATES}
              ORDER BY twin_of DESC LIMIT 500)) AS twin
      JOIN vectormill.jobs AS original ON original.id = twin.twin_of
      JOIN vectormill.generations AS former ON former.id = original.generation_id
     WHERE twin.generation_id IS NOT NULL AND original.state IN {UNWANTED_JOB_STATES}
       AND (former.state = 'building' OR former.live_at IS NOT NULL)
     LIMIT 1000
""")


def cancel_unwanted_jobs(engine: Engine) -> int:
    """Cancel twins whose original was cancelled, and jobs of discarded generations.

    Return the number of such jobs.
    """
    with engine.connect() as connection:
        unwanted = list(connection.execute(LIST_UNWANTED_JOBS).scalars())
    for job_id in unwanted:
        with suppress(JobNotFound, WrongJobState), engine.begin() as connection:
            cancel_job(connection, job_id)
    return len(unwanted)
