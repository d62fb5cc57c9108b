"""Items of a collection over HTTP: put, get and delete by key."""

import re
from typing import Annotated, Final, cast
from urllib.parse import unquote_to_bytes

import msgspec
from fastapi import APIRouter, Depends, Header, Path, Request, Response
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Connection

from api.dependencies import CollectionName, Resources, ResourcesDependency
from api.intake.bodies import read_body
from api.intake.requests import UnreadableItem, check_key, decode_body, make_item
from api.problems import Limit, Place, Problem, refuse_size, require_json
from api.serving import respond, serve
from vectormill.collections import operations
from vectormill.collections.collections import find_generation
from vectormill.collections.items import delete_items, find_item
from vectormill.collections.operations import (
    MAX_WAIT_SECONDS,
    DeleteAnswer,
    DeleteRequest,
    ItemAnswer,
    KeptItemQuery,
    OneItemQuery,
    PutAnswer,
    PutQuery,
    PutRequest,
    find_passage,
)
from vectormill.domain.errors import Conflict, InvalidItem
from vectormill.jobs.item import Item, ItemFailure, find_side_failure
from vectormill.jobs.job import COMPLETED, COMPLETED_WITH_ERRORS, FAILED
from vectormill.jobs.operations import ItemBody
from vectormill.moments import format_moment
from vectormill.results.table import describe_first

router = APIRouter(tags=["items"])

# Decoding a body of this size takes some ten microseconds, less than switching to a thread.
SMALL_BODY_BYTES: Final = 16 << 10
# If a body may have this field, the database must tell whether the collection takes pairs.
PAIR_FIELD: Final = b"text_pair"
# The client's preferences in RFC 7240: section 4.3, to wait for so many whole seconds; section 4.1, not to
# wait.
WAIT: Final = re.compile(r'(?:^|[,;])\s*wait\s*=\s*"?(\d{1,9})"?\s*(?=$|[,;])', re.IGNORECASE)
RESPOND_ASYNC: Final = re.compile(r"(?:^|,)\s*respond-async\s*(?=$|[,;])", re.IGNORECASE)
# In these states every item has a result or its own error; after any other end, an item may have neither.
WRITTEN: Final = (COMPLETED, COMPLETED_WITH_ERRORS, FAILED)

PUT_DECODER: Final = msgspec.json.Decoder(PutRequest)


async def check_path(
    request: Request,
    key: Annotated[
        str,
        Path(
            description="The item's key, percent-encoded. It may contain slashes; one that ends with a slash, or "
            "has a segment `.` or `..`, belongs into the parameter `key`."
        ),
    ],
) -> None:
    """Raise InvalidItem if the path may have lost a part of the key on its way."""
    raw_path = request.scope["raw_path"]
    if raw_path.endswith(b"/"):
        raise InvalidItem(
            "The path ends with a slash, as it does once a client has removed dots from it. Name the item by "
            f"the parameter key: {operations.ITEMS.format(**request.path_params)}?key=…"
        )
    try:
        # The server replaces bytes that are not UTF-8 by U+FFFD, so that different keys would become one.
        unquote_to_bytes(raw_path).decode()
    except UnicodeDecodeError:
        raise InvalidItem("The key in the path is not percent-encoded UTF-8.") from None


async def find_key(request: Request, resources: ResourcesDependency) -> str:
    """Return the item's key, of the path or the query. Raise InvalidItem if no item can have it."""
    key = {**request.query_params, **request.path_params}.get("key")
    if key is None:
        items, rows = (
            each.format(**request.path_params) for each in (operations.ITEMS, operations.EXPORT.path)
        )
        raise InvalidItem(
            f"Name the item by the parameter key: {items}?key=…; all rows are read from {rows}."
        )
    try:
        return check_key(key, resources.settings.max_key_bytes)
    except UnreadableItem as error:
        raise InvalidItem(f"The key cannot be used: {error.reason}.") from error


ItemKey = Annotated[str, Depends(find_key)]


@serve(router, operations.SHOW_ITEM)
@serve(router, operations.SHOW_ITEM_AT, check_path)
def get_item(name: CollectionName, key: ItemKey, connection: Connection, query: KeptItemQuery) -> ItemAnswer:
    """Return the collection's item with this key."""
    item = find_item(connection, name, key, has_vector=query.include == "vector")
    document, passage = find_passage(item.metadata or {})
    answer = ItemAnswer(
        key=item.key,
        text=item.text,
        metadata=item.metadata,
        document=document,
        passage=passage,
        content_hash=item.content_hash.hex(),
        job_seq=item.job_seq,
    )
    result = {"embedding": None} if item.results is None else describe_first(item.results, item.spec)
    pair = {"text_pair": item.text_pair} if item.spec.reads_pairs else {}
    return cast(ItemAnswer, {**answer, **result, **pair})


