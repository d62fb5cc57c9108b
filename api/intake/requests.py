"""Requests: decode the JSON of clients with msgspec, at a few microseconds per item.

A lone surrogate (an escape such as "\\ud800") is legal JSON but not valid text. msgspec refuses it, so such a document
is parsed by the standard library instead, and the worker reports that one item as an error.
"""

import json
import math
import re
from collections.abc import Sequence
from typing import Any, Final, NoReturn, TypeVar

import msgspec

from api.problems import Place, Problem
from vectormill.domain.errors import InvalidItem
from vectormill.domain.task import JUDGE
from vectormill.jobs.bodies import ItemBody, JobRequest
from vectormill.jobs.item import Item, Items, has_nul, join_pair

SURROGATE_ESCAPE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
# The exceptions that decoding a document may raise.
DECODING_ERRORS: Final = (msgspec.DecodeError, ValueError, RecursionError)

# The library that encodes responses supports a depth of 255: a job with deeper metadata would break every page of jobs
# that lists it.
MAX_METADATA_DEPTH: Final = 100

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
    return Problem(
        422, code, f"{where}: {reason}.", errors=[Place(reason, pointer=to_pointer(path) or None, line=line)]
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
    key = check_key(body.key, max_key_bytes)
    metadata = b"" if body.metadata is None else encode_metadata(body.metadata)
    return Item(key, _encode_text(body, reads_pairs=reads_pairs), metadata)


def make_items(bodies: Sequence[ItemBody], max_key_bytes: int, *, reads_pairs: bool = False) -> Items:
    """Make the Items of decoded bodies at once. Raise UnreadableItem for any bad item, not always for the first."""
    keys = [body.key for body in bodies]
    try:
        lengths = list(map(len, map(str.encode, keys)))
    except UnicodeEncodeError:
        lengths = [0]
    if lengths and (min(lengths) == 0 or max(lengths) > max_key_bytes or "\0" in "".join(keys)):
        for key in keys:
            check_key(key, max_key_bytes)
    metadata = [b"" if body.metadata is None else encode_metadata(body.metadata) for body in bodies]
    if reads_pairs or any(body.text_pair is not None for body in bodies):
        texts = [_encode_text(body, reads_pairs=reads_pairs) for body in bodies]
    else:
        texts = [body.text.encode("utf-8", "surrogatepass") for body in bodies]
    return Items(keys, texts, metadata)


def _encode_text(body: ItemBody, *, reads_pairs: bool) -> bytes:
    text = body.text.encode("utf-8", "surrogatepass")
    if body.text_pair is None:
        return text
    if not reads_pairs:
        raise UnreadableItem(
            "text_pair", f"text_pair is only for items of the task {JUDGE}, and not for passages"
        )
    return join_pair(text, body.text_pair.encode("utf-8", "surrogatepass"))


def check_key(key: str, max_key_bytes: int) -> str:
    """Return the key unchanged. Raise UnreadableItem if Postgres cannot store it."""
    try:
        num_key_bytes = len(key.encode())
    except UnicodeEncodeError:
        raise UnreadableItem("key", "the key contains half of a UTF-16 surrogate pair") from None
    if not 0 < num_key_bytes <= max_key_bytes:
        reason = (
            f"the key has {num_key_bytes} bytes; the limit is {max_key_bytes}" if key else "the key is empty"
        )
        raise UnreadableItem("key", reason)
    if "\0" in key:
        raise UnreadableItem("key", "the key contains a NUL character (U+0000)")
    return key


def encode_metadata(metadata: dict[str, Any]) -> bytes:
    """Encode metadata as JSON that jsonb accepts and responses can hold. Raise UnreadableItem if that is impossible.

    The client's own JSON is not used, since it may have numbers that Postgres' `numeric` cannot hold.
    """
    try:
        encoded = msgspec.json.encode(metadata)
    except UnicodeEncodeError:
        raise UnreadableItem("metadata", "the metadata contains half of a UTF-16 surrogate pair") from None
    except RecursionError:
        raise _too_deep() from None
    # Opening brackets are counted first, which is cheap: the depth cannot exceed their number, and they are mostly few.
    if len(encoded) > 2 * MAX_METADATA_DEPTH:
        num_brackets = encoded.count(b"{") + encoded.count(b"[")
        if num_brackets > MAX_METADATA_DEPTH and measure_depth(metadata) > MAX_METADATA_DEPTH:
            raise _too_deep()
    if has_nul(encoded):
        raise UnreadableItem("metadata", "the metadata contains a NUL character (U+0000)")
    return encoded


def _too_deep() -> UnreadableItem:
    return UnreadableItem("metadata", f"the metadata is nested more than {MAX_METADATA_DEPTH} levels deep")


def measure_depth(value: Any) -> int:
    """Return the depth of nesting of objects and arrays, without recursion, which Python limits."""
    depth, layer = 0, [value]
    while layer := [inner for inner in layer if isinstance(inner, dict | list)]:
        depth += 1
        layer = [part for inner in layer for part in (inner.values() if isinstance(inner, dict) else inner)]
    return depth
