"""Jobs over HTTP: submit, show, list, pause, resume, cancel, retry, delete, and the errors of single items."""

from typing import Final
from uuid import UUID

from fastapi import APIRouter, Request, Response
from sqlalchemy import Connection

from api.dependencies import JobId, Resources, ResourcesDependency
from api.event_stream import EventStream
from api.intake.requests import IdempotencyKey
from api.intake.submissions import receive_job
from api.problems import refuse
from api.serving import cut_page, decode_cursor, encode_cursor, respond, serve, write_answer
from vectormill.batches.batches import refuse_job_of_batch
from vectormill.jobs import operations
from vectormill.jobs.chunks import list_truncated_items
from vectormill.jobs.deletion import discard_job
from vectormill.jobs.dual_writes import JobChange, change_twins
from vectormill.jobs.job import JOB_STATES, TERMINAL_JOB_STATES, Job
from vectormill.jobs.jobs import (
    cancel_job,
    find_job,
    list_item_errors,
    list_jobs,
    pause_job,
    resume_job,
    retry_job,
)
from vectormill.jobs.operations import (
    ItemErrorBody,
    ItemErrorPage,
    ItemQuery,
    JobBody,
    JobPage,
    JobQuery,
    SubmissionQuery,
    SuspectChunkBody,
    SuspectChunkPage,
    TruncatedItemBody,
    TruncatedItemPage,
)
from vectormill.jobs.recomputation import list_suspect_chunks
from vectormill.jobs.wait_reasons import make_job_bodies, make_job_body
from vectormill.operation import PageQuery, describe

router = APIRouter(tags=["jobs"])

# The client should first ask for the job's state after this time.
POLL_AFTER_SECONDS: Final = 1


@serve(router, operations.SUBMIT)
async def create_job(
    request: Request,
    resources: ResourcesDependency,
    idempotency_key: IdempotencyKey,
    query: SubmissionQuery,
) -> Response:
    """Submit items as one JSON object, or as a stream of NDJSON of any length (gzip accepted)."""
    answer = await receive_job(request, resources, idempotency_key, query)
    if "id" not in answer:  # the quote of a dry run
        return respond(operations.SUBMIT, answer, status=200)
    return respond(operations.SUBMIT, answer, headers={"Retry-After": str(POLL_AFTER_SECONDS)})


def refuse_unknown_state(state: str | None) -> None:
    """Raise Problem for what is no state of jobs."""
    if state is not None and state not in JOB_STATES:
        reason = f"Unknown job state {state!r}; expected one of: {', '.join(JOB_STATES)}."
        raise refuse(reason, parameter="state")


@serve(router, operations.LIST)
def get_jobs(connection: Connection, query: JobQuery) -> JobPage:
    """List jobs, newest first."""
    refuse_unknown_state(query.state)
    jobs = list_jobs(
        connection,
        state=query.state,
        collection=query.collection,
        since=query.since,
        until=query.until,
        before_seq=decode_cursor(query.after),
        limit=query.limit + 1,
    )
    page, cursor = cut_page(jobs, query.limit, lambda job: job.seq)
    return JobPage(data=make_job_bodies(connection, page), next=cursor)


@serve(router, operations.SHOW)
def get_job(connection: Connection, job_id: JobId) -> JobBody:
    """Return the current state of the job."""
    return make_job_body(connection, find_job(connection, job_id))


def change_job(change: JobChange, resources: Resources, job_id: UUID) -> JobBody:
    """Apply a change that a client requests to the job and its twins, and return the changed job."""
    with resources.engine.begin() as connection:
        body = make_job_body(connection, change(connection, job_id))
    change_twins(resources.engine, change, job_id)
    return body


@serve(router, operations.CANCEL)
def post_cancel(resources: ResourcesDependency, job_id: JobId) -> JobBody:
    """Cancel the job; vectors already committed are kept. Repeating this changes nothing."""
    return change_job(cancel_job, resources, job_id)


@serve(router, operations.PAUSE)
def post_pause(resources: ResourcesDependency, job_id: JobId) -> JobBody:
    """Pause the job; chunks that a worker has are still finished. Repeating this changes nothing."""
    return change_job(pause_job, resources, job_id)