@serve(router, operations.PUT_ITEM)
@serve(router, operations.PUT_ITEM_AT, check_path)
async def put_item(
    request: Request,
    name: CollectionName,
    key: ItemKey,
    resources: ResourcesDependency,
    query: PutQuery,
    prefer: Annotated[
        str | None, Header(description="`wait=N` in seconds, or `respond-async` (RFC 7240).")
    ] = None,
) -> Response:
    """Encode a text and store its result under the key, replacing what was there. Respond when it is searchable."""
    require_json(request)
    seconds, headers = choose_wait(query.wait_seconds, prefer, resources)
    with resources.gates.json_bytes.hold() as hold:
        body = await read_body(request, resources.settings, hold)
        if len(body) <= SMALL_BODY_BYTES and PAIR_FIELD not in body:
            item = read_item(body, key, name, resources)
        else:
            item = await run_in_threadpool(read_item, body, key, name, resources)
        followed = await resources.puts.write(name, item)
    if resources.gates.puts.is_full:
        end = await resources.puts.wait(followed, 0)
    else:
        with resources.gates.puts.enter():
            end = await resources.puts.wait(followed, seconds)
    job = str(followed.job_id)
    if end is None:
        answer = PutAnswer(key=key, job=job, is_searchable=False, searchable_at=None)
        headers |= {"Location": f"/v1/jobs/{job}", "Retry-After": "1"}
        return respond(operations.PUT_ITEM, answer, status=202, headers=headers)
    if key in end.failures:
        raise describe_failure(end.failures[key])
    if end.state not in WRITTEN:
        how = f"was {end.state}" if end.state else "was removed"
        raise Conflict(f"The put's job {end.job_id} {how} before it had a result; put the item again.")
    answer = PutAnswer(key=key, job=job, is_searchable=True, searchable_at=format_moment(end.finished_at))
    return respond(operations.PUT_ITEM, answer, headers=headers)


def read_item(body: bytes, key: str, collection: str, resources: Resources) -> Item:
    """Return the item in a body. Only a body with a pair needs a query to the database.

    Raise Problem for a text that cannot be encoded, or for a pair in a collection of vectors; nothing is
    stored then.
    """
    request = decode_body(body, PUT_DECODER)
    given = ItemBody(key, request.text, request.metadata, request.text_pair)
    reads_pairs = False
    if request.text_pair is not None:
        with resources.engine.connect() as connection:
            reads_pairs = find_generation(connection, collection).spec.reads_pairs
    try:
        item = make_item(given, resources.settings.max_key_bytes, reads_pairs=reads_pairs)
    except UnreadableItem as error:
        raise error.refuse(error.field, f"/{error.field}") from error
    failure = find_side_failure(item.text, resources.settings.max_text_chars)
    if failure is not None:
        raise describe_failure(failure)
    return item


def choose_wait(
    wait_seconds: float | None, prefer: str | None, resources: Resources
) -> tuple[float, dict[str, str]]:
    """Return the seconds to wait for the result, and response headers if a Prefer header decided them."""
    if wait_seconds is not None:
        return wait_seconds, {}
    preference = WAIT.search(prefer or "")
    if preference is not None:
        seconds = min(MAX_WAIT_SECONDS, int(preference[1]))
        return seconds, {"Preference-Applied": f"wait={seconds:g}"}
    if RESPOND_ASYNC.search(prefer or ""):
        return 0.0, {"Preference-Applied": "respond-async"}
    return resources.settings.put_wait_seconds, {}


def describe_failure(failure: ItemFailure) -> Problem:
    return Problem(
        422,
        InvalidItem.code,
        f"The item was not encoded ({failure.code}): {failure.detail}. What the collection has under its "
        "key is unchanged.",
        errors=[Place(failure.detail, pointer="/text", code=failure.code)],
    )


@serve(router, operations.DELETE_ITEM)
@serve(router, operations.DELETE_ITEM_AT, check_path)
def delete_item(name: CollectionName, key: ItemKey, connection: Connection, query: OneItemQuery) -> None:
    """Delete the item with the key, and discard what earlier jobs would still write there; it need not exist.

    Searches no longer find it. Within minutes its text is removed from the payloads of jobs that still
    contain it.
    """
    delete_items(connection, name, [key])


@serve(router, operations.DELETE_ITEMS)
def post_delete(
    resources: ResourcesDependency, connection: Connection, name: CollectionName, body: DeleteRequest
) -> DeleteAnswer:
    """Delete many items at once, as if each were deleted."""
    limit = Limit.of(resources.settings, "max_deleted_keys")
    if len(body.keys) > limit.value:
        detail = f"The body has more than {limit.value:,} keys ({limit.setting}); split it into several."
        raise refuse_size(limit, detail)
    for position, key in enumerate(body.keys):
        try:
            check_key(key, resources.settings.max_key_bytes)
        except UnreadableItem as error:
            raise error.refuse(f"keys[{position}]", f"/keys/{position}") from error
    keys = set(body.keys)
    return DeleteAnswer(num_keys=len(keys), num_deleted=delete_items(connection, name, keys))
