"""SearchPool: connections and threads that only searches use, so that slow ones hold up nothing else.

Searches that come together and differ in little but their vectors are run together, in one statement: beside the search
of a few thousand rows, its connection, its thread, its settings and its plan cost several times as much.
"""

import asyncio
import math
from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from vectormill.db.search.matches import Nearest, find_matches
from vectormill.db.search.rounds import MOST_TOGETHER, SearchWithVector, find_company
from vectormill.domain.collection import Generation
from vectormill.domain.errors import SearchTimeout

# As many searches run at once as there are connections; two cores of Postgres are busy with fewer.
SEARCH_CONNECTIONS: Final = 3
# What is run together may take so long, for the first of it waits for the last; and where each takes longer, its share
# of all that wait.
TOGETHER_SECONDS: Final = 0.02
MOST_GENERATIONS: Final = 100


@dataclass(slots=True, eq=False)
class Waiting:
    """The searches of one request."""

    generation: Generation
    searches: Sequence[SearchWithVector]
    found: "asyncio.Future[list[Nearest]]"

    company: Hashable = field(init=False)

    def __post_init__(self) -> None:
        self.company = find_company(self.searches[0][0]) if len(self.searches) == 1 else None

    def goes_with(self, other: "Waiting") -> bool:
        is_alike = self.company is not None and self.company == other.company
        return is_alike and self.generation.id == other.generation.id


class SearchPool:
    """Runs so many searches at once; others wait in the event loop, where they hold neither thread nor connection."""

    def __init__(self, engine: Engine, timeout_seconds: float) -> None:
        self._engine = engine
        self._timeout_seconds = timeout_seconds
        self._threads = ThreadPoolExecutor(SEARCH_CONNECTIONS, thread_name_prefix="searches")
        self._num_free = SEARCH_CONNECTIONS
        self._waiting: deque[Waiting] = deque()
        self._runs: set[asyncio.Task[None]] = set()
        self.seconds_each: dict[int, float] = {}  # of a search, in the last round of a generation

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
        """The one that waits longest, and those that go with it."""
        first = self._waiting.popleft()
        seconds_each = self.seconds_each.get(first.generation.id, math.inf)
        num_together = min(max(share, int(TOGETHER_SECONDS / seconds_each)), MOST_TOGETHER)
        fitting = [waiting for waiting in self._waiting if waiting.goes_with(first)]
        together = [first, *fitting[: num_together - 1]]
        for waiting in together[1:]:
            self._waiting.remove(waiting)
        return together

    async def _run(self, together: Sequence[Waiting]) -> None:
        loop = asyncio.get_running_loop()
        try:
            try:
                began = loop.time()
                found = await loop.run_in_executor(self._threads, self._find, together)
                self._note_seconds(together, loop.time() - began)
            except (SearchTimeout, OperationalError):
                raise  # a matter of all
            except Exception:
                if len(together) == 1:
                    raise
                for waiting in together:  # one of them may be to blame, and only that one
                    await self._run_alone(waiting)
            else:
                hand_out(together, found)
        except Exception as error:  # noqa: BLE001 - each client is told, whatever it is
            refuse(together, error)
        finally:
            self._num_free += 1
            self._begin()

    async def _run_alone(self, waiting: Waiting) -> None:
        loop = asyncio.get_running_loop()
        if waiting.found.done():
            return
        try:
            found = await loop.run_in_executor(self._threads, self._find, [waiting])
        except Exception as error:  # noqa: BLE001 - its client is told, whatever it is
            refuse([waiting], error)
        else:
            hand_out([waiting], found)

    def _note_seconds(self, together: Sequence[Waiting], seconds: float) -> None:
        """As many generations are remembered as are searched by turns."""
        generation_id = together[0].generation.id
        self.seconds_each.pop(generation_id, None)
        self.seconds_each[generation_id] = seconds / sum(len(waiting.searches) for waiting in together)
        if len(self.seconds_each) > MOST_GENERATIONS:
            del self.seconds_each[next(iter(self.seconds_each))]

    def _find(self, together: Sequence[Waiting]) -> list[Nearest]:
        searches = [search for waiting in together for search in waiting.searches]
        with self._engine.connect() as connection:
            return find_matches(
                connection, together[0].generation, searches, timeout_seconds=self._timeout_seconds
            )


def hand_out(together: Sequence[Waiting], found: Sequence[Nearest]) -> None:
    """Gives each request what is its own."""
    for waiting in together:
        nearest, found = list(found[: len(waiting.searches)]), found[len(waiting.searches) :]
        if not waiting.found.done():
            waiting.found.set_result(nearest)


def refuse(together: Sequence[Waiting], error: Exception) -> None:
    for waiting in together:
        if not waiting.found.done():
            waiting.found.set_exception(error)
