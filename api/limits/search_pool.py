"""SearchPool: connections and threads that only searches use, so that slow ones hold up nothing else."""

from collections.abc import Callable
from typing import Final, TypeVar

import anyio
from anyio import to_thread
from sqlalchemy import Connection, Engine

from vectormill.domain.errors import SearchTimeout

# As many searches run at once as there are connections; two cores of Postgres are busy with fewer.
SEARCH_CONNECTIONS: Final = 3

T = TypeVar("T")


class SearchPool:
    """Runs so many searches at once; others wait in the event loop, where they hold neither thread nor connection."""

    def __init__(self, engine: Engine, timeout_seconds: float) -> None:
        self.engine = engine
        self._timeout_seconds = timeout_seconds
        self._places = anyio.Semaphore(SEARCH_CONNECTIONS)
        self._threads = anyio.CapacityLimiter(SEARCH_CONNECTIONS)

    async def run(self, search: Callable[[Connection], T]) -> T:
        """What `search` answers. Raises SearchTimeout when those before it take too long."""
        try:
            with anyio.fail_after(self._timeout_seconds):
                await self._places.acquire()
        except TimeoutError:
            raise SearchTimeout(
                f"The search waited {self._timeout_seconds:g} s for those before it and was not begun: "
                f"{SEARCH_CONNECTIONS} run at once. An index makes them fast; more API processes run more of them."
            ) from None
        try:
            return await to_thread.run_sync(self._run, search, limiter=self._threads)
        finally:
            self._places.release()

    def _run(self, search: Callable[[Connection], T]) -> T:
        with self.engine.connect() as connection:
            return search(connection)
