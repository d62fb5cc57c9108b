"""Transactions that overlap, statement by statement, on a real Postgres: what no order of whole transactions shows.

A seed makes jobs in some state, two or three actors, their order and their broken connections; the same seed does the
same again. `pytest tests/integration/interleavings --interleavings 5000 --first-seed 0` looks longer.
"""

from collections.abc import Callable, Iterator
from functools import partial
from random import Random, SystemRandom
from unittest.mock import patch
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import Engine, text

from tests.integration.interleavings.steps import Actor, BrokenCommit, StepScheduler
from tests.integration.interleavings.world import World, list_jobs
from tests.promises import Witness, check_items
from tests.protocol import SPEC, complete_on, dispatch_all
from tests.statements import watch
from vectormill.db.chunks.chunks import claim_chunk
from vectormill.db.chunks.rescue import (
    end_cancelled_jobs,
    recall_paused_chunks,
    rescue_expired_chunks,
    rescue_unclaimed_chunks,
)
from vectormill.db.jobs.deletion import discard_stale_uploads
from vectormill.db.jobs.jobs import cancel_job, find_job, pause_job, resume_job
from vectormill.db.session import make_engine
from vectormill.domain.jobs.job import PAUSED

# Actors meet so often in one world: what one meeting leaves behind is where the next one begins.
ROUNDS = 4
# New ones in every run: some 5 s on an idle machine, and 100 before a release.
WORLDS, MANY_WORLDS = 30, 600
# Statistics and the place of a row must be the same whenever a seed is played.
STEADY = """
    ALTER TABLE vectormill.jobs SET (autovacuum_enabled = false);
    ALTER TABLE vectormill.chunks SET (autovacuum_enabled = false);
    DO $$ BEGIN
        EXECUTE format('ALTER DATABASE %I SET deadlock_timeout = ''20ms''', current_database());
    END $$;
"""
EMPTY = """
    TRUNCATE vectormill.jobs, vectormill.collections RESTART IDENTITY CASCADE;
    DO $$ DECLARE generation regclass; BEGIN
        FOR generation IN
            SELECT oid FROM pg_class WHERE relname ~ '^generation_[0-9]+(_attributes)?$' AND relkind = 'r'
        LOOP
            EXECUTE format('DROP TABLE %s CASCADE', generation);
        END LOOP;
    END $$;
"""


Role = tuple[str, Callable[[], None]]


class Stage:
    """The database and the scheduler on which one interleaving after the other is played."""

    def __init__(self, url: str) -> None:
        self.observer = psycopg.connect(url.replace("+psycopg", ""), autocommit=True)
        self.observer.execute(STEADY)
        self.scheduler = StepScheduler(self.observer)
        self.engine = make_engine(url, application_name="interleavings", pool_size=5)
        watch(self.engine, self.scheduler)

    def play(self, seed: int) -> list[str]:
        """The world of a seed, from its beginning to its end; the steps that were taken in it."""
        random = Random(seed)
        self.observer.execute(EMPTY)
        witness = Witness(self.engine)
        world = World(self.engine, witness, random)
        with patch(
            "vectormill.db.jobs.submission.uuid4", lambda: UUID(int=random.getrandbits(128), version=4)
        ):
            set_up(world)
            witness.look()
            trace: list[str] = []
            try:
                for number in range(ROUNDS):
                    world.hold_one()
                    trace.append(f"-- round {number}")
                    self.scheduler.run(cast_actors(world), random, witness.look, trace)
                trace.append("-- the end")
                finish(world)
            except BaseException as error:
                error.add_note("\n".join([f"Replay with --interleavings 1 --first-seed {seed}", *trace]))
                raise
        return trace

    def close(self) -> None:
        self.engine.dispose()
        self.observer.close()


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
    return [
        Actor(f"{number} {name}", act, broken_commit=break_a_commit(random))
        for number, (name, act) in enumerate(random.sample(roles, random.choice([2, 2, 3])))
    ]


def break_a_commit(random: Random) -> BrokenCommit | None:
    if random.random() < 0.7:
        return None
    return BrokenCommit(random.choice([1, 1, 2, 3]), arrives=random.random() < 0.8)


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


def repair(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE vectormill.chunks SET lease_until = now() - interval '1 s' WHERE state = 'leased'")
        )
        rescue_expired_chunks(connection)
        rescue_unclaimed_chunks(connection, timeout_seconds=-1)
        recall_paused_chunks(connection)
        connection.execute(text("UPDATE vectormill.chunks SET available_at = now() WHERE state = 'pending'"))
        end_cancelled_jobs(connection)


@pytest.fixture
def stage(database_url: str) -> Iterator[Stage]:
    stage = Stage(database_url)
    yield stage
    stage.close()


def play_worlds(stage: Stage, config: pytest.Config, default_worlds: int) -> None:
    num_worlds, first_seed = config.getoption("interleavings"), config.getoption("first_seed")
    first_seed = SystemRandom().randrange(1 << 32) if first_seed is None else first_seed
    for seed in range(first_seed, first_seed + (num_worlds or default_worlds)):
        stage.play(seed)


@pytest.mark.timeout(300)
def test_no_overlap_of_transactions_loses_doubles_or_blocks_anything(
    stage: Stage, pytestconfig: pytest.Config
) -> None:
    play_worlds(stage, pytestconfig, WORLDS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_overlap_in_many_more_worlds_does_either(stage: Stage, pytestconfig: pytest.Config) -> None:
    play_worlds(stage, pytestconfig, MANY_WORLDS)


def test_the_same_seed_takes_the_same_steps(stage: Stage) -> None:
    assert stage.play(7) == stage.play(7)
    assert stage.play(8) != stage.play(9)
