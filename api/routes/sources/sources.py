"""Sources over HTTP: set, look, check and delete that of a collection; and push rows to one."""

from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field

from api.bodies.sources.sources import PushBody, SourceBody, SourceCheckBody, SourceRequest
from api.dependencies import CollectionName, Resources, ResourcesDependency
from api.door.media_types import require_json
from api.intake.idempotency import IdempotencyKey
from api.intake.pushes import receive_push
from api.intake.requests import UnreadableItem, decode_body, encode_metadata
from api.intake.submissions import read_body
from api.problems import Place, Problem
from vectormill.addresses import is_loopback_host
from vectormill.collections.collections import find_generation
from vectormill.domain.errors import InvalidOption, SourceFailed
from vectormill.settings import Settings
from vectormill.sources.checking import SourceReport, check_source
from vectormill.sources.fitting import refuse_unfit
from vectormill.sources.kinds.files import is_local
from vectormill.sources.options import FileOptions, Options, TreeOptions, parse_options, parse_split
from vectormill.sources.reader import SourcePlace
from vectormill.sources.source import Source
from vectormill.sources.sources import delete_source, find_source, save_source

router = APIRouter(tags=["sources"])

SOURCE_DECODER: Final = msgspec.json.Decoder(SourceRequest)
EXAMPLE: Final = {
    "kind": "sql",
    "options": {
        "query": "SELECT id, body, lang FROM articles",
        "key": "id",
        "text": "body",
        "metadata": ["lang"],
        "url_env": "ARTICLES_URL",
    },
    "split": {"by": "paragraphs"},
}


def describe_body(*, is_required: bool) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/SourceRequest"}
    content = {"application/json": {"schema": schema, "example": EXAMPLE}}
    return {"requestBody": {"required": is_required, "content": content}}


PUSH_DOCS: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/x-ndjson": {
                "schema": {"$ref": "#/components/schemas/ItemBody"},
                "example": '{"key": "a", "text": "A text."}\n{"key": "b", "text": "Another.", "metadata": {"p": 2}}\n',
            }
        },
    }
}


class SourceParameters(BaseModel):
    model_config = ConfigDict(extra="forbid")

    check: bool = Field(default=True, description="Read a little of the source before it is kept.")


class PushParameters(BaseModel):
    model_config = ConfigDict(extra="forbid")

    complete: bool = Field(
        default=False, description="These are all rows: rows that are not among them are deleted."
    )


@router.put("/v1/collections/{name}/source", openapi_extra=describe_body(is_required=True))
async def put_source(
    request: Request,
    name: CollectionName,
    resources: ResourcesDependency,
    wanted: Annotated[SourceParameters, Query()],
) -> SourceBody:
    """Sets where the texts of a collection come from, after a look at the first rows. Nothing is read into it yet."""
    require_json(request)
    source = await receive_source(request, resources)

    def save() -> SourceBody:
        report = look(source, name, resources) if wanted.check else None
        with resources.engine.begin() as connection:
            refuse_unfit(source, find_generation(connection, name).spec)
            return SourceBody.from_saved(save_source(connection, name, source), report)

    with resources.gates.uploads.enter():
        return await run_in_threadpool(save)


@router.get("/v1/collections/{name}/source")
def get_source(name: CollectionName, resources: ResourcesDependency) -> SourceBody:
    """Describe where the texts of the collection come from."""
    with resources.engine.connect() as connection:
        return SourceBody.from_saved(find_source(connection, name))


@router.delete("/v1/collections/{name}/source", status_code=204)
def remove_source(name: CollectionName, resources: ResourcesDependency) -> None:
    """The collection follows nothing any more; its rows stay."""
    with resources.engine.begin() as connection:
        delete_source(connection, name)


@router.post("/v1/collections/{name}/source/check")
def post_check(name: CollectionName, resources: ResourcesDependency) -> SourceCheckBody:
    """Reads the first rows of the source as it is kept; changes nothing."""
    with resources.engine.connect() as connection:
        saved = find_source(connection, name)
    return SourceCheckBody.from_report(look(saved.source, name, resources))


@router.post("/v1/collections/{name}/push", status_code=202, openapi_extra=PUSH_DOCS)
async def post_push(
    request: Request,
    response: Response,
    name: CollectionName,
    resources: ResourcesDependency,
    wanted: Annotated[PushParameters, Query()],
    idempotency_key: IdempotencyKey,
) -> PushBody:
    """Takes rows as a stream of NDJSON (gzip accepted) for a run that follows them. All of them, or none."""
    answer = await receive_push(
        request, name, resources, is_complete=wanted.complete, idempotency_key=idempotency_key
    )
    response.headers["Location"] = f"/v1/runs/{answer.run}"
    return answer


async def receive_source(request: Request, resources: Resources) -> Source:
    """The source that the body describes, checked but not read. Raises Problem and InvalidOption."""
    with resources.gates.json_bytes.hold() as hold:
        body = await read_body(request, resources.settings, hold)
        wanted = await run_in_threadpool(decode_body, body, SOURCE_DECODER)
    for values in (wanted.options, wanted.split):
        try:
            encode_metadata(values)
        except UnreadableItem as error:
            raise InvalidOption(f"The source cannot be kept: {error.reason}.") from error
    source = Source(wanted.kind, wanted.options, wanted.split)
    refuse_local(parse_options(source), resources.settings)
    parse_split(source)
    return source


def refuse_local(options: Options, settings: Settings) -> None:
    """Raises InvalidOption for files of the server's own, unless a folder is set apart for them.

    Only where none but this machine can connect the server's files are those of who asks.
    """
    if settings.source_root is not None or is_loopback_host(settings.api_host):
        return
    if isinstance(options, TreeOptions) or (
        isinstance(options, FileOptions) and any(map(is_local, options.files))
    ):
        raise InvalidOption(
            "This API reads no files of its own machine for a source: set VECTORMILL_SOURCE_ROOT to the folder in "
            "which they lie, for `vectormill api` and `vectormill indexer`, or name files of a store such as s3://."
        )


def look(source: Source, name: str, resources: Resources) -> SourceReport:
    """Raises Problem, with the source's own words, where it cannot be read as it says."""
    place = SourcePlace(resources.engine, resources.settings, resources.registry, collection=name)
    try:
        return check_source(source, place)
    except SourceFailed as error:
        detail = str(error)
        raise Problem(422, SourceFailed.code, detail, errors=[Place(detail, pointer="/options")]) from None
