"""Items of a collection over HTTP: put, get and delete by key."""

import re
from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote_to_bytes

import msgspec
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field

from api.bodies.items import DeleteAnswer, DeleteRequest, ItemAnswer, PutAnswer, PutRequest
from api.dependencies import CollectionName, Resources, ResourcesDependency
from api.door.media_types import require_json
from api.door.scopes import ITEM_PATH
from api.intake.puts import Followed
from api.intake.requests import UnreadableItem, check_key, decode_body, make_item
from api.intake.submissions import read_body
from api.problems import Limit, Place, Problem
from vectormill.collections.collections import find_generation
from vectormill.collections.rows.items import delete_items, find_item
from vectormill.collections.rows.puts import PutEnd
from vectormill.domain.errors import Conflict, InvalidItem, SubmissionTooLarge
from vectormill.domain.task import TASKS
from vectormill.jobs.bodies import ItemBody
from vectormill.jobs.item import Item, ItemFailure, find_side_failure
from vectormill.jobs.job import COMPLETED, COMPLETED_WITH_ERRORS, FAILED

router = APIRouter(tags=["items"])

MAX_WAIT_SECONDS: Final = 60.0
# Read in some ten microseconds: less than a hop to a thread costs.
SMALL_BODY_BYTES: Final = 16 << 10
# For a body that may have it, the database tells whether the collection takes pairs.
PAIR_FIELD: Final = b"text_pair"
# RFC 7240, 4.3: how long a client is willing to wait, in whole seconds; 4.1: not at all.
WAIT: Final = re.compile(r'(?:^|[,;])\s*wait\s*=\s*"?(\d{1,9})"?\s*(?=$|[,;])', re.IGNORECASE)
RESPOND_ASYNC: Final = re.compile(r"(?:^|,)\s*respond-async\s*(?=$|[,;])", re.IGNORECASE)
# A failed item has its own reason; of any other end its key is not among the failures, and no result was written.
WRITTEN: Final = (COMPLETED, COMPLETED_WITH_ERRORS, FAILED)

PUT_DECODER: Final = msgspec.json.Decoder(PutRequest)
DELETE_DECODER: Final = msgspec.json.Decoder(DeleteRequest)


def describe_body(name: str, example: dict[str, Any]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schema, "example": example}},
        }
    }


PUT_DOCS: Final = describe_body("PutRequest", {"text": "A text to encode.", "metadata": {"page": 1}})
DELETE_DOCS: Final = describe_body("DeleteRequest", {"keys": ["a", "b"]})


async def parse_item_key(
    request: Request,
    key: Annotated[
        str, Path(description="The item's key, percent-encoded; it may have slashes.", min_length=1)
    ],
    resources: ResourcesDependency,
) -> str:
    """Raises InvalidItem for what no item can be called."""
    try:
        # The server puts U+FFFD where the path is not UTF-8, so that many keys would be one.
        unquote_to_bytes(request.scope["raw_path"]).decode()
        return check_key(key, resources.settings.max_key_bytes)
    except UnicodeDecodeError:
        raise InvalidItem("The key in the path is not UTF-8, percent-encoded.") from None
    except UnreadableItem as error:
        raise InvalidItem(f"The key in the path cannot be used: {error.reason}.") from error


ItemKey = Annotated[str, Depends(parse_item_key)]


