"""Writers of one collection that overlap, statement by statement, while its model is changed, rolled back and given up.

Whatever the order, the live generation has in the end the newest write of each key, and no row is ever seen that nobody
wrote there: see docs/decisions/0041-the-newest-write-wins.md.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from random import Random

import pytest
from sqlalchemy import Engine, text

from tests.database import ask, load_payload
from tests.integration.interleavings.collection_world import (
    LIST_OPEN_JOBS,
    LIST_OPEN_RUNS,
    NAMES,
    CollectionWorld,
)
from tests.integration.interleavings.stage import Role, Stage, choose_actors
from tests.integration.interleavings.steps import Actor
from tests.integration.interleavings.world import repair
from tests.integration.order.ledger import Ledger
from tests.kept_rows import KeptRow, read_rows
from tests.protocol import claim, complete, dispatch_all, fail_faulty
from vectormill.collections.collections import find_generation
from vectormill.domain.errors import Conflict, LeaseLost
from vectormill.jobs.jobs import resume_job
from vectormill.runs.run import COMPLETED, COMPLETED_WITH_ERRORS

ROUNDS = 5
# Some seconds on an idle machine.
WORLDS, MANY_WORLDS = 5, 150

LIST_GENERATIONS = text("SELECT id, state FROM vectormill.generations WHERE state <> 'pruned' ORDER BY id")
LIST_BURIED = text("SELECT key, seq FROM vectormill.tombstones")
LIST_RUNS = text("SELECT id, state, error FROM vectormill.runs")
EXPIRE_RUNS = text("""
    UPDATE vectormill.runs SET lease_until = now(), available_at = now() WHERE finished_at IS NULL
