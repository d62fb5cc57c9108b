"""LiveGenerations: which generation of a collection is searched, asked once for all requests that wait for the answer.

Nothing is kept: a look-up that began before a request is not for it, so every request sees a swap that was committed
before it came.
"""

from collections.abc import Sequence

from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Engine

from vectormill.coalescer import Coalescer
from vectormill.collections.collection import Generation
from vectormill.collections.collections import find_generation


class LiveGenerations:
    """Belongs to the event loop."""

    def __init__(self, engine: Engine, max_waiting: int) -> None:
        # One statement needs no transaction, whose begin and end are two more ways to Postgres.
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._coalescer: Coalescer[str, None, Generation] = Coalescer(
            self._look_up, max_waiting=max_waiting, max_running_of=lambda _: 1
        )

    async def find(self, name: str) -> Generation:
        """The live generation of a collection. Raises CollectionNotFound."""
        return await self._coalescer.ask(name, None)

    async def _look_up(self, name: str, askers: Sequence[None]) -> list[Generation]:
        return [await run_in_threadpool(self._find, name)] * len(askers)

    def _find(self, name: str) -> Generation:
        with self._engine.connect() as connection:
            return find_generation(connection, name)
