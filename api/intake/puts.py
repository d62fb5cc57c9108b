"""Puts: items that come one by one to a collection become few jobs, and each client hears when its own is searchable.

A job costs Postgres some ten statements, whatever it holds; so what comes while one is being committed waits for the
next. Jobs of a collection are committed one after the other, so that of two puts of one key the later one wins. All
that is known here is known to Postgres too: when this process is killed, the jobs go on.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from api.intake.intake import Intake, load_pending
from vectormill.db.collections.collections import find_generation
from vectormill.db.jobs.submission import JobWriter
from vectormill.db.rows.puts import PutEnd, delete_ended_puts, find_ended_puts
from vectormill.domain.errors import SpecMismatch
from vectormill.domain.jobs.item import Item
from vectormill.domain.jobs.job import INTERACTIVE_PRIORITY, NewJob
from vectormill.settings import Settings

# Puts that come within so long of the first share its job; more come while it is committed.
GATHER_SECONDS: Final = 0.002
# Jobs begin so far apart at the least: each costs API, Postgres, dispatcher and worker some milliseconds together, and
# at 200 puts a second on two cores eight of them in one job cost little more than one.
PACE_SECONDS: Final = 0.04
# Waits between two looks at all open jobs together, while the youngest is young and later: a look costs half a
# millisecond.
YOUNG_SECONDS: Final = 1.0
YOUNG_PAUSE_SECONDS: Final = 0.01
OLD_PAUSE_SECONDS: Final = 0.05
REMOVE_SECONDS: Final = 0.5
AWAY_SECONDS: Final = 0.5

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Followed:
    """The job of some puts. `is_told`: a client knows its address, so it stays for some minutes after its end."""

    job_id: UUID
    began: float
    ended: "asyncio.Future[PutEnd | None]"
    num_waiters: int = 0
    is_told: bool = False


@dataclass(slots=True)
class Line:
    """What waits to be written to one collection."""

    waiting: "deque[tuple[Item, asyncio.Future[Followed]]]" = field(default_factory=deque)
    task: "asyncio.Task[None] | None" = None


class Puts:
    """The puts of one API process. Used by the event loop alone."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        is_stopping: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._is_stopping = is_stopping
        self._clock = clock
        self._lines: dict[str, Line] = {}
        self._open: dict[UUID, Followed] = {}
        self._answered: list[UUID] = []
        self._began = -math.inf
        self._follower: asyncio.Task[None] | None = None
        self._remover: asyncio.Task[None] | None = None

    async def write(self, collection: str, item: Item) -> Followed:
        """The job with the item, committed; say `wait` next. Raises what a submission raises."""
        line = self._lines.setdefault(collection, Line())
        written: asyncio.Future[Followed] = asyncio.get_running_loop().create_future()
        line.waiting.append((item, written))
        if line.task is None:
            line.task = asyncio.create_task(self._work_off(collection, line), name=f"puts of {collection}")
        return await asyncio.shield(written)

    async def wait(self, followed: Followed, seconds: float) -> PutEnd | None:
        """How the job ended; None when it has not within so long, or when this process is told to stop."""
        try:
            return await asyncio.wait_for(asyncio.shield(followed.ended), seconds)
        except TimeoutError:
            followed.is_told = True
            return None
        finally:
            followed.num_waiters -= 1
            if not followed.num_waiters:
                self._open.pop(followed.job_id, None)
                if followed.ended.done() and not followed.is_told:
                    self._remove(followed.job_id)

    async def close(self) -> None:
        """Waits for what is being written, and removes the jobs of those who were answered."""
        tasks = [*(line.task for line in self._lines.values()), self._follower, self._remover]
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)

    # -- writing ------------------------------------------------------------------------------------------------------

    async def _work_off(self, collection: str, line: Line) -> None:
        while line.waiting:
            await asyncio.sleep(max(GATHER_SECONDS, self._began + PACE_SECONDS - self._clock()))
            self._began = self._clock()
            batch = self._take_batch(line)
            try:
                job_id = await run_in_threadpool(self._submit, collection, [item for item, _ in batch])
            except Exception as error:  # noqa: BLE001 - it is raised to each of the clients
                for _, written in batch:
                    written.set_exception(error)
                    written.exception()  # nobody is left to hear it when its client has gone
                continue
            followed = Followed(job_id, self._clock(), asyncio.get_running_loop().create_future())
            followed.num_waiters = len(batch)
            self._open[job_id] = followed
            self._follow()
            for _, written in batch:
                written.set_result(followed)
        del self._lines[collection]

    def _take_batch(self, line: Line) -> "list[tuple[Item, asyncio.Future[Followed]]]":
        """What fits into a chunk, in its order; a key that comes again waits, and so does what is behind it."""
        batch: list[tuple[Item, asyncio.Future[Followed]]] = []
        keys: set[str] = set()
        num_bytes = 0
        while line.waiting and len(batch) < self._settings.chunk_max_items:
            item = line.waiting[0][0]
            num_bytes += len(item.text) + len(item.metadata)
            if item.key in keys or (batch and num_bytes > self._settings.chunk_max_bytes):
                break
            keys.add(item.key)
            batch.append(line.waiting.popleft())
        return batch

    def _submit(self, collection: str, items: list[Item]) -> UUID:
        Intake(self._settings, load_pending(self._engine)).take_items(len(items))
        try:
            return self._submit_once(collection, items)
        except SpecMismatch:  # another generation has become the live one in this moment
            return self._submit_once(collection, items)

    def _submit_once(self, collection: str, items: list[Item]) -> UUID:
        with self._engine.connect() as connection:
            spec = find_generation(connection, collection).spec
        new_job = NewJob(spec, collection, INTERACTIVE_PRIORITY, lifetime_seconds=math.inf)
        with JobWriter(self._engine, new_job, self._settings) as writer:
            for item in items:
                writer.add(item)
            return writer.finish().id

    # -- following ----------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        if self._follower is None:
            self._follower = asyncio.create_task(self._look_after(), name="ends of puts")

    async def _look_after(self) -> None:
        try:
            while self._open:
                await asyncio.sleep(self._choose_pause())
                if self._is_stopping():
                    self._let_go()
                    return
                try:
                    await self._look()
                except SQLAlchemyError as error:
                    logger.warning("Jobs of puts cannot be read; trying again: %s", error)
                    await asyncio.sleep(AWAY_SECONDS)
        finally:
            self._follower = None

    def _choose_pause(self) -> float:
        youngest = self._clock() - max(followed.began for followed in self._open.values())
        return YOUNG_PAUSE_SECONDS if youngest < YOUNG_SECONDS else OLD_PAUSE_SECONDS

    async def _look(self) -> None:
        for end in await run_in_threadpool(self._load_ends, list(self._open)):
            followed = self._open.pop(end.job_id, None)
            if followed is not None:
                followed.ended.set_result(end)

    def _load_ends(self, job_ids: list[UUID]) -> list[PutEnd]:
        with self._engine.connect() as connection:
            return find_ended_puts(connection, job_ids)

    def _let_go(self) -> None:
        """Who waits hears now where its job is."""
        for followed in self._open.values():
            followed.is_told = True
            followed.ended.set_result(None)
        self._open.clear()

    # -- removing -----------------------------------------------------------------------------------------------------

    def _remove(self, job_id: UUID) -> None:
        self._answered.append(job_id)
        if self._remover is None:
            self._remover = asyncio.create_task(self._remove_answered(), name="removal of puts")

    async def _remove_answered(self) -> None:
        """Many at once and after their answers: nobody waits for it. What stays, the pruner removes."""
        await asyncio.sleep(0 if self._is_stopping() else REMOVE_SECONDS)
        self._remover = None
        answered, self._answered = self._answered, []
        try:
            await run_in_threadpool(self._delete, answered)
        except SQLAlchemyError as error:
            logger.warning("%d jobs of puts stay until the pruner comes by: %s", len(answered), error)

    def _delete(self, job_ids: list[UUID]) -> None:
        with self._engine.begin() as connection:
            delete_ended_puts(connection, job_ids)
