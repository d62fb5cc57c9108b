"""Jobs over HTTP: submit, look, list, pause, resume, cancel, retry, delete, and the errors of single items."""

from typing import Annotated, Any, Final
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from api.cursors import After, decode_cursor, encode_cursor
from api.dependencies import JobId, Resources, ResourcesDependency
from api.intake.idempotency import IdempotencyKey
from api.intake.job_bodies import describe_job, describe_jobs
from api.intake.submissions import receive_job
from api.problems import Place, Problem
from api.schemas import (
    ItemErrorBody,
    ItemErrorPage,
    JobBody,
    JobPage,
    TruncatedItemBody,
    TruncatedItemPage,
)
from vectormill.batches.batches import refuse_job_of_batch
from vectormill.domain.encoding import RequestedOptions
from vectormill.encoding_options import parameters_of
from vectormill.jobs.chunks.truncations import list_truncated_items
from vectormill.jobs.deletion import discard_job
from vectormill.jobs.job import JOB_STATES, Job
from vectormill.jobs.jobs import (
    cancel_job,
    find_job,
    list_item_errors,
    list_jobs,
    pause_job,
    resume_job,
    retry_job,
)
from vectormill.jobs.twins import Wish, wish_for_twins

router = APIRouter(tags=["jobs"])

# When to ask for the job the first time.
POLL_AFTER_SECONDS = 1

STREAM_PARAMETERS = [
    *(
        {"name": name, "in": "query", "description": description, "schema": schema}
        for name, description, schema in (
            ("model", "A name of GET /v1/models.", {"type": "string"}),
            ("collection", "Its SQL view gets the vectors.", {"type": "string", "example": "docs"}),
            (
                "priority",
                "0 is the most urgent, 9 the least.",
                {"type": "integer", "minimum": 0, "maximum": 9},
            ),
            (
                "metadata",
                "A JSON object, kept with the job.",
                {"type": "string", "example": '{"source":"wiki"}'},
            ),
        )
    ),
    *parameters_of(RequestedOptions),
]
JOB_REQUEST_DOCS: dict[str, Any] = {
    "parameters": STREAM_PARAMETERS,
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/JobRequest"},
                "example": {
                    "items": [
                        {"key": "a", "text": "A text to encode."},
                        {"key": "b", "text": "Another one."},
                    ],
                    "collection": "docs",
                    "priority": 5,
                    "options": {"long_texts": "truncate"},
                },
            },
            "application/x-ndjson": {
                "schema": {"$ref": "#/components/schemas/ItemBody"},
                "example": '{"key": "a", "text": "A text."}\n{"key": "b", "text": "Another.", "metadata": {"p": 2}}\n',
            },
        },
    },
}


class JobFilter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    state: str | None = Field(default=None, json_schema_extra={"enum": list(JOB_STATES)})
    limit: int = Field(default=50, ge=1, le=200)
    after: After = None


class ItemFilter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: int = Field(default=100, ge=1, le=1000)
    after: After = None


@router.post("/v1/jobs", status_code=202, openapi_extra=JOB_REQUEST_DOCS)
async def create_job(
    request: Request,
    response: Response,
    resources: ResourcesDependency,
    idempotency_key: IdempotencyKey,
) -> JobBody:
    """Takes items as one JSON object, or as a stream of NDJSON of any length (gzip accepted)."""
    job = await receive_job(request, resources, idempotency_key)
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    response.headers["Retry-After"] = str(POLL_AFTER_SECONDS)
    return job


@router.get("/v1/jobs")
def get_jobs(resources: ResourcesDependency, wanted: Annotated[JobFilter, Query()]) -> JobPage:
    """Jobs, newest first."""
    if wanted.state is not None and wanted.state not in JOB_STATES:
        detail = f"{wanted.state!r} is not a job state; the states are {', '.join(JOB_STATES)}."
        raise Problem(422, "invalid-request", detail, errors=[Place(detail, parameter="state")])
    before_seq = decode_cursor(wanted.after)
    with resources.engine.connect() as connection:
        jobs = list_jobs(connection, state=wanted.state, before_seq=before_seq, limit=wanted.limit + 1)
        page = jobs[: wanted.limit]
        bodies = describe_jobs(connection, page)
    return JobPage(
        data=bodies,
        next=encode_cursor(page[-1].seq) if len(jobs) > len(page) else None,
    )


