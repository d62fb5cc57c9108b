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
from api.problems import is_database_away
from api.schemas import JobBody
from vectormill.db.jobs import find_job
from vectormill.domain.errors import JobNotFound
from vectormill.domain.job import Job

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
    job = await run_in_threadpool(load_job, resources, job_id)
    return StreamingResponse(
        follow_job(resources, job), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
    )


async def follow_job(resources: Resources, job: Job) -> AsyncIterator[str]:
    yield f"retry: {RETRY_MILLISECONDS}\n\n"
    yield write_event(job)
    last, spoken_at = job, time.monotonic()
    while not last.is_terminal and not resources.is_stopping():
        await anyio.sleep(POLL_SECONDS)
        try:
            job = await run_in_threadpool(load_job, resources, last.id)
        except JobNotFound:
            return
        except Exception as error:  # a restart of Postgres is no reason to end the stream; anything else is
            if not is_database_away(error):
                raise
        if (job.state, job.num_done, job.num_failed) != (last.state, last.num_done, last.num_failed):
            last, spoken_at = job, time.monotonic()
            yield write_event(job)
        elif time.monotonic() - spoken_at > SILENCE_SECONDS:
            spoken_at = time.monotonic()
            yield ": still here\n\n"


def write_event(job: Job) -> str:
    name = "end" if job.is_terminal else "progress"
    return f"event: {name}\ndata: {JobBody.from_job(job).model_dump_json()}\n\n"


def load_job(resources: Resources, job_id: UUID) -> Job:
    with resources.engine.connect() as connection:
        return find_job(connection, job_id)
