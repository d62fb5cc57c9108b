"""Watch: a job that several clients follow is read from Postgres once for all of them."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Engine

from vectormill.jobs.bodies import JobBody
from vectormill.jobs.jobs import find_job
from vectormill.jobs.waiting import make_job_body

POLL_SECONDS: Final = 0.5


@dataclass(slots=True)
class FollowedJob:
    """A job that clients follow, as it was last read.

    The lock lets clients that come during a read share it.
    """

    num_watchers: int = 0
    body: JobBody | None = None
    read_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Watch:
    """The jobs that clients are following. Used by the event loop alone."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._followed: dict[UUID, FollowedJob] = {}

    @contextmanager
    def join(self, job_id: UUID) -> Iterator[FollowedJob]:
        """Count one more follower of the job for the duration of the block."""
        followed = self._followed.setdefault(job_id, FollowedJob())
        followed.num_watchers += 1
        try:
            yield followed
        finally:
            followed.num_watchers -= 1
            if not followed.num_watchers:
                del self._followed[job_id]

    async def look(self, job_id: UUID, followed: FollowedJob) -> JobBody:
        """Return the job as it was at most POLL_SECONDS ago. Raise JobNotFound."""
        async with followed.lock:
            if followed.body is None or self._clock() - followed.read_at >= POLL_SECONDS:
                body = await run_in_threadpool(self.load, job_id)
                followed.body, followed.read_at = body, self._clock()
            return followed.body

    def load(self, job_id: UUID) -> JobBody:
        """Return the job as it is now. Raise JobNotFound."""
        with self._engine.connect() as connection:
            return make_job_body(connection, find_job(connection, job_id))
