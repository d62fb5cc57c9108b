"""Collections over HTTP: what there is, and which rows are nearest to a text or a vector."""

from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from api.bodies.collections import CollectionBody, CollectionDetail, CollectionPage
from api.cursors import After, decode_cursor, encode_cursor
from api.dependencies import CollectionName, Resources, ResourcesDependency
from api.door.media_types import require_json
from api.queries import encode_query
from api.requests import SEARCH_DECODER, SearchRequest, decode_body
from api.schemas import SearchAnswer
from api.submissions import read_body
from vectormill.db.collections import find_generation
from vectormill.db.descriptions import describe_collection, list_collection_rows
from vectormill.db.matches import Nearest, search_collection
from vectormill.domain.collection import Generation
from vectormill.domain.errors import InvalidOption

router = APIRouter(tags=["collections"])

SEARCH_DOCS: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/SearchRequest"},
                "example": {"text": "how to parse a date", "limit": 3},
            }
        },
    }
}


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
    timeout_seconds = resources.settings.search_timeout_seconds
    with resources.engine.connect() as connection:
        found = describe_collection(
            connection, name, counts_rows=wanted.exact, timeout_seconds=timeout_seconds
        )
    return CollectionDetail.from_description(found)


@router.post("/v1/collections/{name}/search", openapi_extra=SEARCH_DOCS)
async def post_search(request: Request, name: CollectionName, resources: ResourcesDependency) -> SearchAnswer:
    """The rows with the highest cosine similarity to a text, or to a vector of the same space, best first."""
    require_json(request)
    with resources.gates.searches.enter():
        with resources.gates.json_bytes.hold() as hold:
            body = await read_body(request, resources.settings, hold)
            query = await run_in_threadpool(decode_body, body, SEARCH_DECODER)
        return await answer_search(query, name, resources)


async def answer_search(query: SearchRequest, name: str, resources: Resources) -> SearchAnswer:
    generation = await run_in_threadpool(load_generation, resources, name)
    embedding = await find_embedding(query, generation, resources)

    def search(connection: Connection) -> Nearest:
        timeout_seconds = resources.settings.search_timeout_seconds
        return search_collection(
            connection, generation, embedding, query.limit, timeout_seconds=timeout_seconds
        )

    return SearchAnswer.from_nearest(await resources.searches.run(search))


async def find_embedding(
    query: SearchRequest, generation: Generation, resources: Resources
) -> npt.NDArray[np.float32]:
    """float32 [dimensions]. Raises InvalidOption unless the query is one text or one vector that fits."""
    if query.text is not None and query.embedding is None:
        return await encode_query(resources, generation.spec, query.text)
    if query.embedding is not None and query.text is None:
        return check_embedding(query.embedding, generation)
    raise InvalidOption("A search needs exactly one of text and embedding.")


def check_embedding(values: list[float], generation: Generation) -> npt.NDArray[np.float32]:
    dimensions = generation.spec.dimensions
    if len(values) != dimensions:
        raise InvalidOption(
            f"The embedding has {len(values)} dimensions, but collection {generation.collection!r} has {dimensions}."
        )
    with np.errstate(over="ignore"):  # an overflow is infinite, and refused below
        embedding = np.array(values, dtype=np.float64).astype(np.float32)
    if not np.isfinite(embedding).all() or not embedding.any():
        raise InvalidOption("The embedding has no direction: its numbers must be finite and not all zero.")
    return embedding


def load_generation(resources: Resources, name: str) -> Generation:
    with resources.engine.connect() as connection:
        return find_generation(connection, name)
