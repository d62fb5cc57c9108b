"""SearchPool: connections and threads that only searches use, so that slow ones hold up nothing else.

Searches that come together and cost alike are run together, in one transaction: beside the search of a few thousand
rows, its connection, its thread, its settings and the question for its plan cost several times as much.
"""

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import Engine

from vectormill.db.search.matches import Nearest, find_matches
from vectormill.domain.collection import Generation
from vectormill.domain.errors import SearchTimeout
from vectormill.domain.search import BY_VECTOR, VECTOR, Search

# As many searches run at once as there are connections; two cores of Postgres are busy with fewer.
SEARCH_CONNECTIONS: Final = 3
# Requests of one transaction; the first of them waits for the last.
MAX_TOGETHER: Final = 16
MOST_ROWS: Final = 100

SearchWithVector = tuple[Search, npt.NDArray[np.float32] | None]


@dataclass(slots=True, eq=False)
class Waiting:
    """The searches of one request."""

    generation: Generation
    searches: Sequence[SearchWithVector]
    found: "asyncio.Future[list[Nearest]]"

    @property
    def is_plain(self) -> bool:
        """Whether it costs what every other one like it costs, so that neither waits long for the other."""
        (search, _), *others = self.searches
        is_small = search.num_wanted <= MOST_ROWS and VECTOR not in search.include
        is_bare = search.condition is None and search.like is None and not search.by_document
        return not others and search.mode == BY_VECTOR and is_bare and is_small

    def goes_with(self, other: "Waiting") -> bool:
        return self.generation.id == other.generation.id and self.is_plain and other.is_plain


class SearchPool:
    """Runs so many searches at once; others wait in the event loop, where they hold neither thread nor connection."""

    def __init__(self, engine: Engine, timeout_seconds: float) -> None:
        self._engine = engine
        self._timeout_seconds = timeout_seconds
        self._threads = ThreadPoolExecutor(SEARCH_CONNECTIONS, thread_name_prefix="searches")
        self._num_free = SEARCH_CONNECTIONS
        self._waiting: deque[Waiting] = deque()
        self._runs: set[asyncio.Task[None]] = set()

    async def find(self, generation: Generation, searches: Sequence[SearchWithVector]) -> list[Nearest]:
        """What find_matches answers, and raises. Raises SearchTimeout when those before it take too long."""
        loop = asyncio.get_running_loop()
        waiting = Waiting(generation, searches, loop.create_future())
        self._waiting.append(waiting)
        loop.call_soon(self._begin)  # with all that comes in this turn of the loop
        timer = loop.call_later(self._timeout_seconds, self._give_up, waiting)
        try:
            return await waiting.found
        finally:
            timer.cancel()
            if waiting in self._waiting:  # its client has gone
                self._waiting.remove(waiting)

    def close(self) -> None:
        """When nobody searches any more."""
        self._threads.shutdown()
        self._engine.dispose()

    def _give_up(self, waiting: Waiting) -> None:
        if waiting not in self._waiting:
            return  # it was begun, and Postgres ends it in time
        self._waiting.remove(waiting)
        waiting.found.set_exception(
            SearchTimeout(
                f"The search waited {self._timeout_seconds:g} s for those before it and was not begun: "
                f"{SEARCH_CONNECTIONS} run at once. An index makes them fast; more API processes run more of them."
            )
        )

    def _begin(self) -> None:
        while self._num_free and self._waiting:
            together = self._take_together(math.ceil(len(self._waiting) / self._num_free))
            self._num_free -= 1
            run = asyncio.get_running_loop().create_task(self._run(together))
            self._runs.add(run)
            run.add_done_callback(self._runs.discard)

    def _take_together(self, share: int) -> list[Waiting]:
        """The one that waits longest, and those that go with it: its share of all that wait."""
        first = self._waiting.popleft()
        fitting = [waiting for waiting in self._waiting if waiting.goes_with(first)]
        together = [first, *fitting[: min(share, MAX_TOGETHER) - 1]]
        for waiting in together[1:]:
            self._waiting.remove(waiting)
        return together

    async def _run(self, together: Sequence[Waiting]) -> None:
        try:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._threads, self._find, together)
        except Exception as error:  # noqa: BLE001 - each client is told, whatever it is
            for waiting in together:
                if not waiting.found.done():
                    waiting.found.set_exception(error)
        else:
            for waiting in together:
                nearest, found = found[: len(waiting.searches)], found[len(waiting.searches) :]
                if not waiting.found.done():
                    waiting.found.set_result(nearest)
        finally:
            self._num_free += 1
            self._begin()

    def _find(self, together: Sequence[Waiting]) -> list[Nearest]:
        searches = [search for waiting in together for search in waiting.searches]
        with self._engine.connect() as connection:
            return find_matches(
                connection, together[0].generation, searches, timeout_seconds=self._timeout_seconds
            )
