"""Runs over HTTP: started, shown, listed, cancelled and confirmed."""

from contextlib import suppress
from typing import Annotated, Final
from uuid import UUID

import msgspec
from fastapi import APIRouter, Depends, Path, Response
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Connection

from api.dependencies import CollectionName, Resources, ResourcesDependency, find_id
from api.intake.requests import IdempotencyKey
from api.routes.sources import quote_source
from api.serving import cut_page, decode_cursor, respond, serve
from vectormill.collections.collections import find_generation
from vectormill.db.idempotency import make_once
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption, JobNotFound, RunNotFound
from vectormill.jobs.job import NewJob
from vectormill.jobs.jobs import find_job
from vectormill.jobs.operations import QuoteBody
from vectormill.models.registry import explain_reading, respecify
from vectormill.operation import PageQuery
from vectormill.runs import operations
from vectormill.runs.operations import RunBody, RunPage, RunRequest, describe_run
from vectormill.runs.run import ENCODING, REINDEX, Run
from vectormill.runs.runs import (
    LIST_RUNS_BY_ID,
    cancel_run,
    confirm_run,
    create_run,
    find_run,
    list_runs,
    position_of,
    refuse_without_texts,
)
from vectormill.sources.source import OWN_TEXTS, Source
from vectormill.sources.sources import find_source_by_id

router = APIRouter(tags=["runs"])
# Options of a run that stand behind those of earlier releases where repeated requests are compared.
COMPARED_LAST: Final = (
    "priority", "least_recall", "least_cosine", "canary_sample", "most_failed_share", "model",
)  # fmt: skip


async def take_run_id(
    resources: ResourcesDependency,
    run_id: Annotated[str, Path(description="The run's id, a UUID, or its first digits, at least eight.")],
) -> UUID:
    """Return the id of the run in the path. Raise RunNotFound."""
    return await find_id(resources, LIST_RUNS_BY_ID, run_id, RunNotFound)


RunId = Annotated[UUID, Depends(take_run_id)]


@serve(router, operations.START)
async def post_run(
    resources: ResourcesDependency,
    name: CollectionName,
    body: RunRequest,
    idempotency_key: IdempotencyKey,
) -> Response:
    """Start a run, which an indexer carries out. A collection has one run in progress; others wait."""
    if body.dry_run:
        with resources.gates.quotes.enter():
            quoted = await run_in_threadpool(quote_reindex, resources, name, body)
        return respond(operations.START, quoted, status=200)
    run = await run_in_threadpool(start_run, resources, name, body, idempotency_key)
    return respond(operations.START, describe_run(run))


def start_run(resources: Resources, name: str, body: RunRequest, idempotency_key: str | None) -> Run:
    """Create the run of a request, or find that of an earlier one with its Idempotency-Key."""

    def make() -> str:
        spec = choose_spec(connection, resources, name, body)
        if body.kind == REINDEX:
            refuse_without_texts(connection, name)
        run = create_run(connection, name, body.kind, options=body.options.to_options(), spec=spec)
        assert run is not None, "only a due time of a schedule can have a run already"
        return str(run.id)

    content = write_compared(name, body)
    with resources.engine.begin() as connection:
        return find_run(connection, UUID(make_once(connection, "run", idempotency_key, content, make)))


def write_compared(name: str, body: RunRequest) -> bytes:
    """Return what a repeated request is compared by: what it was in earlier releases, whose keys stay valid.

    `dry_run`, which is false for a run, is left out, and `sample` comes before the options that are younger.
    """
    options = msgspec.to_builtins(body.options)
    compared = {each: options[each] for each in sorted(options, key=COMPARED_LAST.__contains__)}
    return f"{name}\n".encode() + msgspec.json.encode({"kind": body.kind, "options": compared})


def quote_reindex(resources: Resources, name: str, body: RunRequest) -> QuoteBody:
    """Return the quote of a re-index from a sample of the collection's source; kept rows are not encoded again."""
    if body.kind != REINDEX:
        raise InvalidOption(f"Only a run of kind {REINDEX} can be quoted; this is one of kind {body.kind}.")
    with resources.engine.connect() as connection:
        live = find_generation(connection, name)
        spec = choose_spec(connection, resources, name, body) or live.spec
        refuse_without_texts(connection, name)
        source = find_source_by_id(connection, live.collection_id) or Source(OWN_TEXTS, {})
    job = NewJob(spec, collection=name, priority=body.options.priority)
    return quote_source(resources, source, job, skips_kept=True)


def choose_spec(
    connection: Connection, resources: Resources, name: str, body: RunRequest
) -> EncodingSpec | None:
    """Return the live generation's spec changed by the options of the request, or None if nothing changes.

    A re-index without options changes the spec where the model's files are read otherwise than for the live one. Raise
    InvalidOption for options of a run that makes no vectors.
    """
    live = find_generation(connection, name)
    wanted = body.options.of_spec()
    if not wanted:
        if body.kind == REINDEX and explain_reading(resources.registry, name, live.spec):
            return respecify(resources.registry, live.spec)
        return None
    if body.kind != REINDEX:
        raise InvalidOption(
            f"A run of kind {body.kind} creates no vectors; {', '.join(wanted)} can only be set for kind "
            f"{REINDEX}."
        )
    return respecify(resources.registry, live.spec, **wanted)


@serve(router, operations.LIST_OF)
def get_runs_of_collection(connection: Connection, name: CollectionName, query: PageQuery) -> RunPage:
    """List the runs of a collection, newest first."""
    return read_page(connection, name, query)


@serve(router, operations.LIST)
def get_runs(connection: Connection, query: PageQuery) -> RunPage:
    """List the runs of all collections, newest first."""
    return read_page(connection, None, query)


def read_page(connection: Connection, collection: str | None, query: PageQuery) -> RunPage:
    before = decode_cursor(query.after)
    found = list_runs(connection, collection=collection, before=before, limit=query.limit + 1)
    page, cursor = cut_page(found, query.limit, position_of)
    return RunPage(data=[describe_run(run) for run in page], next=cursor)


@serve(router, operations.SHOW)
def get_run(connection: Connection, run_id: RunId) -> RunBody:
    """Return the current state of a run."""
    run = find_run(connection, run_id)
    encoding_job = None
    if run.job_id is not None and run.phase == ENCODING and not run.is_terminal:
        with suppress(JobNotFound):
            encoding_job = find_job(connection, run.job_id)
    return describe_run(run, encoding_job)


@serve(router, operations.CANCEL)
def post_cancel(connection: Connection, run_id: RunId) -> RunBody:
    """Cancel a run and the job that encodes for it; what it has written stays. Repeating this changes nothing."""
    return describe_run(cancel_run(connection, run_id))


@serve(router, operations.CONFIRM)
def post_confirm(connection: Connection, run_id: RunId) -> RunBody:
    """Confirm a held run, so that it does what it was held for; its `error` says what that is."""
    return describe_run(confirm_run(connection, run_id))
