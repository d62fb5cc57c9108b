"""LiveGenerations: which generation of a collection is searched, asked once for all requests that wait for the answer.

Nothing is kept: a lookup that began before a request is not for it, so every request sees a swap that was committed
before it came.
"""

import asyncio

from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Engine

from vectormill.db.collections.collections import find_generation
from vectormill.domain.collection import Generation

Lookup = asyncio.Task[Generation]


class LiveGenerations:
    """Belongs to the event loop."""

    def __init__(self, engine: Engine) -> None:
        # One statement needs no transaction, whose begin and end are two more ways to Postgres.
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._running: dict[str, Lookup] = {}
        self._next: dict[str, Lookup] = {}

    async def find(self, name: str) -> Generation:
        """The live generation of a collection. Raises CollectionNotFound."""
        lookup = self._next.get(name)
        if lookup is None:
            lookup = asyncio.get_running_loop().create_task(self._look_up(name, self._running.get(name)))
            lookup.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # its clients may have gone
            self._next[name] = lookup
        return await asyncio.shield(lookup)

    async def _look_up(self, name: str, before: Lookup | None) -> Generation:
        own = self._next[name]
        if before is not None:
            await asyncio.wait([before])
        del self._next[name]  # who comes from here on waits for the next
        self._running[name] = own
        try:
            return await run_in_threadpool(self._find, name)
        finally:
            if self._running.get(name) is own:
                del self._running[name]

    def _find(self, name: str) -> Generation:
        with self._engine.connect() as connection:
            return find_generation(connection, name)
