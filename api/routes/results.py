"""A job's results that are no vectors over HTTP, as a stream in the format asked for."""

from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from api.dependencies import JobId, ResourcesDependency
from api.routes.vectors import After, find_readable_job, refuse_to_go_on
from api.streams.result_formats import RESULT_STREAMS
from api.streams.score_streams import SCORE_FORMATS
from api.streams.vector_streams import ResultResponse, start_reading
from vectormill.files.formats import RowsName

router = APIRouter(tags=["results"])

DESCRIPTION = (
    'Of the task `score`. `ndjson`: one `{"key", "score", "label", "probabilities"}` a line. `parquet`: the same as '
    "columns, of which probabilities has a field for each label. Both leave out items that failed. The score of two "
    "labels is the second one's number, of more the best label's; of one number there is no label. "
    'Of the task `extract`: `ndjson` has `{"key", "output"}` a line, `parquet` the output as JSON. An output is a list '
    "of records, each a list of `type`, `span` and `offset` in code points, from a type of the schema's root to a leaf."
)


class ResultFilter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: RowsName = "ndjson"
    partial: bool = Field(default=False, description="Read what is there although the job has not ended.")
    after: After = None


@router.get(
    "/v1/jobs/{job_id}/results",
    description=DESCRIPTION,
    response_class=Response,
    responses={200: {"content": {row.output.media_type: {} for row in SCORE_FORMATS.values()}}},
)
def get_results(
    resources: ResourcesDependency, job_id: JobId, wanted: Annotated[ResultFilter, Query()]
) -> ResultResponse:
    refuse_to_go_on(wanted.format, wanted.after)
    job = find_readable_job(resources, job_id, tuple(RESULT_STREAMS), partial=wanted.partial)
    stream = RESULT_STREAMS[job.spec.result]
    return ResultResponse(
        job, stream.formats[wanted.format], start_reading(stream.read(resources.engine, job_id, wanted.after))
    )
