"""Request lines: each line of a request file is parsed into a request, or refused with a reason.

A line is `{"custom_id", "method", "url", "body"}`, with the body that the endpoint takes. Independent of the
database and of models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from vectormill.batches.endpoints import (
    BASE64,
    EMBEDDINGS_DECODER,
    RERANK_DECODER,
    EncodingRequest,
    read_inputs,
)
from vectormill.batches.request_batch import EMBEDDINGS, RERANK
from vectormill.domain.errors import InvalidOption
from vectormill.jobs.item import pair_with_each

# Bytes of an item's key that are not available to its custom_id.
KEY_ROOM: Final = 32


# Options that must be equal in all lines of a batch.
SHARED_OPTIONS: Final = ("dimensions", "prompt", "input_type", "normalize", "long_texts", "max_tokens")


class RefusedLine(Exception):
    """A line of a request file cannot be answered, for the reason in `message`."""

    def __init__(
        self, code: str, message: str, *, custom_id: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.custom_id = custom_id
        self.param = param


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A parsed line of a request file.

    `texts` become items of the job; `facts` are kept for writing the answer.
    """

    custom_id: str
    encoding: EncodingRequest
    texts: Sequence[bytes]
    facts: Mapping[str, Any]


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _CustomId(msgspec.Struct):
    custom_id: str


_ENVELOPE: Final = msgspec.json.Decoder(_Envelope)
_CUSTOM_ID: Final = msgspec.json.Decoder(_CustomId)
_ERRORS: Final = (msgspec.DecodeError, ValueError, RecursionError)


def find_custom_id(line: bytes) -> str | None:
    """Return the custom_id of a line even if the line is otherwise invalid; None if it has none."""
    try:
        return _CUSTOM_ID.decode(line).custom_id
    except _ERRORS:
        return None


def parse_line(line: bytes, endpoint: str, max_key_bytes: int) -> RequestLine:
    """Parse a line of a batch whose endpoint is `endpoint`. Raise RefusedLine."""
    try:
        envelope = _ENVELOPE.decode(line)
    except _ERRORS as error:
        raise _describe(error, "the line", find_custom_id(line)) from error
    custom_id = envelope.custom_id
    _check_custom_id(custom_id, max_key_bytes - KEY_ROOM)
    if envelope.method != "POST":
        raise RefusedLine(
            "invalid_method",
            f"method must be POST, not {envelope.method[:20]!r}.",
            custom_id=custom_id,
            param="method",
        )
    if envelope.url != endpoint:
        raise RefusedLine(
            "mismatched_endpoint",
            f"url is {envelope.url[:50]!r}, but the batch's endpoint is {endpoint}; all lines must have the same url.",
            custom_id=custom_id,
            param="url",
        )
    try:
        encoding, texts, facts = PARSERS[endpoint](bytes(envelope.body))
    except RefusedLine as refused:
        refused.custom_id = custom_id
        raise
    except _ERRORS as error:
        raise _describe(error, "body", custom_id) from error
    return RequestLine(custom_id, encoding, texts, facts)


def _check_custom_id(custom_id: str, max_bytes: int) -> None:
    if "\0" in custom_id or not 0 < len(custom_id.encode()) <= max_bytes:
        raise RefusedLine(
            "invalid_custom_id",
            f"custom_id must have 1 to {max_bytes} bytes and no NUL character.",
            param="custom_id",
        )


def _describe(error: Exception, subject: str, custom_id: str | None) -> RefusedLine:
    if not isinstance(error, msgspec.ValidationError):
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        return RefusedLine(
            "invalid_json_line", f"{subject} is not valid JSON: {reason}.", custom_id=custom_id
        )
    reason, _, path = str(error).partition(" - at `$")
    path = path.removesuffix("`").removeprefix(".")
    where = f"{subject}, {path}" if path else subject
    return RefusedLine("invalid_request", f"{where}: {reason}.", custom_id=custom_id, param=path or None)


Parsed = tuple[EncodingRequest, Sequence[bytes], Mapping[str, Any]]


def _parse_embeddings(content: bytes) -> Parsed:
    body = EMBEDDINGS_DECODER.decode(content)
    facts = {"encoding_format": BASE64} if body.encoding_format == BASE64 else {}
    try:
        return body.encoding(), read_inputs(body), facts
    except InvalidOption as error:
        raise RefusedLine("invalid_request", str(error), param="input") from error


def _parse_rerank(content: bytes) -> Parsed:
    body = RERANK_DECODER.decode(content)
    facts: dict[str, Any] = {}
    if body.limit is not None:
        facts["top_n"] = body.limit
    if body.return_documents:
        facts["return_documents"] = True
    if body.is_voyages:
        facts["is_voyages"] = True
    try:
        pairs = pair_with_each(body.query.encode(), [text.encode() for text in body.texts()])
    except InvalidOption as error:
        raise RefusedLine("invalid_request", str(error), param="documents") from None
    return body.encoding(), pairs, facts


PARSERS: Final = {EMBEDDINGS: _parse_embeddings, RERANK: _parse_rerank}


def make_key(line: int, index: int, custom_id: str) -> str:
    """Return an item's key, which is unique in its job and made of the line number, index and custom_id."""
    return f"{line}.{index}:{custom_id}"


def split_key(key: str) -> tuple[int, int, str]:
    """Split an item's key into its line number, its index within the line, and its custom_id."""
    place, _, custom_id = key.partition(":")
    line, _, index = place.partition(".")
    return int(line), int(index), custom_id