class ItemParameters(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include: Literal["vector"] | None = Field(
        default=None, description="The embedding too; scores and records come always."
    )


class PutParameters(BaseModel):
    model_config = ConfigDict(extra="forbid")

    wait_seconds: float | None = Field(
        default=None,
        ge=0,
        le=MAX_WAIT_SECONDS,
        description="So long the answer waits for the item to be searchable; counts before `Prefer: wait=…`.",
    )


@router.get(ITEM_PATH, response_model_exclude_unset=True)
def get_item(
    name: CollectionName,
    key: ItemKey,
    resources: ResourcesDependency,
    wanted: Annotated[ItemParameters, Query()],
) -> ItemAnswer:
    """Answer the collection's item with this key."""
    with resources.engine.connect() as connection:
        item = find_item(connection, name, key, has_vector=wanted.include == "vector")
    return ItemAnswer.from_item(item)


@router.put(
    ITEM_PATH,
    openapi_extra=PUT_DOCS,
    responses={
        202: {"model": PutAnswer, "description": "Committed, and not searchable yet: ask for its job."}
    },
)
async def put_item(
    request: Request,
    response: Response,
    name: CollectionName,
    key: ItemKey,
    resources: ResourcesDependency,
    wanted: Annotated[PutParameters, Query()],
    prefer: Annotated[
        str | None, Header(description="`wait=N` in seconds, or `respond-async` (RFC 7240).")
    ] = None,
) -> PutAnswer:
    """Encodes a text, and keeps its result under the key, instead of what was there. Answers when it is searchable."""
    require_json(request)
    seconds = choose_wait(wanted.wait_seconds, prefer, response, resources)
    with resources.gates.json_bytes.hold() as hold:
        body = await read_body(request, resources.settings, hold)
        if len(body) <= SMALL_BODY_BYTES and PAIR_FIELD not in body:
            item = read_item(body, key, name, resources)
        else:
            item = await run_in_threadpool(read_item, body, key, name, resources)
        followed = await resources.puts.write(name, item)
    end = await wait_for_end(followed, seconds, resources)
    if end is None:
        response.status_code = 202
        response.headers["Location"] = f"/v1/jobs/{followed.job_id}"
        response.headers["Retry-After"] = "1"
    else:
        refuse_failure(key, end)
    return PutAnswer.of(key, followed.job_id, end)


def read_item(body: bytes, key: str, collection: str, resources: Resources) -> Item:
    """Raises Problem for a text that can have no result, and for a pair that the collection does not take: nothing is
    stored then. Asks the database about pairs alone.
    """
    request = decode_body(body, PUT_DECODER)
    given = ItemBody(key, request.text, request.metadata, request.text_pair)
    reads_pairs = request.text_pair is not None and takes_pairs(collection, resources)
    try:
        item = make_item(given, resources.settings.max_key_bytes, reads_pairs=reads_pairs)
    except UnreadableItem as error:
        place = Place(error.reason, pointer=f"/{error.field}")
        raise Problem(422, InvalidItem.code, f"{error.field}: {error.reason}.", errors=[place]) from error
    failure = find_side_failure(item.text, resources.settings.max_text_chars)
    if failure is not None:
        raise describe_failure(failure)
    return item


def takes_pairs(collection: str, resources: Resources) -> bool:
    """Return whether the collection keeps results of pairs. Raise CollectionNotFound."""
    with resources.engine.connect() as connection:
        return TASKS[find_generation(connection, collection).spec.task].reads_pairs


def choose_wait(
    wait_seconds: float | None, prefer: str | None, response: Response, resources: Resources
) -> float:
    """Return the seconds that the client waits; the answer says so where a preference of the client decided."""
    if wait_seconds is not None:
        return wait_seconds
    preference = WAIT.search(prefer or "")
    if preference is not None:
        seconds = min(MAX_WAIT_SECONDS, int(preference[1]))
        response.headers["Preference-Applied"] = f"wait={seconds:g}"
        return seconds
    if RESPOND_ASYNC.search(prefer or ""):
        response.headers["Preference-Applied"] = "respond-async"
        return 0.0
    return resources.settings.put_wait_seconds


async def wait_for_end(followed: Followed, seconds: float, resources: Resources) -> PutEnd | None:
    if resources.gates.puts.is_full:
        return await resources.puts.wait(followed, 0)
    with resources.gates.puts.enter():
        return await resources.puts.wait(followed, seconds)


def refuse_failure(key: str, end: PutEnd) -> None:
    """Raises Problem with the reason for which the item has no result, if there is one, and Conflict for a lost job."""
    if key in end.failures:
        raise describe_failure(end.failures[key])
    if end.state not in WRITTEN:
        how = f"was {end.state}" if end.state else "was removed"
        raise Conflict(f"The put's job {end.job_id} {how} before it had a result; put the item again.")


def describe_failure(failure: ItemFailure) -> Problem:
    return Problem(
        422,
        InvalidItem.code,
        f"The item has no result ({failure.code}): {failure.detail}. What the collection had under its key stays.",
        errors=[Place(failure.detail, pointer="/text", code=failure.code)],
    )


@router.delete(ITEM_PATH, status_code=204)
def delete_item(name: CollectionName, key: ItemKey, resources: ResourcesDependency) -> None:
    """Removes what is under the key, and what jobs submitted before would still write; whether or not there is any.

    Searches do not find it any more. Its text goes from payloads of jobs that still have it within minutes.
    """
    with resources.engine.begin() as connection:
        delete_items(connection, name, [key])


@router.post("/v1/collections/{name}/items:delete", openapi_extra=DELETE_DOCS)
async def post_delete(request: Request, name: CollectionName, resources: ResourcesDependency) -> DeleteAnswer:
    """Removes many keys at once, as the deletion of each would."""
    require_json(request)
    with resources.gates.json_bytes.hold() as hold:
        body = await read_body(request, resources.settings, hold)

        def delete() -> DeleteAnswer:
            keys = read_keys(body, resources)
            with resources.engine.begin() as connection:
                return DeleteAnswer(num_keys=len(keys), num_deleted=delete_items(connection, name, keys))

        return await run_in_threadpool(delete)


def read_keys(body: bytes, resources: Resources) -> set[str]:
    """Raises Problem naming the key that cannot be one."""
    keys = decode_body(body, DELETE_DECODER).keys
    limit = Limit.of(resources.settings, "max_deleted_keys")
    if len(keys) > limit.value:
        detail = f"The body has more than {limit.value:,} keys ({limit.setting}); divide it into several."
        raise Problem(413, SubmissionTooLarge.code, detail, limit=limit)
    for position, key in enumerate(keys):
        try:
            check_key(key, resources.settings.max_key_bytes)
        except UnreadableItem as error:
            place = Place(error.reason, pointer=f"/keys/{position}")
            raise Problem(
                422, InvalidItem.code, f"keys[{position}]: {error.reason}.", errors=[place]
            ) from error
    return set(keys)