@router.get("/v1/jobs/{job_id}")
def get_job(resources: ResourcesDependency, job_id: JobId) -> JobBody:
    """The job as it stands now."""
    with resources.engine.connect() as connection:
        return describe_job(connection, find_job(connection, job_id))


def wish_for(resources: Resources, wish: Wish, job_id: UUID) -> JobBody:
    """Apply a client's wish to the job and its twins, and return the job afterwards."""
    with resources.engine.begin() as connection:
        body = describe_job(connection, wish(connection, job_id))
    wish_for_twins(resources.engine, wish, job_id)
    return body


@router.post("/v1/jobs/{job_id}/cancel")
def post_cancel(resources: ResourcesDependency, job_id: JobId) -> JobBody:
    """Stops the job; vectors already committed stay. Twice is the same as once."""
    return wish_for(resources, cancel_job, job_id)


@router.post("/v1/jobs/{job_id}/pause")
def post_pause(resources: ResourcesDependency, job_id: JobId) -> JobBody:
    """Keeps back what no worker holds yet; chunks at a worker are finished. Twice is the same as once."""
    return wish_for(resources, pause_job, job_id)


@router.post("/v1/jobs/{job_id}/resume")
def post_resume(resources: ResourcesDependency, job_id: JobId) -> JobBody:
    """Lets a paused job go on. Twice is the same as once."""
    return wish_for(resources, resume_job, job_id)


def retry_unless_answered(connection: Connection, job_id: UUID) -> Job:
    """Raises WrongJobState, too when the answers of a batch are made of the job."""
    if find_job(connection, job_id).is_terminal:
        refuse_job_of_batch(connection, job_id, "retried")
    return retry_job(connection, job_id)


# The actions on a job that the API and the console share, by name.
WISHES: Final[dict[str, Wish]] = {
    "pause": pause_job,
    "resume": resume_job,
    "cancel": cancel_job,
    "retry": retry_unless_answered,
}


@router.post("/v1/jobs/{job_id}/retry")
def post_retry(resources: ResourcesDependency, job_id: JobId) -> JobBody:
    """Encodes the failed items of an ended or paused job again, and only these. A paused job stays paused."""
    return wish_for(resources, retry_unless_answered, job_id)


@router.delete("/v1/jobs/{job_id}", status_code=204)
def delete_job(resources: ResourcesDependency, job_id: JobId) -> None:
    """Removes an ended job with its texts, errors, and vectors that are in no collection; rows in collections stay.

    One that has not ended is refused with 409: cancel it first. From the answer on the job is not found any more; its
    disk space is free some seconds to minutes later.
    """
    with resources.engine.begin() as connection:
        refuse_job_of_batch(connection, job_id, "deleted")
        discard_job(connection, job_id)


@router.get("/v1/jobs/{job_id}/errors")
def get_errors(
    resources: ResourcesDependency, job_id: JobId, wanted: Annotated[ItemFilter, Query()]
) -> ItemErrorPage:
    """The items that failed, in the order of submission."""
    after = decode_cursor(wanted.after)
    with resources.engine.connect() as connection:
        errors = list_item_errors(connection, job_id, after=after, limit=wanted.limit + 1)
        find_job(
            connection, job_id
        )  # last: of a job that is deleted meanwhile no page is short, it is not found
    page = errors[: wanted.limit]
    return ItemErrorPage(
        data=[ItemErrorBody(key=error.key, code=error.code, detail=error.detail) for error in page],
        next=encode_cursor(page[-1].item) if len(errors) > len(page) else None,
    )


@router.get("/v1/jobs/{job_id}/truncated")
def get_truncated_items(
    resources: ResourcesDependency, job_id: JobId, wanted: Annotated[ItemFilter, Query()]
) -> TruncatedItemPage:
    """The items of more than max_tokens that were cut, in the order of submission.

    A page may have fewer than `limit` although more follow.
    """
    after = decode_cursor(wanted.after)
    with resources.engine.connect() as connection:
        page = list_truncated_items(connection, job_id, after=after, limit=wanted.limit)
        find_job(connection, job_id)
    return TruncatedItemPage(
        data=[TruncatedItemBody(key=item.key) for item in page.items],
        next=encode_cursor(page.items[-1].item) if page.has_more else None,
    )
