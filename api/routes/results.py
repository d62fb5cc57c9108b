"""The results of a job over HTTP: a stream of vectors, scores or records in the requested format."""

from uuid import UUID

from fastapi import APIRouter

from api.dependencies import JobId, Resources, ResourcesDependency
from api.serving import serve
from api.streams.row_streams import PieceResponse, ResultResponse, start_reading
from vectormill.domain.errors import InvalidOption, WrongJobState
from vectormill.domain.task import RESULTS, SCORE, VECTOR
from vectormill.jobs import operations
from vectormill.jobs.certificates import write_certificate_lines
from vectormill.jobs.export import read_results
from vectormill.jobs.job import UPLOADING
from vectormill.jobs.jobs import find_job
from vectormill.jobs.operations import ResultQuery, VectorQuery

router = APIRouter(tags=["results"])


@serve(router, operations.EXPORT_VECTORS)
def get_vectors(resources: ResourcesDependency, job_id: JobId, query: VectorQuery) -> ResultResponse:
    """Return the vectors of a job of the task `embed`.

    `ndjson`: one `{"key", "embedding"}` per line, with as many digits as the stored numbers have (a
    collection stores float16: four or five). `parquet`: columns key and embedding. Both omit items without a
    vector. `npy`: [num_items, width] in the order of submission, with NaN for items without a vector, or
    zeros in a type without NaN. Numbers have the job's vector_type, float32 if it names none: int8 codes are
    -128 to 127, and binary has eight bits per number, 0 to 255, with the first value in the highest bit.
    """
    return export_results(resources, job_id, query, RESULTS[VECTOR].route)


@serve(router, operations.EXPORT_RESULTS)
def get_results(resources: ResourcesDependency, job_id: JobId, query: ResultQuery) -> ResultResponse:
    """Return the results of a job of the task `score` or `extract`. Items that failed are omitted.

    For the task `score`, `ndjson` has one `{"key", "score", "label", "probabilities"}` per line, and
    `parquet` the same as columns, where probabilities has a field for each label. With two labels, the score
    is the second one's number; with more, the best label's; with a single number there is no label. For the
    task `extract`, `ndjson` has `{"key", "output"}` per line, and `parquet` the output as JSON. An output is
    a list of records, each a list of `type`, `span` and `offset` in code points, from a type of the schema's
    root to a leaf.
    """
    return export_results(resources, job_id, query, RESULTS[SCORE].route)


@serve(router, operations.CERTIFY)
def get_certificate(resources: ResourcesDependency, job_id: JobId) -> PieceResponse:
    """Return the certificate of an ended job, one JSON object per line.

    The first line has the job, its spec and its counts. A line of kind `chunk` has the SHA-256 over key, content hash
    and result hash of each of its items, the id of its proof, and whether it is suspect; a line of kind `proof`
    precedes the first chunk that names it, with the worker and what it ran. The last line has the SHA-256 over all
    lines before it.
    """
    lines = start_reading(write_certificate_lines(resources.engine, job_id))
    return PieceResponse(lines, operations.CERTIFY.media_types[0], {})


def export_results(
    resources: Resources, job_id: UUID, query: VectorQuery | ResultQuery, route: str
) -> ResultResponse:
    """Return the results of a job, if this is the route of their kind, and it has ended or partial ones are wanted.

    Raise JobNotFound, WrongJobState, and InvalidOption if `after` is given for a format that can only be exported from
    the beginning.
    """
    if query.after is not None and query.format != "ndjson":
        raise InvalidOption(f"Only ndjson can be resumed after a key, and {query.format} cannot: omit after.")
    with resources.engine.connect() as connection:
        job = find_job(connection, job_id)
    own = job.spec.result
    if RESULTS[own].route != route:
        usual = next(result.name for result in RESULTS.values() if result.route == route)
        raise WrongJobState(
            f"The job has {own}s, not {usual}s: use GET /v1/jobs/{job_id}/{RESULTS[own].route}."
        )
    if job.state == UPLOADING or not (job.is_terminal or query.partial):
        raise WrongJobState(
            f"The job is {job.state}; its {own}s can be exported when it has ended, or earlier with "
            "partial=true."
        )
    return ResultResponse(
        job, query.format, start_reading(read_results(resources.engine, job_id, query.after))
    )
