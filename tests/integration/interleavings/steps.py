"""StepScheduler: runs several actors on a real Postgres one statement at a time, in an order that a seed decides.

Every actor is a thread that stops before each statement and each COMMIT it sends. One at a time is let go, until it
stops again, ends, or waits in Postgres for a lock (pg_blocking_pids says so); a waiting one goes on by itself when the
lock is free. Between two steps nothing moves, so what is seen then is reproducible. Knows nothing of jobs.
"""

import threading
import time
from collections.abc import Callable, Sequence
from random import Random

import psycopg

from tests.statements import COMMIT, DEADLOCK, Driver

# An actor that has neither stopped nor ended is looked for in pg_blocking_pids so often, and given up after so long.
_LOOK_SECONDS = 0.002
PATIENCE_SECONDS = 60.0

FIND_BLOCKED = "SELECT pid FROM unnest(%s::int[]) AS pid WHERE cardinality(pg_blocking_pids(pid)) > 0"


class Actor:
    """One process of the real system, for as long as it takes to do what `act` does."""

    def __init__(
        self, name: str, act: Callable[[], None], *, broken_commit: "BrokenCommit | None" = None
    ) -> None:
        self.name = name
        self.broken_commit = broken_commit
        self.num_commits = 0
        self.step: str | None = None  # where it stands; None while it is under way
        self.pid = 0
        self.has_begun = self.is_over = False
        self.error: BaseException | None = None
        self.go = threading.Semaphore(0)
        self._act = act

    def run(self) -> None:
        try:
            self._act()
        except BaseException as error:
            self.error = error


class BrokenCommit:
    """At an actor's n-th COMMIT its connection breaks: the answer is lost, or the COMMIT never arrives."""

    def __init__(self, number: int, *, arrives: bool) -> None:
        self.number, self.arrives = number, arrives

    def happen(self, driver: Driver) -> None:
        if self.arrives:
            psycopg.Connection.commit(driver)
        else:
            driver.rollback()
        driver.close()
        raise psycopg.OperationalError("the connection broke at COMMIT, as this test wants it")


class StepScheduler:
    """Watches an engine (tests.statements.watch); `run` once for every set of actors."""

    def __init__(self, observer: Driver) -> None:
        self._observer = observer
        self._changed = threading.Condition()
        self._by_thread: dict[int, Actor] = {}
        self._trace: list[str] = []

    # -- in the actors' threads ---------------------------------------------------------------------------------------

    def before(self, driver: Driver, step: str) -> None:
        actor = self._by_thread.get(threading.get_ident())
        if actor is None:
            return  # the test's own thread
        with self._changed:
            actor.pid, actor.step = driver.info.backend_pid, step
            self._changed.notify_all()
        assert actor.go.acquire(timeout=PATIENCE_SECONDS), "the scheduler has forgotten this actor"
        if step == COMMIT:
            actor.num_commits += 1
            if actor.broken_commit is not None and actor.broken_commit.number == actor.num_commits:
                actor.broken_commit.happen(driver)

    def after_commit(self, driver: Driver) -> None:
        """Nothing: a COMMIT is over when its actor stops again."""

    def _run_actor(self, actor: Actor) -> None:
        self._by_thread[threading.get_ident()] = actor
        actor.run()
        with self._changed:
            del self._by_thread[threading.get_ident()]
            actor.is_over = True
            self._changed.notify_all()

    # -- in the test's thread -----------------------------------------------------------------------------------------

    def run(
        self, actors: Sequence[Actor], random: Random, after_commit: Callable[[], None], trace: list[str]
    ) -> None:
        """Until every actor is over; `after_commit` is called when a COMMIT has come about and nothing moves.

        Who took which step is written to `trace`. An actor's error is raised here, the first if there are several.
        """
        self._trace = trace
        stickiness = random.choice(
            [0.0, 0.5, 0.9]
        )  # long runs of one actor find other faults than a fair mix
        threads = []
        for actor in actors:  # one after the other: who begins first is no accident either
            actor.has_begun = True
            threads.append(
                threading.Thread(target=self._run_actor, args=[actor], name=actor.name, daemon=True)
            )
            threads[-1].start()
            self._wait_until_quiet(actors)
        last: Actor | None = None
        while not all(actor.is_over for actor in actors):
            ready = [actor for actor in actors if actor.step is not None]
            if not ready:  # all wait for one another: Postgres ends one of them
                self._wait_for_any(actors)
                continue
            keep = last in ready and random.random() < stickiness
            last = last if keep else random.choice(ready)
            assert last is not None
            assert last.step is not None
            # Some of the product tries again then, which would hide it.
            assert last.step != DEADLOCK, f"{last.name} and another one waited for each other"
            self._let_go(last)
            self._wait_until_quiet(actors)
            if self._trace[-1].endswith(COMMIT):
                after_commit()
        for thread in threads:
            thread.join()
        for actor in actors:
            if actor.error is not None:
                raise actor.error

    def _let_go(self, actor: Actor) -> None:
        self._trace.append(f"{actor.name}: {actor.step}")
        actor.step = None
        actor.go.release()

    def _wait_until_quiet(self, actors: Sequence[Actor]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        num_sightings = 0  # two: an actor may be let go by another one between two rows of one answer
        while num_sightings < 2:
            with self._changed:
                if self._changed.wait_for(lambda: not _under_way(actors), timeout=_LOOK_SECONDS):
                    return
            pids = {actor.pid for actor in _under_way(actors)}
            blocked = {row[0] for row in self._observer.execute(FIND_BLOCKED, [list(pids)])}
            num_sightings = num_sightings + 1 if pids == blocked else 0
            assert time.monotonic() < deadline, (
                f"{[actor.name for actor in _under_way(actors)]} never stopped"
            )

    def _wait_for_any(self, actors: Sequence[Actor]) -> None:
        waiting = _under_way(actors)
        with self._changed:
            moved = self._changed.wait_for(
                lambda: any(actor.step is not None or actor.is_over for actor in waiting), PATIENCE_SECONDS
            )
        assert moved, f"{[actor.name for actor in waiting]} wait for one another for ever"
        self._wait_until_quiet(actors)


def _under_way(actors: Sequence[Actor]) -> list[Actor]:
    return [actor for actor in actors if actor.step is None and actor.has_begun and not actor.is_over]
