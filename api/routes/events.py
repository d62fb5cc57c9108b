"""A job's progress over HTTP as Server-Sent Events (HTML Living Standard, section 9.2), until the job has ended."""

import time
from collections.abc import AsyncIterator
from typing import Final
from uuid import UUID

import anyio
from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api.dependencies import JobId, Resources, ResourcesDependency
from api.problems import is_database_away
from api.serving import serve, write_answer
from api.watch import POLL_SECONDS, FollowedJob
from vectormill.domain.errors import JobNotFound
from vectormill.jobs import operations
from vectormill.jobs.bodies import JobBody
from vectormill.jobs.job import TERMINAL_JOB_STATES

router = APIRouter(tags=["jobs"])

# A comment is sent after this long without an event, since proxies close a connection silent for a minute.
SILENCE_SECONDS: Final = 15.0
RETRY_MILLISECONDS: Final = 2000


@serve(router, operations.FOLLOW)
async def get_events(resources: ResourcesDependency, job_id: JobId) -> StreamingResponse:
    """Send `progress` events with the job as data whenever it has changed; the last event is `end`."""
    # Entered here already; otherwise a full API would still read the job for everyone whom it refuses.
    with resources.gates.watchers.enter():
        job = await run_in_threadpool(resources.watch.load, job_id)
    return EventStream(resources, job_id, job)


class EventStream(StreamingResponse):
    """The response to one client that follows a job; it counts in the gate until its last byte is sent."""

    def __init__(self, resources: Resources, job_id: UUID, job: JobBody) -> None:
        self._resources = resources
        self._job_id = job_id
        self._job = job
        super().__init__((), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = self._resources.watch
        with self._resources.gates.watchers.enter(), watch.join(self._job_id) as followed:
            self.body_iterator = follow_job(self._resources, self._job_id, self._job, followed)
            await super().__call__(scope, receive, send)


async def follow_job(
    resources: Resources, job_id: UUID, job: JobBody, followed: FollowedJob
) -> AsyncIterator[bytes]:
    yield b"retry: %d\n\n" % RETRY_MILLISECONDS
    yield write_event(job)
    last, spoken_at = job, time.monotonic()
    while last["state"] not in TERMINAL_JOB_STATES and not resources.is_stopping():
        await anyio.sleep(POLL_SECONDS)
        try:
            job = await resources.watch.look(job_id, followed)
        except JobNotFound:
            return
        except Exception as error:  # a restart of Postgres does not end the stream; anything else does
            if not is_database_away(error):
                raise
        if has_moved(last, job):
            last, spoken_at = job, time.monotonic()
            yield write_event(job)
        elif time.monotonic() - spoken_at > SILENCE_SECONDS:
            spoken_at = time.monotonic()
            yield b": still here\n\n"


def has_moved(last: JobBody, job: JobBody) -> bool:
    """Return True if the job has changed so much that clients are notified.

    The end of a wait is not reported, since the progress of items shows it.
    """
    if any(job[name] != last[name] for name in ("state", "num_done", "num_failed")):
        return True
    return job["waiting_because"] not in (None, last["waiting_because"])


def write_event(job: JobBody) -> bytes:
    name = b"end" if job["state"] in TERMINAL_JOB_STATES else b"progress"
    return b"event: %s\ndata: %s\n\n" % (name, write_answer(job))
