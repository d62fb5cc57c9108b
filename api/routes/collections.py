"""Collections over HTTP: what there is."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from api.bodies.collections import CollectionBody, CollectionDetail, CollectionPage
from api.cursors import After, decode_cursor, encode_cursor
from api.dependencies import CollectionName, ResourcesDependency
from vectormill.db.descriptions import describe_collection, list_collection_rows

router = APIRouter(tags=["collections"])


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
