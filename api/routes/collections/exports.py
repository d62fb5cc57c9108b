"""A collection's rows over HTTP, as a stream in the format asked for, which goes on behind any key."""

from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from api.dependencies import CollectionName, ResourcesDependency
from api.streams.collection_streams import ROW_FORMATS
from api.streams.result_columns import RESULT_COLUMNS
from api.streams.vector_streams import PieceResponse, start_reading
from vectormill.collections.collection import Generation
from vectormill.collections.rows.pages import Inclusion, find_exported, read_pages
from vectormill.domain.errors import WrongKind
from vectormill.files.formats import OUTPUT_FORMATS, RowsName

router = APIRouter(tags=["collections"])

DESCRIPTION = (
    'In the order of keys. `ndjson`: `{"key", "embedding", "metadata", "text"}` a line, of what `include` names; of '
    "a collection of scores `score`, `label` and `probabilities`, of records `output`, instead of `embedding`. "
    "`parquet`: columns of these names, metadata as JSON. An export that broke off goes on with `after`, the last key "
    "that came, and with `generation`, which the header Vectormill-Generation said: then no vector of another space "
    "comes behind. Whether an answer is whole, its end tells: the last chunk of HTTP, the footer of Parquet."
)
# Any key that Postgres can hold.
NO_NUL = r"^[^\u0000]*$"
INCLUDE = r"^(vector|score|output|metadata|text)(,(vector|score|output|metadata|text)){0,2}$"


class CollectionExportFilter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: RowsName = "ndjson"
    include: str | None = Field(
        default=None,
        pattern=INCLUDE,
        description="vector (score or output, as the collection's kind is), metadata and text, with commas between; "
        "else the first two. A text that is not kept is null.",
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
    resources: ResourcesDependency, name: CollectionName, wanted: Annotated[CollectionExportFilter, Query()]
) -> PieceResponse:
    with resources.engine.connect() as connection:
        generation = find_exported(connection, name, wanted.generation)
    inclusion = choose_inclusion(generation, wanted.include)
    pages = read_pages(resources.engine, generation, inclusion, after=wanted.after, limit=wanted.limit)
    headers = {
        "Content-Disposition": f'attachment; filename="{name}.{wanted.format}"',
        "Vectormill-Generation": str(generation.id),
        "Vectormill-Fingerprint": generation.spec.fingerprint(),
    }
    pieces = ROW_FORMATS[wanted.format](generation.spec, inclusion, start_reading(pages))
    return PieceResponse(pieces, OUTPUT_FORMATS[wanted.format].media_type, headers)


def choose_inclusion(generation: Generation, include: str | None) -> Inclusion:
    """Choose what rows have in an export. Raise WrongKind for results of another kind than the collection's."""
    if include is None:
        return Inclusion()
    parts, own = set(include.split(",")), RESULT_COLUMNS[generation.spec.result].part
    foreign = parts - {own, "metadata", "text"}
    if foreign:
        raise WrongKind(
            f"Collection {generation.collection!r} keeps {generation.kind}: include {own!r} instead of "
            f"{min(foreign)!r}."
        )
    return Inclusion(result=own in parts, metadata="metadata" in parts, text="text" in parts)
