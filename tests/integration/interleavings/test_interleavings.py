"""Transactions that overlap, statement by statement, on a real Postgres: what no order of whole transactions shows.

A seed makes jobs in some state, two or three actors, their order and their broken connections; the same seed does the
same again. `pytest tests/integration/interleavings --interleavings 5000 --first-seed 0` looks longer.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from random import Random

import pytest
from sqlalchemy import Engine

from tests.integration.interleavings.stage import Role, Stage, choose_actors
from tests.integration.interleavings.steps import Actor
from tests.integration.interleavings.world import World, list_jobs, repair
from tests.promises import Witness, check_items
from tests.protocol import SPEC, check_open_job_counts, complete_on, dispatch_all
from vectormill.jobs.chunks import claim_chunk
from vectormill.jobs.deletion import discard_stale_uploads
from vectormill.jobs.job import PAUSED
from vectormill.jobs.jobs import cancel_job, find_job, pause_job, resume_job

# Actors meet so often in one world: what one meeting leaves behind is where the next one begins.
ROUNDS = 4
# New ones in every run: some 5 s on an idle machine, and 100 before a release.
WORLDS, MANY_WORLDS = 30, 600


class Jobs:
    """Jobs, and all who work on them: see Scene."""

    def __init__(self, engine: Engine, random: Random) -> None:
        self.witness = Witness(engine)
        self.world = World(engine, self.witness, random)

    def noting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def set_up(self) -> None:
        set_up(self.world)

    def cast(self) -> list[Actor]:
        self.world.hold_one()
        return cast_actors(self.world)

    def look(self) -> None:
        self.witness.look()

    def finish(self) -> None:
        finish(self.world)


def set_up(world: World) -> None:
    """Jobs in whatever state: some chunks are queued, claimed, done; a job may be paused or being cancelled."""
    random = world.random
    for _ in range(random.choice([0, 1, 1, 2])):
        assert world.send(world.new_submission())
    if random.random() < 0.8:
        world.dispatch()
    for _ in range(random.choice([0, 1, 1, 2, 3])):
        random.choice([world.take, world.hold_one, world.hold_one])()
    jobs = list_jobs(world.engine)
    if jobs and random.random() < 0.3:
        world.wish(random.choice([pause_job, cancel_job]), random.choice(jobs))


def cast_actors(world: World) -> list[Actor]:
    """Two or three actors. Two may send the same submission: a client that tries again at another API process."""
    random = world.random
    jobs = list_jobs(world.engine)
    roles: list[Role] = [
        *3 * [("worker", world.take)],
        *5 * [("holder", world.go_on)],
        *2 * [("dispatcher", world.dispatch)],
        *2 * [("reaper", world.reap)],
        ("recall", world.recall),
        ("pruner", world.prune),
        *2 * [("forget", world.forget)],
    ]
    if jobs:
        job_id = random.choice(jobs)
        roles += [
            *2 * [("cancel", partial(world.wish, cancel_job, job_id))],
            ("pause", partial(world.wish, pause_job, job_id)),
            ("resume", partial(world.wish, resume_job, job_id)),
            *2 * [("retry", partial(world.retry, job_id))],
            *2 * [("delete", partial(world.delete, job_id))],
        ]
    if random.random() < 0.2 or not jobs:
        submission = world.new_submission()
        roles = [*3 * [("submit", partial(world.submit, submission))], ("pruner", world.prune), *roles[:5]]
    return choose_actors(roles, random)


def finish(world: World) -> None:
    """The faults are over: clients get their answers, honest workers finish what is left, and every item is there."""
    engine, witness = world.engine, world.witness
    with engine.begin() as connection:
        discard_stale_uploads(connection, -1)
    for submission in world.submissions:
        assert world.send(submission), "a client was never answered"
    for job_id in list_jobs(engine):
        with engine.begin() as connection:
            if find_job(connection, job_id).state == PAUSED:
                resume_job(connection, job_id)
    for _ in range(20):
        repair(engine)
        dispatches = dispatch_all(engine)
        for dispatch in dispatches:
            with engine.begin() as connection:
                claimed = claim_chunk(connection, dispatch.chunk_id, "honest", SPEC.model, 30)
                if claimed is not None:
                    complete_on(connection, claimed.claim)
        witness.look()
        if not dispatches:
            break
    for job_id, count in world.num_ended.items():
        assert count <= 1 + witness.retried.get(job_id, 0), (
            "two workers were told that they had ended one job"
        )
    alive = set(list_jobs(engine))
    for job_id in alive & witness.acknowledged.keys():
        items = witness.acknowledged[job_id]
        shared = [item.key for item in items if item.key.startswith("k")]
        check_items(engine, job_id, items, newer_keys=shared)
    check_open_job_counts(engine)


@pytest.fixture
def stage(database_url: str, admin_url: str) -> Iterator[Stage]:
    stage = Stage(database_url, admin_url, Jobs, ROUNDS)
    yield stage
    stage.close()


@pytest.mark.timeout(300)
def test_no_overlap_of_transactions_loses_doubles_or_blocks_anything(
    stage: Stage, pytestconfig: pytest.Config
) -> None:
    stage.play_many(pytestconfig, WORLDS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_overlap_in_many_more_worlds_does_either(stage: Stage, pytestconfig: pytest.Config) -> None:
    stage.play_many(pytestconfig, MANY_WORLDS)


def test_the_same_seed_takes_the_same_steps(stage: Stage) -> None:
    assert stage.play(7) == stage.play(7)
    assert stage.play(8) != stage.play(9)
