"""A collection's rows over HTTP, as a stream in the format asked for, which goes on behind any key."""

from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from api.dependencies import CollectionName, ResourcesDependency
from api.streams.collection_streams import ROW_FORMATS
from api.streams.vector_streams import PieceResponse, start_reading
from vectormill.db.rows.collection_rows import Inclusion, find_exported, read_pages
from vectormill.files.formats import OUTPUT_FORMATS, RowsName

router = APIRouter(tags=["collections"])

DESCRIPTION = (
    'In the order of keys. `ndjson`: `{"key", "embedding", "metadata", "text"}` a line, of what `include` names; '
    "`parquet`: columns of these names, metadata as JSON. An export that broke off goes on with `after`, the last key "
    "that came, and with `generation`, which the header Vectormill-Generation said: then no vector of another space "
    "comes behind. Whether an answer is whole, its end tells: the last chunk of HTTP, the footer of Parquet."
)
# Any key that Postgres can hold.
NO_NUL = r"^[^\u0000]*$"
INCLUDE = r"^(vector|metadata|text)(,(vector|metadata|text)){0,2}$"


class ExportFilter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: RowsName = "ndjson"
    include: str = Field(
        default="vector,metadata",
        pattern=INCLUDE,
        description="vector, metadata and text, with commas between. A text that is not kept is null.",
    )
    after: str = Field(
        default="", pattern=NO_NUL, max_length=10_000, description="Only rows behind this key."
    )
    limit: int | None = Field(default=None, ge=1, le=2**31 - 1, description="So many rows at the most.")
    generation: int | None = Field(
        default=None, ge=1, le=2**63 - 1, description="The one that the export began with; else the live one."
    )


@router.get(
    "/v1/collections/{name}/export",
    description=DESCRIPTION,
    response_class=Response,
    responses={200: {"content": {OUTPUT_FORMATS[name].media_type: {} for name in ROW_FORMATS}}},
)
def get_export(
    resources: ResourcesDependency, name: CollectionName, wanted: Annotated[ExportFilter, Query()]
) -> PieceResponse:
    with resources.engine.connect() as connection:
        generation = find_exported(connection, name, wanted.generation)
    parts = wanted.include.split(",")
    inclusion = Inclusion(vector="vector" in parts, metadata="metadata" in parts, text="text" in parts)
    pages = read_pages(resources.engine, generation, inclusion, after=wanted.after, limit=wanted.limit)
    headers = {
        "Content-Disposition": f'attachment; filename="{name}.{wanted.format}"',
        "Vectormill-Generation": str(generation.id),
        "Vectormill-Fingerprint": generation.spec.fingerprint(),
    }
    pieces = ROW_FORMATS[wanted.format](generation.spec, inclusion, start_reading(pages))
    return PieceResponse(pieces, OUTPUT_FORMATS[wanted.format].media_type, headers)
