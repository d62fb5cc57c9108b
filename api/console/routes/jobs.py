"""The console's jobs: the list, and a job with its buttons, errors and results."""

from dataclasses import dataclass
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse
from sqlalchemy import Connection

from api.console.console import Console, ConsoleDependency, VisitorDependency
from api.console.jobs.views import JobView
from api.console.live import LiveStream, Rendered
from api.console.visitor import Visitor
from api.cursors import decode_cursor, encode_cursor
from api.dependencies import JobId, Resources, ResourcesDependency
from api.problems import Problem
from api.routes.jobs import WISHES, wish_for
from api.routes.results import get_results, get_vectors
from api.streams.vector_streams import ResultResponse
from vectormill.domain.tasks.task import VECTOR
from vectormill.files.formats import OutputName, RowsName
from vectormill.jobs.bodies import ResultQuery, VectorQuery
from vectormill.jobs.job import JOB_STATES
from vectormill.jobs.jobs import find_job, list_item_errors, list_jobs
from vectormill.jobs.waiting import explain_waits
from vectormill.workers.workers import count_open_jobs

router = APIRouter(include_in_schema=False)

JOBS_ON_A_PAGE: Final = 50
ERRORS_AT_ONCE: Final = 10
ERRORS_ON_A_PAGE: Final = 100


@dataclass(frozen=True, slots=True)
class ListView:
    """A page of the list. `open_jobs` counts those that have not ended, by state."""

    rows: list[JobView]
    next: str | None
    open_jobs: dict[str, int]
    state: str | None
    is_first: bool


def load_list(connection: Connection, console: Console, state: str | None, after: str | None) -> ListView:
    """Load jobs of one state or of all, newest first. Raise Problem."""
    if state is not None and state not in JOB_STATES:
        raise Problem(
            422, "invalid-request", f"{state!r} is not a job state; the states are {', '.join(JOB_STATES)}."
        )
    jobs = list_jobs(connection, state=state, before_seq=decode_cursor(after), limit=JOBS_ON_A_PAGE + 1)
    page = jobs[:JOBS_ON_A_PAGE]
    reasons = explain_waits(connection, page)
    counts: dict[str, int] = {}
    for entry in count_open_jobs(connection):
        counts[entry.state] = counts.get(entry.state, 0) + entry.num_jobs
    for job in page:
        if not job.is_terminal:
            console.histories.note(job)
    rows = [JobView(job, reasons.get(job.id), (), False, ()) for job in page]
    following = encode_cursor(page[-1].seq) if len(jobs) > len(page) else None
    return ListView(rows, following, counts, state, after is None)


def load_job(connection: Connection, console: Console, job_id: UUID) -> JobView:
    """Raise JobNotFound."""
    errors = list_item_errors(connection, job_id, after=None, limit=ERRORS_AT_ONCE + 1)
    job = find_job(connection, job_id)
    reason = explain_waits(connection, [job]).get(job_id)
    console.histories.note(job)
    return JobView(
        job, reason, errors[:ERRORS_AT_ONCE], len(errors) > ERRORS_AT_ONCE, console.histories.find(job_id)
    )


def render_list(resources: Resources, console: Console, state: str | None, after: str | None) -> Rendered:
    with resources.engine.connect() as connection:
        view = load_list(connection, console, state, after)
    return Rendered(console.render("jobs/table.html", None, view=view))


def render_job(resources: Resources, console: Console, visitor: Visitor, job_id: UUID) -> Rendered:
    with resources.engine.connect() as connection:
        view = load_job(connection, console, job_id)
    # Not the visitor: what is rendered is for all who may do the same.
    html = console.render("jobs/progress.html", None, view=view, can_write=visitor.can_write)
    return Rendered(html, is_last=view.job.is_terminal)


@router.get("/console/jobs")
async def get_jobs(
    request: Request,
    resources: ResourcesDependency,
    console: ConsoleDependency,
    state: str | None = None,
    after: str | None = None,
) -> HTMLResponse:
    table = await run_in_threadpool(render_list, resources, console, state, after)
    return console.page(request, "jobs/list.html", table=table.html, state=state, after=after)


@router.get("/console/jobs/live")
async def get_live_jobs(
    resources: ResourcesDependency,
    console: ConsoleDependency,
    state: str | None = None,
    after: str | None = None,
) -> LiveStream:
    decode_cursor(after)
    key = f"jobs {state} {after}"
    return LiveStream(resources, console.views, key, lambda: render_list(resources, console, state, after))


@router.get("/console/jobs/{job_id}")
async def get_job(
    request: Request,
    resources: ResourcesDependency,
    console: ConsoleDependency,
    visitor: VisitorDependency,
    job_id: JobId,
) -> HTMLResponse:
    progress = await run_in_threadpool(render_job, resources, console, visitor, job_id)
    return console.page(request, "jobs/job.html", progress=progress, job_id=job_id)


@router.get("/console/jobs/{job_id}/live")
async def get_live_job(
    resources: ResourcesDependency, console: ConsoleDependency, visitor: VisitorDependency, job_id: JobId
) -> LiveStream:
    key = f"job {job_id} {visitor.can_write}"
    return LiveStream(resources, console.views, key, lambda: render_job(resources, console, visitor, job_id))


@router.post("/console/jobs/{job_id}/{wish}")
def post_wish(
    resources: ResourcesDependency,
    console: ConsoleDependency,
    visitor: VisitorDependency,
    job_id: JobId,
    wish: str,
) -> HTMLResponse:
    """Carry out an action on a job, and return the job. Raise JobNotFound, WrongJobState and Problem."""
    if wish not in WISHES:
        raise Problem(404, "not-found", f"{wish!r} is none of a job's actions: {', '.join(WISHES)}.")
    wish_for(resources, WISHES[wish], job_id)
    return HTMLResponse(render_job(resources, console, visitor, job_id).html)


@router.get("/console/jobs/{job_id}/errors")
def get_errors(
    request: Request,
    resources: ResourcesDependency,
    console: ConsoleDependency,
    job_id: JobId,
    after: str | None = None,
) -> HTMLResponse:
    """Return the items that failed, in the order of submission."""
    position = decode_cursor(after)
    with resources.engine.connect() as connection:
        errors = list_item_errors(connection, job_id, after=position, limit=ERRORS_ON_A_PAGE + 1)
        job = find_job(connection, job_id)
    page = errors[:ERRORS_ON_A_PAGE]
    following = encode_cursor(page[-1].item) if len(errors) > len(page) else None
    return console.page(
        request, "jobs/errors.html", job=job, errors=page, next=following, is_first=after is None
    )


@router.get("/console/jobs/{job_id}/results")
def get_export(
    resources: ResourcesDependency, job_id: JobId, format: Annotated[OutputName, Query()] = "ndjson"
) -> ResultResponse:
    """Return the job's results as a file for a visitor with a session: the API's own routes take only a key."""
    with resources.engine.connect() as connection:
        job = find_job(connection, job_id)
    if job.spec.result == VECTOR:
        return get_vectors(resources, job_id, VectorQuery(format=format, partial=True))
    rows: RowsName = "parquet" if format == "parquet" else "ndjson"
    return get_results(resources, job_id, ResultQuery(format=rows, partial=True))
