"""Files over HTTP, as clients of OpenAI's interface know them: upload, list, look, read, delete."""

from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from api.dependencies import ResourcesDependency
from api.intake.file_uploads import receive_file
from api.intake.idempotency import IdempotencyKey
from api.problems import Place, Problem
from api.streams.vector_streams import PieceResponse, start_reading
from vectormill.batches.answers import read_content
from vectormill.batches.bodies import FILE_FORM, DeletedFile, FileBody, FileFilter, FilePage
from vectormill.batches.files import discard_file, find_file, list_files
from vectormill.batches.request_batch import PURPOSES, name_file, parse_file_name

router = APIRouter(tags=["files"])

CONTENT_TYPE: Final = "application/octet-stream"


async def take_file_id(
    file_id: Annotated[str, Path(description="As the file's `id` has it: `file-` and 32 letters.")],
) -> UUID:
    """Raises RequestFileNotFound."""
    return parse_file_name(file_id)


FileId = Annotated[UUID, Depends(take_file_id)]


@router.post("/v1/files", openapi_extra=FILE_FORM)
async def post_file(
    request: Request, resources: ResourcesDependency, idempotency_key: IdempotencyKey
) -> FileBody:
    """Takes a file of requests as a stream, of any number of lines; it is there when it is answered."""
    return FileBody.from_file(await receive_file(request, resources, idempotency_key))


@router.get("/v1/files")
def get_files(resources: ResourcesDependency, wanted: Annotated[FileFilter, Query()]) -> FilePage:
    """Files, newest first unless another order is asked for."""
    if wanted.purpose is not None and wanted.purpose not in PURPOSES:
        detail = f"{wanted.purpose[:50]!r} is no purpose of a file here; there are {', '.join(PURPOSES)}."
        raise Problem(422, "invalid-request", detail, errors=[Place(detail, parameter="purpose")])
    after = None if wanted.after is None else parse_file_name(wanted.after)
    with resources.engine.connect() as connection:
        files = list_files(
            connection,
            purpose=wanted.purpose,
            after=after,
            is_newest_first=wanted.order == "desc",
            limit=wanted.limit + 1,
        )
    page = [FileBody.from_file(file) for file in files[: wanted.limit]]
    return FilePage(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(files) > len(page),
    )


@router.get("/v1/files/{file_id}")
def get_file(resources: ResourcesDependency, file_id: FileId) -> FileBody:
    with resources.engine.connect() as connection:
        return FileBody.from_file(find_file(connection, file_id))


@router.get(
    "/v1/files/{file_id}/content",
    response_class=Response,
    responses={200: {"content": {CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}}},
)
def get_content(resources: ResourcesDependency, file_id: FileId) -> PieceResponse:
    """The file's bytes as a stream, the same every time."""
    with resources.engine.connect() as connection:
        file = find_file(connection, file_id)
    headers = {"Content-Disposition": f'attachment; filename="{file.name}.jsonl"'}
    if file.batch_id is None:  # what is made while it is read ends where it ends
        headers["Content-Length"] = str(file.num_bytes)
    return PieceResponse(start_reading(read_content(resources.engine, file)), CONTENT_TYPE, headers)


@router.delete("/v1/files/{file_id}")
async def delete_file(resources: ResourcesDependency, file_id: FileId) -> DeletedFile:
    """Removes the file; its disk space is free some seconds later."""

    def discard() -> None:
        with resources.engine.begin() as connection:
            discard_file(connection, file_id)

    await run_in_threadpool(discard)
    return DeletedFile(id=name_file(file_id))
