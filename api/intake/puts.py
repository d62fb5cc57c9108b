"""Puts: coalesce single items for a collection into few jobs, and tell each client when its item is searchable.

A job costs Postgres some ten statements, whatever its size, so puts that come while a job is being committed wait for
the next one. Jobs of a collection are committed one after the other, so that the later of two puts of a key wins. All
state is in Postgres too: if this process is killed, the jobs go on.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar
from uuid import UUID

from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from api.intake.intake import Intake
from vectormill.coalescer import Coalescer
from vectormill.collections.collections import find_generation
from vectormill.collections.items import PutEnd, delete_ended_puts, find_ended_puts
from vectormill.domain.errors import SpecMismatch
from vectormill.jobs.item import Item
from vectormill.jobs.job import INTERACTIVE_PRIORITY, NewJob
from vectormill.jobs.submission import JobWriter
from vectormill.settings import Settings

# Puts that come within this time of the first share its job. Puts that come during its commit share the next job.
GATHER_SECONDS: Final = 0.002
# Two jobs begin at least this far apart: each costs API, Postgres, dispatcher and worker some milliseconds together,
# and at 200 puts a second on two cores a job of eight puts costs little more than a job of one.
PACE_SECONDS: Final = 0.04
# All open jobs are polled together: at short intervals while the youngest is younger than this, and later at longer
# ones. A poll costs half a millisecond.
YOUNG_SECONDS: Final = 1.0
YOUNG_PAUSE_SECONDS: Final = 0.01
OLD_PAUSE_SECONDS: Final = 0.05
REMOVE_SECONDS: Final = 0.5
AWAY_SECONDS: Final = 0.5

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Followed:
    """A job of puts that clients wait for. If `is_told`, a client knows its id, so it is not removed at its end."""

    job_id: UUID
    began: float
    ended: "asyncio.Future[PutEnd | None]"
    num_waiters: int = 0
    is_told: bool = False


class Puts:
    """The puts of one API process: it coalesces them into jobs and waits for these to end. It needs the event loop."""

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
        # Jobs of a collection are written one after the other, so that the later of two puts of a key wins.
        self._coalescer: Coalescer[str, Item, Followed] = Coalescer(
            self._write,
            max_waiting=settings.max_requests,
            max_running_of=lambda _: 1,
            count=self._count_together,
            choose_pause=lambda: max(GATHER_SECONDS, self._began + PACE_SECONDS - self._clock()),
        )
        self._open: dict[UUID, Followed] = {}
        self._answered: list[UUID] = []
        self._began = -math.inf
        self._follower: asyncio.Task[None] | None = None
        self._remover: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Return the number of puts that wait to be written as a job."""
        return self._coalescer.num_waiting

    async def write(self, collection: str, item: Item) -> Followed:
        """Write the item with others as a job, and return the committed job; call `wait` next.

        Raise the errors of a submission.
        """
        return await self._coalescer.ask(collection, item)

    async def wait(self, followed: Followed, seconds: float) -> PutEnd | None:
        """Wait for the end of the job. Return its outcome, or None after `seconds` or if this process is stopping."""
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
        """Wait for jobs that are being written, and remove the jobs whose clients were answered."""
        await self._coalescer.close()
        tasks = [task for task in (self._follower, self._remover) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- writing ------------------------------------------------------------------------------------------------------

    async def _write(self, collection: str, items: Sequence[Item]) -> list[Followed]:
        self._began = self._clock()
        job_id = await run_in_threadpool(self._submit, collection, items)
        followed = Followed(job_id, self._clock(), asyncio.get_running_loop().create_future(), len(items))
        self._open[job_id] = followed
        self._follow()
        return [followed] * len(items)

    def _count_together(self, _: str, items: Sequence[Item]) -> int:
        """Return how many items, in order, go into one job: as many as fit a chunk, up to the first repeated key."""
        keys: set[str] = set()
        num_bytes = 0
        for item in items[: self._settings.chunk_max_items]:
            num_bytes += item.num_bytes
            if item.key in keys or (keys and num_bytes > self._settings.chunk_max_bytes):
                break
            keys.add(item.key)
        return len(keys)

    def _submit(self, collection: str, items: Sequence[Item]) -> UUID:
        try:
            return self._submit_once(collection, items)
        except SpecMismatch:  # another generation has just become live
            return self._submit_once(collection, items)

    def _submit_once(self, collection: str, items: Sequence[Item]) -> UUID:
        with self._engine.connect() as connection:
            spec = find_generation(connection, collection).spec
        new_job = NewJob(
            spec, collection=collection, priority=INTERACTIVE_PRIORITY, lifetime_seconds=math.inf
        )
        intake = Intake(self._settings)
        intake.take_items(len(items))
        with JobWriter(self._engine, new_job, self._settings, admit=intake.admit) as writer:
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
                if self._is_stopping():  # callers return without an outcome
                    for followed in self._open.values():
                        followed.is_told = True
                        followed.ended.set_result(None)
                    self._open.clear()
                    return
                try:
                    for end in await run_in_threadpool(
                        self._in_transaction, find_ended_puts, list(self._open)
                    ):
                        if (ended := self._open.pop(end.job_id, None)) is not None:
                            ended.ended.set_result(end)
                except SQLAlchemyError as error:
                    logger.warning("Cannot read the jobs of puts; retrying: %s", error)
                    await asyncio.sleep(AWAY_SECONDS)
        finally:
            self._follower = None

    def _choose_pause(self) -> float:
        youngest = self._clock() - max(followed.began for followed in self._open.values())
        return YOUNG_PAUSE_SECONDS if youngest < YOUNG_SECONDS else OLD_PAUSE_SECONDS

    # -- removing -----------------------------------------------------------------------------------------------------

    def _remove(self, job_id: UUID) -> None:
        self._answered.append(job_id)
        if self._remover is None:
            self._remover = asyncio.create_task(self._remove_answered(), name="removal of puts")

    async def _remove_answered(self) -> None:
        """Remove jobs whose clients were answered, many at once. The pruner removes those that are left."""
        await asyncio.sleep(0 if self._is_stopping() else REMOVE_SECONDS)
        self._remover = None
        answered, self._answered = self._answered, []
        try:
            await run_in_threadpool(self._in_transaction, delete_ended_puts, answered)
        except SQLAlchemyError as error:
            logger.warning(
                "Cannot remove %d jobs of puts; the pruner will remove them: %s", len(answered), error
            )

    def _in_transaction(self, act: Callable[[Connection, list[UUID]], T], job_ids: list[UUID]) -> T:
        with self._engine.begin() as connection:
            return act(connection, job_ids)
