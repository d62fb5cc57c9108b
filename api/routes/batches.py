"""Files and batches over HTTP, compatible with OpenAI's clients."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Path, Request
from sqlalchemy import Connection

from api.dependencies import ResourcesDependency
from api.intake.file_uploads import receive_file
from api.intake.intake import Intake
from api.intake.requests import IdempotencyKey
from api.problems import refuse
from api.serving import serve
from api.streams.row_streams import PieceResponse, start_reading
from vectormill.batches import operations
from vectormill.batches.answers import read_content
from vectormill.batches.batches import cancel_batch, create_batch, find_batch, list_batches
from vectormill.batches.files import discard_file, find_file, list_files
from vectormill.batches.operations import (
    BatchBody,
    BatchPage,
    BatchQuery,
    BatchRequest,
    DeletedFile,
    FileBody,
    FilePage,
    FileQuery,
    describe_batch,
    describe_file,
    make_page,
)
from vectormill.batches.request_batch import (
    NewRequestBatch,
    name_file,
    parse_batch_name,
    parse_file_name,
)
from vectormill.collections.index_plan import is_storable

router = APIRouter(tags=["batches"])
file_router = APIRouter(tags=["files"])


def take_file_id(
    file_id: Annotated[str, Path(description="The file's `id`: `file-` and 32 letters.")],
) -> UUID:
    """Return the file's id in the path. Raise RequestFileNotFound."""
    return parse_file_name(file_id)


def take_batch_id(
    batch_id: Annotated[str, Path(description="The batch's `id`: `batch_` and 32 letters.")],
) -> UUID:
    """Return the batch's id in the path. Raise RequestBatchNotFound."""
    return parse_batch_name(batch_id)


FileId = Annotated[UUID, Depends(take_file_id)]
BatchId = Annotated[UUID, Depends(take_batch_id)]


@serve(file_router, operations.UPLOAD)
async def post_file(
    request: Request, resources: ResourcesDependency, idempotency_key: IdempotencyKey
) -> FileBody:
    """Upload a file of requests, with any number of lines, as a stream. The response comes once it is stored."""
    return describe_file(await receive_file(request, resources, idempotency_key))


@serve(file_router, operations.LIST_FILES)
def get_files(connection: Connection, query: FileQuery) -> FilePage:
    """List files, newest first unless another order is requested."""
    after = None if query.after is None else parse_file_name(query.after)
    found = list_files(
        connection,
        purpose=query.purpose,
        after=after,
        is_newest_first=query.order == "desc",
        limit=query.limit + 1,
    )
    return make_page(FilePage, [describe_file(file) for file in found], query.limit)


@serve(file_router, operations.SHOW_FILE)
def get_file(connection: Connection, file_id: FileId) -> FileBody:
    """Show one file."""
    return describe_file(find_file(connection, file_id))


@serve(file_router, operations.READ_FILE)
def get_content(resources: ResourcesDependency, file_id: FileId) -> PieceResponse:
    """Read the content of a file as a stream, the same every time."""
    with resources.engine.connect() as connection:
        file = find_file(connection, file_id)
    headers = {"Content-Disposition": f'attachment; filename="{file.name}.jsonl"'}
    if file.batch_id is None:  # a file that is made while it is read is sent without a length
        headers["Content-Length"] = str(file.num_bytes)
    content = start_reading(read_content(resources.engine, file))
    return PieceResponse(content, operations.READ_FILE.media_types[0], headers)


@serve(file_router, operations.DELETE_FILE)
def delete_file(connection: Connection, file_id: FileId) -> DeletedFile:
    """Delete the file; its disk space is freed some seconds later."""
    discard_file(connection, file_id)
    return DeletedFile(id=name_file(file_id), object="file", deleted=True)


@serve(router, operations.CREATE)
def post_batch(
    resources: ResourcesDependency, body: BatchRequest, idempotency_key: IdempotencyKey
) -> BatchBody:
    """Create a batch: a job encodes the lines of a file, and the answers become another file.

    Repeating the request returns the same batch while that is in progress, or if it completed and was created
    in the last ten minutes, because clients repeat requests that get no response in time. A cancelled batch
    is not returned again. Other metadata or another Idempotency-Key creates another batch.
    """
    Intake(resources.settings).look(resources.engine)  # its number of items is not known yet
    if not is_storable("".join(word for pair in (body.metadata or {}).items() for word in pair)):
        reason = "metadata contains a NUL character or half of a UTF-16 surrogate pair"
        raise refuse(reason, code="invalid-option", pointer="/metadata")
    expires_after = body.output_expires_after
    new = NewRequestBatch(
        endpoint=body.endpoint,
        input_file_id=parse_file_name(body.input_file_id),
        completion_window=body.completion_window,
        metadata=body.metadata,
        output_lifetime_seconds=None if expires_after is None else float(expires_after.seconds),
        idempotency_key=idempotency_key,
    )
    with resources.engine.begin() as connection:
        return describe_batch(create_batch(connection, new))


@serve(router, operations.LIST)
def get_batches(connection: Connection, query: BatchQuery) -> BatchPage:
    """List batches, newest first."""
    after = None if query.after is None else parse_batch_name(query.after)
    found = list_batches(connection, after=after, limit=query.limit + 1)
    return make_page(BatchPage, [describe_batch(batch) for batch in found], query.limit)


@serve(router, operations.SHOW)
def get_batch(connection: Connection, batch_id: BatchId) -> BatchBody:
    """Show one batch: its state, its counts, and its files when it has ended."""
    return describe_batch(find_batch(connection, batch_id))


@serve(router, operations.CANCEL)
def post_cancel(connection: Connection, batch_id: BatchId) -> BatchBody:
    """Cancel the batch; lines already answered are in its output file. Repeating this changes nothing."""
    return describe_batch(cancel_batch(connection, batch_id))
