"""SearchPool: a pool of connections and threads for searches alone, so that slow searches block nothing else.

Concurrent searches that differ in little but their vectors are coalesced into one statement: for a few thousand rows,
the overhead of connection, thread, settings and plan is several times the cost of the search.
"""

import asyncio
import math
import threading
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final

import psycopg
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError

from vectormill.coalescer import CallNotStarted, Coalescer
from vectormill.collections.collection import Generation
from vectormill.collections.collections import find_generation
from vectormill.db.session import driver_of
from vectormill.domain.errors import SearchTimeout
from vectormill.search.deadline import Deadline
from vectormill.search.matches import MOST_TOGETHER, SearchWithVector, find_company, find_matches
from vectormill.search.operations import SearchAnswer

# This many searches run at once. Fewer would already keep two cores of Postgres busy.
SEARCH_CONNECTIONS: Final = 3
# Coalesced searches should take at most this long in all, since the first waits for the last. If single searches take
# longer, each call takes an equal share of the waiting ones.
TOGETHER_SECONDS: Final = 0.02
MOST_GENERATIONS: Final = 100
# Cancelling a statement is a message to the server.
CANCEL_SECONDS: Final = 5.0


class GenerationChanged(Exception):
    """The collection has another live generation than the one for which the search was made."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The searches of one request, and the generation for which they were made."""

    generation: Generation
    searches: Sequence[SearchWithVector]
    deadline: Deadline


class Call:
    """A call of find_matches on a thread, until the earliest deadline of its requests."""

    def __init__(self, engine: Engine, together: Sequence[Wanted]) -> None:
        self._engine = engine
        self._generation = together[0].generation
        self._searches = [search for wanted in together for search in wanted.searches]
        self._deadline = min((each.deadline for each in together), key=lambda each: each.seconds_left)
        self._driver: psycopg.Connection[Any] | None = None  # while the call runs
        self._lock = threading.Lock()

    def find(self) -> list[SearchAnswer]:
        """Return the answers of all searches. Raise GenerationChanged, and the errors of `find_matches`."""
        with self._engine.connect() as connection:
            self._driver = driver_of(connection)
            try:
                return find_matches(
                    connection,
                    self._generation,
                    self._searches,
                    self._deadline,
                    partial(self._check, connection),
                )
            finally:
                with self._lock:
                    self._driver = None

    def _check(self, connection: Connection) -> None:
        if find_generation(connection, self._generation.collection) != self._generation:
            raise GenerationChanged

    def stop(self) -> None:
        """End the call and its statement. The lock keeps the connection from serving another call meanwhile."""
        self._deadline.end()
        with self._lock, suppress(psycopg.Error):
            if self._driver is not None:
                self._driver.cancel_safe(timeout=CANCEL_SECONDS)


# The key of searches that can share a statement: the generation's id, and the result of find_company.
Company = tuple[int, Hashable]


class SearchPool:
    """A pool that runs SEARCH_CONNECTIONS statements at once; other searches wait without thread or connection.

    It remembers the live generation of each collection. Each call looks up whether it still is the live one, so a
    search sees every swap that was committed before it came.
    """

    def __init__(self, engine: Engine, max_waiting: int) -> None:
        self._engine = engine
        self._threads = ThreadPoolExecutor(SEARCH_CONNECTIONS, thread_name_prefix="searches")
        self._coalescer: Coalescer[Company, Wanted, list[SearchAnswer]] = Coalescer(
            self._run,
            max_waiting=max_waiting,
            max_running=SEARCH_CONNECTIONS,
            count=self._count_together,
            is_of_one=lambda error: not isinstance(error, GenerationChanged | OperationalError),
            abandons=True,
        )
        self._generations: dict[str, Generation] = {}  # by collection, as last looked up
        self.seconds_each: dict[int, float] = {}  # by generation: of one search in the last call

    async def find_generation(self, name: str, *, afresh: bool = False) -> Generation:
        """Return the live generation of a collection, unless `afresh` the remembered one. Raise CollectionNotFound."""
        if afresh or name not in self._generations:
            self._generations.pop(name, None)
            keep(self._generations, name, await run_in_threadpool(self._look_up, name))
        return self._generations[name]

    async def find(
        self, generation: Generation, searches: Sequence[SearchWithVector], deadline: Deadline
    ) -> list[SearchAnswer]:
        """Return the matches of the searches of one request, as `find_matches` does.

        Raise GenerationChanged if the generation is no longer the live one, and SearchTimeout also if earlier searches
        take so long that these are not begun in time.
        """
        company = find_company(searches[0][0]) if len(searches) == 1 else None
        key = generation.id, object() if company is None else company  # an object that no other search shares
        wanted = Wanted(generation, searches, deadline)
        try:
            return await self._coalescer.ask(key, wanted, max_wait_seconds=deadline.seconds_left)
        except CallNotStarted:
            raise SearchTimeout(
                f"The search was not started within {deadline.seconds:g} s because of earlier "
                f"searches: {SEARCH_CONNECTIONS} run at once. An index makes searches faster; more API "
                "processes run more of them."
            ) from None

    def close(self) -> None:
        """Close the threads and connections, once no search is running."""
        self._threads.shutdown()
        self._engine.dispose()

    def _count_together(self, company: Company, waiting: Sequence[Wanted]) -> int:
        """Return how many requests' searches to run in one statement.

        They are as many as run within TOGETHER_SECONDS or, if that is more, the waiting ones divided by the number of
        free connections.
        """
        num_free = SEARCH_CONNECTIONS - self._coalescer.num_running
        share = math.ceil(self._coalescer.num_waiting / num_free)
        seconds_each = self.seconds_each.get(company[0], math.inf)
        return min(max(share, int(TOGETHER_SECONDS / seconds_each)), MOST_TOGETHER)

    async def _run(self, company: Company, together: Sequence[Wanted]) -> list[list[SearchAnswer]]:
        loop = asyncio.get_running_loop()
        began, call = loop.time(), Call(self._engine, together)
        running = loop.run_in_executor(self._threads, call.find)
        try:
            found = await asyncio.shield(running)
        except asyncio.CancelledError:  # all clients have gone
            await loop.run_in_executor(None, call.stop)
            await asyncio.wait([running])
            raise
        if len(together) > 1 and any("incomplete_because" in answer for answer in found):
            raise SearchTimeout  # of the request with the earliest deadline; each is then tried alone
        keep(self.seconds_each, company[0], (loop.time() - began) / len(found))
        answers = iter(found)
        return [list(islice(answers, len(wanted.searches))) for wanted in together]

    def _look_up(self, name: str) -> Generation:
        with self._engine.connect() as connection:
            return find_generation(connection, name)


def keep(values: dict[Any, Any], key: Hashable, value: Any) -> None:
    """Set the value of a key, and forget the key that was set least recently if there are too many."""
    values.pop(key, None)
    values[key] = value
    if len(values) > MOST_GENERATIONS:
        del values[next(iter(values))]
