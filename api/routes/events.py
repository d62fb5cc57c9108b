"""A job's progress over HTTP as Server-Sent Events (HTML Living Standard, section 9.2), until the job has ended."""

import time
from collections.abc import AsyncIterator
from typing import Final
from uuid import UUID

import anyio
from fastapi import APIRouter, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from api.dependencies import JobId, Resources, ResourcesDependency
from api.job_bodies import describe_job
from api.problems import is_database_away
from api.schemas import JobBody
from vectormill.db.jobs import find_job
from vectormill.domain.errors import JobNotFound
from vectormill.domain.job import TERMINAL_JOB_STATES

router = APIRouter(tags=["jobs"])

POLL_SECONDS: Final = 0.5
# Proxies close a connection that is silent for a minute.
SILENCE_SECONDS: Final = 15.0
RETRY_MILLISECONDS: Final = 2000


@router.get(
    "/v1/jobs/{job_id}/events",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def get_events(resources: ResourcesDependency, job_id: JobId) -> StreamingResponse:
    """`progress` events whose data is the job, whenever it has moved; the last event is `end`."""
    job = await run_in_threadpool(load_body, resources, job_id)
    return StreamingResponse(
        follow_job(resources, job), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
    )


async def follow_job(resources: Resources, job: JobBody) -> AsyncIterator[str]:
    yield f"retry: {RETRY_MILLISECONDS}\n\n"
    yield write_event(job)
    last, spoken_at = job, time.monotonic()
    while last.state not in TERMINAL_JOB_STATES and not resources.is_stopping():
        await anyio.sleep(POLL_SECONDS)
        try:
            job = await run_in_threadpool(load_body, resources, last.id)
        except JobNotFound:
            return
        except Exception as error:  # a restart of Postgres is no reason to end the stream; anything else is
            if not is_database_away(error):
                raise
        if has_moved(last, job):
            last, spoken_at = job, time.monotonic()
            yield write_event(job)
        elif time.monotonic() - spoken_at > SILENCE_SECONDS:
            spoken_at = time.monotonic()
            yield ": still here\n\n"


def has_moved(last: JobBody, job: JobBody) -> bool:
    """Whether there is something to tell. Why a job waits is told, that it no longer does is not: items tell it."""
    counts = (job.state, job.num_done, job.num_failed)
    return counts != (last.state, last.num_done, last.num_failed) or job.waiting_because not in (
        None,
        last.waiting_because,
    )


def write_event(job: JobBody) -> str:
    name = "end" if job.state in TERMINAL_JOB_STATES else "progress"
    return f"event: {name}\ndata: {job.model_dump_json()}\n\n"


def load_body(resources: Resources, job_id: UUID) -> JobBody:
    with resources.engine.connect() as connection:
        return describe_job(connection, find_job(connection, job_id))
