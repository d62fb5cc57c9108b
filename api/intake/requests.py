"""Requests: decode the JSON of clients with msgspec, at a few microseconds per item.

A lone surrogate (an escape such as "\\ud800") is legal JSON but not valid text. msgspec refuses it, so such a document
is parsed by the standard library instead, and the worker reports that one item as an error.
"""

import json
import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, NoReturn, TypeVar

import msgspec
from fastapi import Depends, Header, Request

from api.door.keys import find_key_id
from api.problems import Place, Problem, name_parameter, refuse
from vectormill.db.idempotency import own_idempotency_key
from vectormill.domain.encoding import LATE
from vectormill.domain.errors import InvalidItem
from vectormill.domain.task import JUDGE
from vectormill.jobs.item import Item, Items, find_text_failure
from vectormill.jobs.operations import ItemBody, JobRequest
from vectormill.rows import values
from vectormill.rows.values import are_sound_keys, encode_texts, find_key_fault, join_pairs

SURROGATE_ESCAPE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
# The exceptions that decoding a document may raise.
DECODING_ERRORS: Final = (msgspec.DecodeError, ValueError, RecursionError)

T = TypeVar("T")

JOB_DECODER: Final = msgspec.json.Decoder(JobRequest)
OBJECT_DECODER: Final = msgspec.json.Decoder(dict[str, Any])
ITEM_DECODER: Final = msgspec.json.Decoder(ItemBody)


class UnreadableItem(Exception):
    """The error of an item's field whose value cannot be stored; the caller knows which item it is."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field
        self.reason = reason

    def refuse(self, where: str, pointer: str, **place: Any) -> Problem:
        """Return the Problem of the request; `where` begins its sentence, and names the item."""
        return refuse(
            self.reason, code=InvalidItem.code, detail=f"{where}: {self.reason}.", pointer=pointer, **place
        )


def decode_json(document: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """Decode a JSON document as the decoder's type. Raise one of DECODING_ERRORS."""
    try:
        return decoder.decode(document)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        if not SURROGATE_ESCAPE.search(document):
            raise
    parsed = json.loads(document, parse_constant=_refuse_constant, parse_float=_read_float)
    return msgspec.convert(parsed, decoder.type)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _read_float(digits: str) -> float:
    """Parse a float and refuse an overflow, as msgspec does: Python would read 1e999 as infinity, which is not JSON."""
    number = float(digits)
    if math.isinf(number):
        raise ValueError("Number out of range")
    return number