@serve(router, operations.RESUME)
def post_resume(resources: ResourcesDependency, job_id: JobId) -> JobBody:
    """Resume a paused job. Repeating this changes nothing."""
    return change_job(resume_job, resources, job_id)


def retry_unless_answered(connection: Connection, job_id: UUID) -> Job:
    """Retry a job. Raise WrongJobState, also if the answers of a batch are made from the job's results."""
    if find_job(connection, job_id).is_terminal:
        refuse_job_of_batch(connection, job_id, "retried")
    return retry_job(connection, job_id)


# The actions on a job that the API and the console share, by name.
JOB_CHANGES: Final[dict[str, JobChange]] = {
    "pause": pause_job,
    "resume": resume_job,
    "cancel": cancel_job,
    "retry": retry_unless_answered,
}


@serve(router, operations.RETRY)
def post_retry(resources: ResourcesDependency, job_id: JobId) -> JobBody:
    """Retry the failed items of an ended or paused job, and no others. A paused job stays paused."""
    return change_job(retry_unless_answered, resources, job_id)


@serve(router, operations.DELETE)
def delete_job(connection: Connection, job_id: JobId) -> None:
    """Delete an ended job with its texts, errors, and vectors that are in no collection; rows in collections stay.

    409 if the job has not ended: cancel it first. The job is gone once this responds; its disk space is freed
    seconds to minutes later.
    """
    refuse_job_of_batch(connection, job_id, "deleted")
    discard_job(connection, job_id)


@serve(router, operations.LIST_ERRORS)
def get_errors(connection: Connection, job_id: JobId, query: ItemQuery) -> ItemErrorPage:
    """List the items that failed, in the order of submission."""
    after = decode_cursor(query.after)
    errors = list_item_errors(connection, job_id, after=after, limit=query.limit + 1)
    # Last, so that a job deleted meanwhile is not found instead of giving a short page.
    find_job(connection, job_id)
    page, cursor = cut_page(errors, query.limit, lambda error: error.item)
    return ItemErrorPage(data=[describe(ItemErrorBody, error) for error in page], next=cursor)


@serve(router, operations.LIST_TRUNCATED)
def get_truncated_items(connection: Connection, job_id: JobId, query: ItemQuery) -> TruncatedItemPage:
    """List the items that were truncated because they have more than max_tokens, in the order of submission.

    A page may have fewer than `limit` items even if more follow.
    """
    after = decode_cursor(query.after)
    page = list_truncated_items(connection, job_id, after=after, limit=query.limit)
    find_job(connection, job_id)
    return TruncatedItemPage(
        data=[TruncatedItemBody(key=item.key) for item in page.items],
        next=encode_cursor(page.items[-1].item) if page.has_more else None,
    )


@serve(router, operations.LIST_SUSPECT)
def get_suspect_chunks(connection: Connection, query: PageQuery) -> SuspectChunkPage:
    """List the chunks of all jobs whose results a faulty worker computed, and which cannot be encoded again."""
    after = decode_cursor(query.after)
    found = list_suspect_chunks(connection, after=after, limit=query.limit + 1)
    page, cursor = cut_page(found, query.limit, lambda chunk: chunk.id)
    return SuspectChunkPage(data=[describe(SuspectChunkBody, chunk) for chunk in page], next=cursor)


class JobEvents(EventStream[JobBody]):
    def read(self) -> JobBody:
        with self._resources.engine.connect() as connection:
            return make_job_body(connection, find_job(connection, self._key))

    def write(self, value: JobBody) -> bytes:
        name = b"end" if self.is_last(value) else b"progress"
        return b"event: %s\ndata: %s\n\n" % (name, write_answer(value))

    def is_last(self, value: JobBody) -> bool:
        return value["state"] in TERMINAL_JOB_STATES

    def has_moved(self, last: JobBody, value: JobBody) -> bool:
        """Return whether followers are told: state or counts differ, or there is a new reason to wait.

        The end of a wait is no news, since the progress of items shows it.
        """
        if any(value[name] != last[name] for name in ("state", "num_done", "num_failed")):
            return True
        return value["waiting_because"] not in (None, last["waiting_because"])


@serve(router, operations.FOLLOW)
async def get_events(resources: ResourcesDependency, job_id: JobId) -> JobEvents:
    """Send `progress` events with the job as data whenever it has changed; the last event is `end`."""
    return JobEvents(resources, resources.watch, job_id)
