"""Batches over HTTP, as clients of OpenAI's interface know them: make, list, look, cancel."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.concurrency import run_in_threadpool

from api.dependencies import Resources, ResourcesDependency
from api.door.media_types import require_json
from api.intake.idempotency import IdempotencyKey
from api.intake.intake import Intake
from api.intake.requests import decode_body
from api.intake.submissions import is_storable, read_body
from api.problems import Place, Problem
from vectormill.batches.batches import cancel_batch, create_batch, find_batch, list_batches
from vectormill.batches.bodies import (
    BATCH_DECODER,
    BATCH_DOCS,
    BatchBody,
    BatchFilter,
    BatchPage,
    BatchRequest,
)
from vectormill.batches.request_batch import NewRequestBatch, parse_batch_name, parse_file_name

router = APIRouter(tags=["batches"])


async def take_batch_id(
    batch_id: Annotated[str, Path(description="As the batch's `id` has it: `batch_` and 32 letters.")],
) -> UUID:
    """Raises RequestBatchNotFound."""
    return parse_batch_name(batch_id)


BatchId = Annotated[UUID, Depends(take_batch_id)]


@router.post("/v1/batches", openapi_extra=BATCH_DOCS)
async def post_batch(
    request: Request,
    resources: ResourcesDependency,
    idempotency_key: IdempotencyKey,
) -> BatchBody:
    """Answers the lines of a file by a job, and then by a file of answers.

    The same request again, while its batch has not ended or for ten minutes, answers the same batch: clients repeat
    what was not answered in time. Other metadata, or an Idempotency-Key of its own, makes another.
    """
    require_json(request)
    with resources.gates.json_bytes.hold() as hold:
        wanted = decode_body(await read_body(request, resources.settings, hold), BATCH_DECODER)
    return await run_in_threadpool(create, resources, wanted, idempotency_key)


def create(resources: Resources, wanted: BatchRequest, idempotency_key: str | None) -> BatchBody:
    """Raises Problem and what create_batch raises."""
    Intake(resources.settings).look(resources.engine)  # how many items it brings is known when it is read
    words = [word for pair in (wanted.metadata or {}).items() for word in pair]
    if not all(map(is_storable, "".join(words))):
        reason = "metadata contains a NUL character or half of a UTF-16 surrogate pair"
        raise Problem(422, "invalid-option", f"{reason}.", errors=[Place(reason, pointer="/metadata")])
    expires_after = wanted.output_expires_after
    new = NewRequestBatch(
        endpoint=wanted.endpoint,
        input_file_id=parse_file_name(wanted.input_file_id),
        completion_window=wanted.completion_window,
        metadata=wanted.metadata,
        output_lifetime_seconds=None if expires_after is None else float(expires_after.seconds),
        idempotency_key=idempotency_key,
    )
    with resources.engine.begin() as connection:
        return BatchBody.from_batch(create_batch(connection, new))


@router.get("/v1/batches")
def get_batches(resources: ResourcesDependency, wanted: Annotated[BatchFilter, Query()]) -> BatchPage:
    """Batches, newest first."""
    after = None if wanted.after is None else parse_batch_name(wanted.after)
    with resources.engine.connect() as connection:
        batches = list_batches(connection, after=after, limit=wanted.limit + 1)
    page = [BatchBody.from_batch(batch) for batch in batches[: wanted.limit]]
    return BatchPage(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(batches) > len(page),
    )


@router.get("/v1/batches/{batch_id}")
def get_batch(resources: ResourcesDependency, batch_id: BatchId) -> BatchBody:
    with resources.engine.connect() as connection:
        return BatchBody.from_batch(find_batch(connection, batch_id))


@router.post("/v1/batches/{batch_id}/cancel")
def post_cancel(resources: ResourcesDependency, batch_id: BatchId) -> BatchBody:
    """Stops the batch; lines that have an answer are in its output file. Twice is the same as once."""
    with resources.engine.begin() as connection:
        return BatchBody.from_batch(cancel_batch(connection, batch_id))
