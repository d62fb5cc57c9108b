"""Watch: a job that clients follow is read once for all of them, however many there are."""

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
from vectormill.jobs.waiting import tell_job

POLL_SECONDS: Final = 0.5


@dataclass(slots=True)
class Glance:
    """A followed job as it was last read. Callers who come during a read wait for it by the lock."""

    num_watchers: int = 0
    body: JobBody | None = None
    read_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Watch:
    """The jobs that are followed now. Used by the event loop alone."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._glances: dict[UUID, Glance] = {}

    @contextmanager
    def join(self, job_id: UUID) -> Iterator[Glance]:
        """For the time of the block one more follows the job."""
        glance = self._glances.setdefault(job_id, Glance())
        glance.num_watchers += 1
        try:
            yield glance
        finally:
            glance.num_watchers -= 1
            if not glance.num_watchers:
                del self._glances[job_id]

    async def look(self, job_id: UUID, glance: Glance) -> JobBody:
        """The job, as it stood less than a poll ago. Raises JobNotFound."""
        async with glance.lock:
            if glance.body is None or self._clock() - glance.read_at >= POLL_SECONDS:
                body = await run_in_threadpool(self.load, job_id)
                glance.body, glance.read_at = body, self._clock()
            return glance.body

    def load(self, job_id: UUID) -> JobBody:
        """The job as it stands now. Raises JobNotFound."""
        with self._engine.connect() as connection:
            return tell_job(connection, find_job(connection, job_id))