""")


class Collection:
    """A collection, and all who write it: see Scene."""

    def __init__(self, engine: Engine, random: Random) -> None:
        self.engine, self.random = engine, random
        self.world = CollectionWorld(engine, random)
        self._last: dict[int, dict[str, KeptRow]] = {}
        self._last_states: dict[int, str] = {}

    def noting(self) -> AbstractContextManager[None]:
        return self.world.noting()

    def set_up(self) -> None:
        """Jobs are open, some held by workers, and a run may be at work; the model may have been changed already."""
        world, random = self.world, self.random
        world.make_collection()
        for _ in range(random.randint(1, 3)):
            world.submit()
            for _ in range(random.randint(0, 3)):
                random.choice([world.take, world.take, world.hold_one])()
        for _ in range(random.choice([0, 1, 1, 2])):
            world.begin_run()
            self.expire_runs()
            world.carry_out(random.choice([3, 10, 60]), 30.0)

    def cast(self) -> list[Actor]:
        self.expire_runs()
        world = self.world
        world.hold_one()
        roles: list[Role] = [
            *2 * [("submit", world.submit)],
            ("put", world.put),
            *2 * [("delete", world.delete)],
            *2 * [("worker", world.take)],
            *3 * [("holder", world.commit_older)],
            *5 * [("indexer", world.carry_on)],
            *3 * [("begin", world.begin_run)],
            *2 * [("rollback", world.roll_back)],
            ("cancel run", world.cancel_run),
            ("give up", world.give_up),
            ("pruner", world.prune),
            ("cancel", world.cancel),
            ("pause", world.pause),
            ("resume", world.resume),
        ]
        return choose_actors(roles, self.random)

    def look(self) -> None:
        """No row is of two writers or of nobody, or older than one before it, and none vanishes without a word."""
        with self.engine.connect() as connection:
            states = {row.id: row.state for row in connection.execute(LIST_GENERATIONS)}
            buried = {row.key: row.seq for row in connection.execute(LIST_BURIED)}
            now = {generation_id: read_rows(connection, generation_id) for generation_id in states}
        for generation_id, rows in now.items():
            said = f"of generation {generation_id}, {states[generation_id]}"
            for key, row in rows.items():
                written = self.world.notes.contents.get((key, row.place))
                assert written == row.content, (
                    f"{key} {said} is {row}, and {written} was written in its place"
                )
                assert row.place >= buried.get(key, -1), f"{key} {said} was deleted in {buried[key]}: {row}"
            for key, last in self._last.get(generation_id, {}).items():
                if key in rows:
                    assert rows[key].place >= last.place, f"{key} {said} was {last} and is {rows[key]}"
                elif self._last_states[generation_id] != "building":  # from which a run removes rows alone
                    assert buried.get(key, -1) >= last.place, f"{key} {said} was {last} and vanished"
        self._last, self._last_states = now, states

    def finish(self) -> None:
        """All goes on to its end; then the newest write of each key is there, and after a rollback too."""
        self.settle()
        if self.random.random() < 0.5:
            self.world.roll_back()
            self.settle()

    def settle(self) -> None:
        for _ in range(200):
            self.expire_runs()
            for job_id in self.world.list(LIST_OPEN_JOBS):
                with suppress(Conflict):
                    ask(self.engine, resume_job, job_id)
            repair(self.engine)
            self.commit_all()
            self.world.carry_out(60, 30.0)
            self.world.prune()
            self.look()
            if not self.world.list(LIST_OPEN_JOBS) and not self.world.list(LIST_OPEN_RUNS):
                break
        else:
            raise AssertionError("there is always something to do")
        with self.engine.connect() as connection:
            live = find_generation(connection, "docs")
            found = {key: row.content for key, row in read_rows(connection, live.id).items()}
        ledger = self.expect()
        for key in NAMES:
            allowed = ledger.allowed(key)
            assert found.get(key) in allowed, (
                f"{key} of the live generation {live.id} is {found.get(key)} and not of {allowed}; "
                f"{sorted(ledger.writes.get(key, []), key=lambda write: write.place)}"
            )

    def commit_all(self) -> None:
        for dispatch in dispatch_all(self.engine):
            claimed = claim(self.engine, dispatch.chunk_id)
            if claimed is not None:
                items = ask(self.engine, load_payload, claimed.chunk_id)
                wanted = claimed.wanted_items(0, claimed.num_items)
                failures = fail_faulty(items, range(len(items)) if wanted is None else wanted)
                with suppress(LeaseLost):
                    complete(self.engine, claimed, failures)

    def expire_runs(self) -> None:
        with self.engine.begin() as connection:
            connection.execute(EXPIRE_RUNS)

    def expect(self) -> Ledger:
        """What was written for the live generation.

        A build from a source that clients know nothing of may leave out what is older than the source.
        """
        notes = self.world.notes
        with self.engine.connect() as connection:
            ended = {row.id: row for row in connection.execute(LIST_RUNS)}
        for row in ended.values():
            may_fail = notes.has_given_up and row.id in notes.runs
            assert row.state != "failed" or may_fail, f"run {row.id} failed: {row.error}"
        newest_build = max((run.seq or 0 for run in notes.runs.values() if run.is_build), default=0)
        ledger = Ledger()
        for key, writes in notes.writes.writes.items():
            for write in writes:
                is_doubtful = write.place in notes.doubtful_places or write.place < newest_build
                ledger.put(key, replace(write, is_certain=write.is_certain and not is_doubtful))
        for run_id, run in notes.runs.items():
            state = ended[run_id].state if run_id in ended else None  # its COMMIT has not come about
            is_done = state in (COMPLETED, COMPLETED_WITH_ERRORS) and not run.is_build
            for key, write in run.staged.items():
                ledger.put(key, replace(write, is_certain=is_done and write.place > newest_build))
        return ledger


@pytest.fixture
def stage(database_url: str, admin_url: str) -> Iterator[Stage]:
    stage = Stage(database_url, admin_url, Collection, ROUNDS)
    yield stage
    stage.close()


@pytest.mark.timeout(300)
def test_the_newest_write_wins_however_transactions_overlap(
    stage: Stage, pytestconfig: pytest.Config
) -> None:
    stage.play_many(pytestconfig, WORLDS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_newest_write_wins_in_many_more_worlds(stage: Stage, pytestconfig: pytest.Config) -> None:
    stage.play_many(pytestconfig, MANY_WORLDS)


def test_the_same_seed_takes_the_same_steps(stage: Stage) -> None:
    assert stage.play(3) == stage.play(3)
