"""SearchPool: connections and threads that only searches use, so that slow ones hold up nothing else.

Searches that come together and differ in little but their vectors are run together, in one statement: beside the search
of a few thousand rows, its connection, its thread, its settings and its plan cost several times as much.
"""

import asyncio
import math
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from vectormill.coalescer import Coalescer, NotBegun
from vectormill.collections.collection import Generation
from vectormill.collections.collections import find_generation
from vectormill.domain.errors import SearchTimeout
from vectormill.search.matches import MOST_TOGETHER, SearchWithVector, find_company, find_matches
from vectormill.search.search import Nearest

# As many searches run at once as there are connections; two cores of Postgres are busy with fewer.
SEARCH_CONNECTIONS: Final = 3
# Searches that run together may take so long, for the first of it waits for the last; and where each takes longer,
# its share of all that wait.
TOGETHER_SECONDS: Final = 0.02
MOST_GENERATIONS: Final = 100

# The searches of one request, of this generation.
Wanted = tuple[Generation, Sequence[SearchWithVector]]
# The generation's id, and what searches that one statement answers have in common.
Company = tuple[int, Hashable]


class SearchPool:
    """Runs so many searches at once; others wait in the event loop, where they hold neither thread nor connection."""

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
        self.seconds_each: dict[int, float] = {}  # of a search, in the last round of a generation

    async def find(self, generation: Generation, searches: Sequence[SearchWithVector]) -> list[Nearest]:
        """Find the matches of these searches, as find_matches does. Raise SearchTimeout when those before it
        take too long.
        """
        company = find_company(searches[0][0]) if len(searches) == 1 else None
        alone = object()  # what no other search has in common with this one
        try:
            return await self._coalescer.ask(
                (generation.id, alone if company is None else company), (generation, searches)
            )
        except NotBegun:
            raise SearchTimeout(
                f"The search waited {self._timeout_seconds:g} s for those before it and was not begun: "
                f"{SEARCH_CONNECTIONS} run at once. An index makes searches faster; more API processes run more of "
                "them."
            ) from None

    def close(self) -> None:
        """Close threads and connections. Call when nobody searches any more."""
        self._threads.shutdown()
        self._engine.dispose()

    def _count_together(self, company: Company, waiting: Sequence[Wanted]) -> int:
        """Return how many searches take little time together, or their share of all that wait if that is more."""
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
        """Note how long a search of a generation took, for as many generations as are searched in turn."""
        self.seconds_each.pop(generation_id, None)
        self.seconds_each[generation_id] = seconds
        if len(self.seconds_each) > MOST_GENERATIONS:
            del self.seconds_each[next(iter(self.seconds_each))]

    def _find(self, generation: Generation, searches: Sequence[SearchWithVector]) -> list[Nearest]:
        with self._engine.connect() as connection:
            return find_matches(connection, generation, searches, timeout_seconds=self._timeout_seconds)


class LiveGenerations:
    """Looks up which generation of a collection is searched, once for all requests that wait for the answer.

    Nothing is kept: a look-up that began before a request is not for it, so every request sees a swap that was
    committed before it came. Belongs to the event loop.
    """

    def __init__(self, engine: Engine, max_waiting: int) -> None:
        # One statement needs no transaction, whose begin and end are two more ways to Postgres.
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._coalescer: Coalescer[str, None, Generation] = Coalescer(
            self._look_up, max_waiting=max_waiting, max_running_of=lambda _: 1
        )

    async def find(self, name: str) -> Generation:
        """Return the live generation of a collection. Raises CollectionNotFound."""
        return await self._coalescer.ask(name, None)

    async def _look_up(self, name: str, askers: Sequence[None]) -> list[Generation]:
        return [await run_in_threadpool(self._find, name)] * len(askers)

    def _find(self, name: str) -> Generation:
        with self._engine.connect() as connection:
            return find_generation(connection, name)
