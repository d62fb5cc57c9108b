"""Stage: the database and the scheduler on which one interleaving after the other is played, each made by a seed.

Knows nothing of what is played: a scene sets up its world, casts its actors, and says what must be so at the end.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from random import Random, SystemRandom
from typing import Protocol
from unittest.mock import patch
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import Engine

from tests.integration.interleavings.steps import Actor, BrokenCommit, StepScheduler
from tests.statements import watch
from vectormill.db.session import make_engine

# Statistics and the place of a row must be the same whenever a seed is played.
STEADY = """
    ALTER TABLE vectormill.jobs SET (autovacuum_enabled = false);
    ALTER TABLE vectormill.chunks SET (autovacuum_enabled = false);
    DO $$ BEGIN
        EXECUTE format('ALTER DATABASE %I SET deadlock_timeout = ''20ms''', current_database());
    END $$;
"""
EMPTY = """
    TRUNCATE vectormill.jobs, vectormill.chunk_payloads, vectormill.chunk_vectors, vectormill.chunk_truncations,
             vectormill.removed_chunks, vectormill.collections RESTART IDENTITY CASCADE;
    DO $$ DECLARE made regclass; BEGIN
        FOR made IN
            SELECT oid FROM pg_class
             WHERE relname ~ '^(generation_[0-9]+(_fill)?(_attributes)?|run_[0-9a-f]{32}_[a-z]+)$' AND relkind = 'r'
        LOOP
            EXECUTE format('DROP TABLE %s CASCADE', made);
        END LOOP;
    END $$;
"""

# Where ids are drawn by which rows are ordered or locked.
IDS = (
    "vectormill.jobs.upload.uuid4",
    "vectormill.jobs.dual_writes.uuid4",
    "vectormill.runs.runs.uuid4",
    "indexer.reindexing.uuid4",
)

Role = tuple[str, Callable[[], None]]


class Scene(Protocol):
    """One world, from its beginning to its end. Everything in it is decided by the random numbers that made it."""

    def noting(self) -> AbstractContextManager[None]:
        """What is patched while it is played."""
        ...

    def set_up(self) -> None: ...

    def cast(self) -> list[Actor]:
        """The actors of the next round."""
        ...

    def look(self) -> None:
        """Called after every COMMIT."""
        ...

    def finish(self) -> None: ...


class Stage:
    """Plays scenes; `make_scene` is given the engine that is watched, and the random numbers of the seed."""

    def __init__(
        self, url: str, admin_url: str, make_scene: Callable[[Engine, Random], Scene], num_rounds: int
    ) -> None:
        self._observer = psycopg.connect(admin_url.replace("+psycopg", ""), autocommit=True)
        self._observer.execute(STEADY)
        self._scheduler = StepScheduler(self._observer)
        self._engine = make_engine(url, application_name="interleavings", pool_size=5)
        self._make_scene = make_scene
        self._num_rounds = num_rounds
        watch(self._engine, self._scheduler)

    def play(self, seed: int) -> list[str]:
        """The world of a seed, from its beginning to its end; the steps that were taken in it."""
        random = Random(seed)
        self._observer.execute(EMPTY)
        scene = self._make_scene(self._engine, random)
        trace: list[str] = []
        try:
            with drawing_ids(random), scene.noting():
                scene.set_up()
                scene.look()
                for number in range(self._num_rounds):
                    actors = scene.cast()
                    trace.append(f"-- round {number}")
                    self._scheduler.run(actors, random, scene.look, trace)
                trace.append("-- the end")
                scene.finish()
        except BaseException as error:
            error.add_note("\n".join([f"Replay with --interleavings 1 --first-seed {seed}", *trace]))
            raise
        return trace

    def play_many(self, config: pytest.Config, default_worlds: int) -> None:
        """As many worlds as the command line says, or so many; new ones in every run unless it names the first."""
        num_worlds, first_seed = config.getoption("interleavings"), config.getoption("first_seed")
        first_seed = SystemRandom().randrange(1 << 32) if first_seed is None else first_seed
        for seed in range(first_seed, first_seed + (num_worlds or default_worlds)):
            self.play(seed)

    def close(self) -> None:
        self._engine.dispose()
        self._observer.close()


@contextmanager
def drawing_ids(random: Random) -> Iterator[None]:
    with ExitStack() as patches:
        for name in IDS:
            patches.enter_context(patch(name, lambda: UUID(int=random.getrandbits(128), version=4)))
        yield


def choose_actors(roles: list[Role], random: Random) -> list[Actor]:
    """Two or three of these; the connection of one in three breaks at a COMMIT."""
    return [
        Actor(f"{number} {name}", act, broken_commit=_break_a_commit(random))
        for number, (name, act) in enumerate(random.sample(roles, random.choice([2, 2, 3])))
    ]


def _break_a_commit(random: Random) -> BrokenCommit | None:
    if random.random() < 0.7:
        return None
    return BrokenCommit(random.choice([1, 1, 2, 3]), arrives=random.random() < 0.8)
