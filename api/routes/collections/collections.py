"""Collections over HTTP: made, listed, described, changed and deleted."""

import time
from typing import Annotated, Any, Final, TypeVar

import anyio
import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field

from api.bodies.collection_requests import CHANGE_DECODER, COLLECTION_DECODER
from api.bodies.collections import CollectionBody, CollectionDetail, CollectionPage
from api.cursors import After, decode_cursor, encode_cursor
from api.dependencies import CollectionName, Resources, ResourcesDependency
from api.door.media_types import require_json
from api.intake.requests import decode_body
from api.intake.submissions import make_wanted_spec, read_body
from vectormill.collections.collection import CollectionWishes, check_collection_name
from vectormill.collections.collections import change_collection, create_collection
from vectormill.collections.descriptions import describe_collection, list_collection_rows
from vectormill.collections.indexes.index_plan import IndexWishes
from vectormill.collections.removals import remove_collection, stop_work
from vectormill.domain.errors import CollectionInUse

router = APIRouter(tags=["collections"])

# So long a deletion waits for those who are about to end.
DELETION_SECONDS: Final = 10.0
DELETION_PAUSE_SECONDS: Final = 0.2

T = TypeVar("T")


class CollectionFilter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: int = Field(default=200, ge=1, le=1000)
    after: After = None


@router.get("/v1/collections")
def get_collections(
    resources: ResourcesDependency, wanted: Annotated[CollectionFilter, Query()]
) -> CollectionPage:
    """Collections by name, with the spec of their vectors."""
    after = decode_cursor(wanted.after)
    with resources.engine.connect() as connection:
        rows = list_collection_rows(connection, after=after, limit=wanted.limit + 1)
    page = rows[: wanted.limit]
    return CollectionPage(
        data=[CollectionBody.from_row(row) for row in page],
        next=encode_cursor(page[-1].id) if len(rows) > len(page) else None,
    )


class DescriptionFilter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    exact: bool = Field(default=False, description="Count the rows, each of which is read for it.")


@router.get("/v1/collections/{name}")
def get_collection(
    resources: ResourcesDependency, name: CollectionName, wanted: Annotated[DescriptionFilter, Query()]
) -> CollectionDetail:
    """All that is known of a collection: rows, generations, indexes, coverage, staleness, what works on it."""
    return load_detail(resources, name, counts_rows=wanted.exact)


def load_detail(resources: Resources, name: str, *, counts_rows: bool = False) -> CollectionDetail:
    timeout_seconds = resources.settings.search_timeout_seconds
    with resources.engine.connect() as connection:
        found = describe_collection(
            connection, name, counts_rows=counts_rows, timeout_seconds=timeout_seconds
        )
    return CollectionDetail.from_description(found)


def describe_body(schema: str, example: dict[str, Any]) -> dict[str, Any]:
    """For the OpenAPI description: a body that msgspec decodes."""
    content = {"schema": {"$ref": f"#/components/schemas/{schema}"}, "example": example}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


async def read_json(request: Request, resources: Resources, decoder: "msgspec.json.Decoder[T]") -> T:
    """The body as the decoder's type. Raises Problem."""
    require_json(request)
    with resources.gates.json_bytes.hold() as hold:
        body = await read_body(request, resources.settings, hold)
        return await run_in_threadpool(decode_body, body, decoder)


@router.post(
    "/v1/collections",
    status_code=201,
    openapi_extra=describe_body(
        "CollectionRequest", {"name": "docs", "keep_text": True, "language": "english"}
    ),
)
async def post_collection(request: Request, resources: ResourcesDependency) -> CollectionDetail:
    """Makes a collection without rows. One that a first job makes keeps no texts."""
    wanted = await read_json(request, resources, COLLECTION_DECODER)

    def create() -> CollectionDetail:
        check_collection_name(wanted.name)
        spec = make_wanted_spec(wanted.model, wanted.options, resources)
        index_options = msgspec.to_builtins(wanted.index_options)
        IndexWishes.from_options(wanted.index_policy, index_options)
        wishes = CollectionWishes(wanted.keep_text, wanted.language, wanted.index_policy, index_options)
        with resources.engine.begin() as connection:
            create_collection(connection, wanted.name, spec, wishes, resources.settings.max_collections)
        return load_detail(resources, wanted.name)

    return await run_in_threadpool(create)


@router.patch("/v1/collections/{name}", openapi_extra=describe_body("CollectionChange", {"keep_text": True}))
async def patch_collection(
    request: Request, name: CollectionName, resources: ResourcesDependency
) -> CollectionDetail:
    """Keeps texts from now on, or no longer; or reads them in another language."""
    wanted = await read_json(request, resources, CHANGE_DECODER)

    def change() -> CollectionDetail:
        change_collection(resources.engine, name, keep_text=wanted.keep_text, language=wanted.language)
        return load_detail(resources, name)

    return await run_in_threadpool(change)


class DeletionFilter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    force: bool = Field(default=False, description="Cancel the jobs and runs that work on it first.")


@router.delete("/v1/collections/{name}", status_code=204)
async def delete_collection(
    name: CollectionName, resources: ResourcesDependency, wanted: Annotated[DeletionFilter, Query()]
) -> None:
    """Deletes a collection: view, vectors, metadata, texts, source, schedules, runs. Its jobs stay, without vectors."""
    if wanted.force:
        await run_in_threadpool(stop_work, resources.engine, name)
    deadline = time.monotonic() + DELETION_SECONDS
    while True:
        try:
            return await run_in_threadpool(remove_collection, resources.engine, name)
        except CollectionInUse as error:
            # A worker that commits a chunk, or a reader, holds the collection's lock for seconds.
            if not error.is_passing or time.monotonic() >= deadline or resources.is_stopping():
                raise
        await anyio.sleep(DELETION_PAUSE_SECONDS)