def decode_body(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """Decode a JSON body. Raise Problem, which names the wrong field or the byte at which it is not JSON."""
    try:
        return decode_json(body, decoder)
    except DECODING_ERRORS as error:
        raise describe_decoding_error(error, "The body") from error


def describe_decoding_error(error: Exception, subject: str, *, line: int | None = None) -> Problem:
    """Return the Problem for a document that cannot be decoded; `subject` begins its sentence."""
    if not isinstance(error, msgspec.ValidationError):
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        return Problem(
            400, "invalid-json", f"{subject} is not valid JSON: {reason}.", errors=[Place(reason, line=line)]
        )
    reason, path = split_path(str(error))
    where = f"{subject}, {path}" if path else subject
    code = InvalidItem.code if line is not None or path.startswith("items[") else "invalid-request"
    return refuse(
        reason, code=code, detail=f"{where}: {reason}.", pointer=to_pointer(path) or None, line=line
    )


def split_path(message: str) -> tuple[str, str]:
    """Split msgspec's "Expected `str`, got `int` - at `$.items[2].text`" into its reason and "items[2].text"."""
    reason, _, path = message.partition(" - at `")
    return reason, path.removesuffix("`").removeprefix("$").removeprefix(".")


def to_pointer(path: str) -> str:
    """Return "items[2].text" as the JSON pointer (RFC 6901) "/items/2/text"."""
    parts = path.replace("[", ".").replace("]", "").split(".")
    return "".join(f"/{part}" for part in parts if part)


def make_item(body: ItemBody, max_key_bytes: int, *, reads_pairs: bool = False) -> Item:
    """Return the Item of a decoded body. Raise UnreadableItem for a key or metadata that Postgres cannot store, and for
    a second text if the task takes no pairs.
    """
    return make_items([body], max_key_bytes, reads_pairs=reads_pairs)[0]


def make_items(bodies: Sequence[ItemBody], max_key_bytes: int, *, reads_pairs: bool = False) -> Items:
    """Make the Items of decoded bodies at once. Raise UnreadableItem for any bad item, not always for the first."""
    keys = [body.key for body in bodies]
    if not are_sound_keys(keys, max_key_bytes):
        for key in keys:
            check_key(key, max_key_bytes)
    metadata = [b"" if body.metadata is None else encode_metadata(body.metadata) for body in bodies]
    texts = encode_texts([body.text for body in bodies])
    pairs = [body.text_pair for body in bodies]
    if not reads_pairs and pairs.count(None) != len(pairs):
        raise UnreadableItem(
            "text_pair",
            f"text_pair is only for items of the task {JUDGE} or with long_texts={LATE}, and not for passages",
        )
    return Items(keys, join_pairs(texts, pairs) if reads_pairs else texts, metadata)


def check_text(text: bytes, max_chars: int, pointer: str) -> None:
    """Raise Problem, with the text's JSON pointer in the body, if it cannot be encoded."""
    failure = find_text_failure(text, max_chars)
    if failure is not None:
        raise refuse_text(pointer, failure.detail)


def locate(values: Sequence[T], field: str, *, is_list: bool = True) -> dict[str, T]:
    """Return the values of a field by their JSON pointers in the body; without a list, the field is the only one."""
    return {f"/{field}/{number}" if is_list else f"/{field}": value for number, value in enumerate(values)}


def refuse_text(pointer: str, reason: str) -> Problem:
    """Return the Problem of a text that cannot be encoded, at this JSON pointer in the body."""
    detail = f"{name_parameter(pointer)} cannot be encoded: {reason}."
    return refuse(reason, code=InvalidItem.code, detail=detail, pointer=pointer)


def check_key(key: str, max_key_bytes: int) -> str:
    """Return the key unchanged. Raise UnreadableItem if Postgres cannot store it."""
    reason = find_key_fault(key, max_key_bytes)
    if reason is not None:
        raise UnreadableItem("key", reason)
    return key


def encode_metadata(metadata: dict[str, Any]) -> bytes:
    """Encode metadata as JSON that jsonb accepts and responses can hold. Raise UnreadableItem if that is impossible.

    The client's own JSON is not used, since it may have numbers that Postgres' `numeric` cannot hold.
    """
    try:
        return values.encode_metadata(metadata, is_json=True)
    except ValueError as error:
        raise UnreadableItem("metadata", f"the metadata {error}") from None


SENDABLE: Final = re.compile(r"[\x20-\x7e]{1,255}")
# A key has 1 to 255 visible ASCII characters, with spaces between them.
KEY_PATTERN: Final = "^[!-~]([ -~]{0,253}[!-~])?$"


async def read_idempotency_key(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(
            description="Repeating a request with the same key and content returns what the first one "
            "created, and never creates a second.",
            json_schema_extra={"anyOf": [{"type": "string", "pattern": KEY_PATTERN}, {"type": "null"}]},
        ),
    ] = None,
) -> str | None:
    """Return the Idempotency-Key as stored, distinct for each API key, or None. Raise Problem if it is malformed."""
    if idempotency_key is None:
        return None
    if not SENDABLE.fullmatch(idempotency_key):
        reason = "Idempotency-Key must have 1 to 255 visible ASCII characters."
        raise refuse(reason, header="Idempotency-Key")
    return own_idempotency_key(idempotency_key, find_key_id(request))


IdempotencyKey = Annotated[str | None, Depends(read_idempotency_key)]
