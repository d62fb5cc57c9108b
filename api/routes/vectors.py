"""A job's vectors over HTTP, as a stream in the format asked for."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from api.dependencies import JobId, Resources, ResourcesDependency
from api.streams.vector_streams import VECTOR_FORMATS, ResultResponse, start_reading
from vectormill.domain.errors import InvalidOption, WrongJobState
from vectormill.domain.tasks.task import RESULT_ROUTES, VECTOR
from vectormill.files.formats import OUTPUT_FORMATS, OutputName
from vectormill.jobs.export import read_vectors
from vectormill.jobs.job import UPLOADING, Job
from vectormill.jobs.jobs import find_job

router = APIRouter(tags=["vectors"])

DESCRIPTION = (
    '`ndjson`: one `{"key", "embedding"}` a line, with as many digits as the stored numbers have (a collection keeps '
    "float16: four or five). `parquet`: columns key and embedding. Both leave out items that have no vector. "
    "`npy`: [num_items, width] in the order of submission, NaN where there is no vector, zeros in a type without NaN. "
    "Numbers are of the job's vector_type, float32 where it names none: int8 codes are -128 to 127, and binary is "
    "eight bits to a number, 0 to 255, the first value in the highest bit."
)


# Any key that Postgres can hold.
After = Annotated[
    str | None,
    Field(
        pattern=r"^[^\u0000]*$",
        max_length=10_000,
        description="Only items behind the one with this key: an export of ndjson that broke off goes on.",
    ),
]


class ExportFilter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: OutputName = "ndjson"
    partial: bool = Field(default=False, description="Export what is there although the job has not ended.")
    after: After = None


@router.get(
    "/v1/jobs/{job_id}/vectors",
    description=DESCRIPTION,
    response_class=Response,
    responses={200: {"content": {OUTPUT_FORMATS[name].media_type: {} for name in VECTOR_FORMATS}}},
)
def get_vectors(
    resources: ResourcesDependency, job_id: JobId, wanted: Annotated[ExportFilter, Query()]
) -> ResultResponse:
    refuse_to_go_on(wanted.format, wanted.after)
    job = find_readable_job(resources, job_id, (VECTOR,), partial=wanted.partial)
    blocks = start_reading(read_vectors(resources.engine, job_id, wanted.after))
    return ResultResponse(job, VECTOR_FORMATS[wanted.format], blocks)


def refuse_to_go_on(format: str, after: str | None) -> None:
    """Raises InvalidOption for a format that cannot begin in the middle."""
    if after is not None and format != "ndjson":
        raise InvalidOption(
            f"Only ndjson goes on behind a key; {format} is whole or nothing: leave out after."
        )


def find_readable_job(resources: Resources, job_id: UUID, results: tuple[str, ...], *, partial: bool) -> Job:
    """The job, if one of these is what comes of its items and it has ended, or need not have. Raises JobNotFound and
    WrongJobState.
    """
    with resources.engine.connect() as connection:
        job = find_job(connection, job_id)
    own = job.spec.result
    if own not in results:
        raise WrongJobState(
            f"The job has {own}s and no {results[0]}s: GET /v1/jobs/{job_id}/{RESULT_ROUTES[own]}."
        )
    if job.state == UPLOADING or not (job.is_terminal or partial):
        raise WrongJobState(
            f"The job is {job.state}; its {own}s can be exported when it has ended, or before with partial=true."
        )
    return job
