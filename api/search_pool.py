"""SearchPool: a pool of connections and threads for searches alone, so that slow searches block nothing else.

Concurrent searches that differ in little but their vectors are coalesced into one statement: for a few thousand rows,
the overhead of connection, thread, settings and plan is several times the cost of the search.
"""

import asyncio
import math
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from vectormill.coalescer import CallNotStarted, Coalescer
from vectormill.collections.collection import Generation
from vectormill.collections.collections import find_generation
from vectormill.domain.errors import SearchTimeout
from vectormill.search.matches import MOST_TOGETHER, SearchWithVector, find_company, find_matches
from vectormill.search.search import Nearest

# This many searches run at once. Fewer would already keep two cores of Postgres busy.
SEARCH_CONNECTIONS: Final = 3
# Coalesced searches should take at most this long in all, since the first waits for the last. If single searches take
# longer, each call takes an equal share of the waiting ones.
TOGETHER_SECONDS: Final = 0.02
MOST_GENERATIONS: Final = 100

# The searches of one request, with the generation that they search.
Wanted = tuple[Generation, Sequence[SearchWithVector]]
# The key of searches that can share a statement: the generation's id, and the result of find_company.
Company = tuple[int, Hashable]


class SearchPool:
    """A pool that runs SEARCH_CONNECTIONS statements at once; other searches wait without thread or connection."""

    def __init__(self, engine: Engine, timeout_seconds: float, max_waiting: int) -> None:
        self._engine = engine
        self._timeout_seconds = timeout_seconds
        self._threads = ThreadPoolExecutor(SEARCH_CONNECTIONS, thread_name_prefix="searches")
        self._coalescer: Coalescer[Company, Wanted, list[Nearest]] = Coalescer(
            self._run,
            max_waiting=max_waiting,
            max_running=SEARCH_CONNECTIONS,
            count=self._count_together,
            max_wait_seconds=timeout_seconds,
            is_of_one=lambda error: not isinstance(error, SearchTimeout | OperationalError),
        )
        self.seconds_each: dict[int, float] = {}  # by generation: of one search in the last call

    async def find(self, generation: Generation, searches: Sequence[SearchWithVector]) -> list[Nearest]:
        """Return the matches of the searches of one request, as `find_matches` does.

        Raise SearchTimeout also if earlier searches take so long that these are not begun in time.
        """
        company = find_company(searches[0][0]) if len(searches) == 1 else None
        alone = object()  # a key that no other search shares
        try:
            return await self._coalescer.ask(
                (generation.id, alone if company is None else company), (generation, searches)
            )
        except CallNotStarted:
            raise SearchTimeout(
                f"The search was not started within {self._timeout_seconds:g} s because of earlier "
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

    async def _run(self, company: Company, together: Sequence[Wanted]) -> list[list[Nearest]]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        searches = [search for _, wanted in together for search in wanted]
        found = iter(await loop.run_in_executor(self._threads, self._find, together[0][0], searches))
        self._note_seconds(company[0], (loop.time() - began) / len(searches))
        return [[next(found) for _ in wanted] for _, wanted in together]

    def _note_seconds(self, generation_id: int, seconds: float) -> None:
        """Record the seconds per search of a generation, and forget the generation that was searched least recently."""
        self.seconds_each.pop(generation_id, None)
        self.seconds_each[generation_id] = seconds
        if len(self.seconds_each) > MOST_GENERATIONS:
            del self.seconds_each[next(iter(self.seconds_each))]

    def _find(self, generation: Generation, searches: Sequence[SearchWithVector]) -> list[Nearest]:
        with self._engine.connect() as connection:
            return find_matches(connection, generation, searches, timeout_seconds=self._timeout_seconds)


class LiveGenerations:
    """A look-up of the live generations of collections, with one SQL query for all concurrent requests.

    Results are not cached, and a request never uses a look-up that began before it, so it sees every swap that was
    committed before it came. Used from the event loop.
    """

    def __init__(self, engine: Engine, max_waiting: int) -> None:
        # A single statement needs no transaction, whose BEGIN and COMMIT would be two more round trips.
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._coalescer: Coalescer[str, None, Generation] = Coalescer(
            self._look_up, max_waiting=max_waiting, max_running_of=lambda _: 1
        )

    async def find(self, name: str) -> Generation:
        """Return the live generation of a collection. Raise CollectionNotFound."""
        return await self._coalescer.ask(name, None)

    async def _look_up(self, name: str, askers: Sequence[None]) -> list[Generation]:
        return [await run_in_threadpool(self._find, name)] * len(askers)

    def _find(self, name: str) -> Generation:
        with self._engine.connect() as connection:
            return find_generation(connection, name)
