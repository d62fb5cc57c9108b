"""File uploads: read multipart forms in constant memory, and store the file of one as a file of requests.

If the upload fails or the client disconnects, the stored part is removed.
"""

import hashlib
from collections.abc import Callable
from typing import Final

from fastapi import Request
from fastapi.concurrency import contextmanager_in_threadpool, run_in_threadpool
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from api.dependencies import Resources
from api.intake.bodies import make_inflater, read_blocks
from api.problems import FORM_TYPE, Limit, Problem, refuse, refuse_size, unsupported_media_type
from vectormill.batches.files import FileWriter
from vectormill.batches.operations import LEAST_LIFETIME_SECONDS, MOST_LIFETIME_SECONDS
from vectormill.batches.request_batch import BATCH, RequestFile
from vectormill.db.parameters import to_jsonb
from vectormill.settings import Settings

# The boundaries and fields around a file take at most this many bytes of the body.
FORM_BYTES: Final = 64 << 10
ANCHOR: Final = "created_at"


async def receive_file(request: Request, resources: Resources, idempotency_key: str | None) -> RequestFile:
    """Store the uploaded file and return it, committed; return the earlier file for a repeated Idempotency-Key.

    Raise Problem, UploadRemoved and IdempotencyMismatch.
    """
    content = hashlib.blake2b()
    with resources.gates.uploads.enter():
        async with contextmanager_in_threadpool(FileWriter(resources.engine)) as writer:

            def take(piece: bytes) -> None:
                writer.add(piece)
                content.update(piece)

            filename, fields = await receive_form(request, resources.settings, take)

            def finish() -> RequestFile:
                lifetime = read_lifetime(fields, resources.settings.file_retention_days * 86400)
                purpose = read_purpose(fields)
                named = [writer.num_bytes, filename, sorted(fields.items())]
                content.update(to_jsonb(named).encode())
                return writer.finish(purpose, filename, lifetime, idempotency_key, content.digest())

            return await run_in_threadpool(finish)


async def receive_form(
    request: Request, settings: Settings, take: Callable[[bytes], object]
) -> tuple[str, dict[str, str]]:
    """Pass the file of a form to `take`, in threads and piece by piece. Return the file's name and the form's fields.

    Raise Problem for a form that cannot be read and a file that is too large, and the exceptions of `take`.
    """
    limit = Limit.of(settings, "max_file_bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit.value + FORM_BYTES:
        raise file_too_large(limit)
    num_bytes = 0

    def take_in_bounds(piece: bytes) -> None:
        nonlocal num_bytes
        num_bytes += len(piece)
        if num_bytes > limit.value:
            raise file_too_large(limit)
        take(piece)

    reader = MultipartReader(read_boundary(request), take_in_bounds)
    inflater = make_inflater(request, settings)

    def feed(block: bytes) -> None:
        for piece in inflater.feed(block) if inflater else (block,):
            reader.feed(piece)

    async for block in read_blocks(request):
        await run_in_threadpool(feed, block)
    if inflater:
        inflater.finish()
    return reader.finish(), reader.fields


def file_too_large(limit: Limit) -> Problem:
    return refuse_size(
        limit, f"The file has more than {limit.value:,} bytes ({limit.setting}); split it into several."
    )


def read_purpose(fields: dict[str, str]) -> str:
    """Return the form's purpose of the file. Raise Problem unless it is `batch`, the only one supported."""
    purpose = fields.get("purpose")
    if purpose == BATCH:
        return BATCH
    said = "is missing" if purpose is None else f"is {purpose[:50]!r}"
    raise refuse(f"purpose {said}; only files with the purpose {BATCH!r} are accepted", pointer="/purpose")


def read_lifetime(fields: dict[str, str], default_seconds: float) -> float:
    """Return the lifetime of a file in seconds by the form's `expires_after[…]` fields, or `default_seconds`.

    Raise Problem if the anchor or the number of seconds is not allowed.
    """
    seconds, anchor = fields.get("expires_after[seconds]"), fields.get("expires_after[anchor]", ANCHOR)
    if anchor != ANCHOR:
        raise refuse(f"expires_after[anchor] must be {ANCHOR!r}", pointer="/expires_after")
    if seconds is None:
        return default_seconds
    is_number = seconds.isascii() and seconds.isdecimal() and len(seconds) < 12
    if not is_number or not LEAST_LIFETIME_SECONDS <= int(seconds) <= MOST_LIFETIME_SECONDS:
        raise refuse(
            f"expires_after[seconds] must be a whole number from {LEAST_LIFETIME_SECONDS} to {MOST_LIFETIME_SECONDS}",
            pointer="/expires_after",
        )
    return float(seconds)


MAX_FIELD_BYTES: Final = 4096
MAX_FIELDS: Final = 100
MAX_FILENAME_CHARS: Final = 255


def read_boundary(request: Request) -> bytes:
    """Return the multipart boundary of the request. Raise Problem if the body is not a multipart form."""
    media_type, options = parse_options_header(request.headers.get("content-type", ""))
    if media_type != FORM_TYPE.encode():
        raise unsupported_media_type(media_type.decode("latin-1"), FORM_TYPE)
    boundary = options.get(b"boundary")
    if not boundary:
        raise invalid_form("its Content-Type has no boundary")
    return boundary


def invalid_form(reason: str) -> Problem:
    return Problem(400, "invalid-form", f"The body is not a valid multipart form: {reason}.")


class MultipartReader:
    """A streaming parser of multipart forms (RFC 7578). It keeps the short `fields`, and passes the file to `take`.

    `filename` is the client's name of the file, None until the part `file` begins. Methods raise Problem for a form
    that cannot be parsed.
    """

    def __init__(self, boundary: bytes, take: Callable[[bytes], object]) -> None:
        self._take = take
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._headers: dict[str, bytes] = {}
        self._name = ""
        self._is_file = False
        self._value = bytearray()
        self._is_whole = False
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": lambda data, start, end: self._header_name.extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._take_data,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise invalid_form(_sentence(error)) from error

    def feed(self, block: bytes) -> None:
        """Parse the next block of the body. Raise Problem, and the exceptions of `take`."""
        try:
            self._parser.write(block)
        except FormParserError as error:
            raise invalid_form(_sentence(error)) from error

    def finish(self) -> str:
        """Return the name of the file. Raise Problem if the form has ended early or has none. Call it at the end."""
        if not self._is_whole:
            raise invalid_form("it ends before its last boundary")
        if self.filename is None:
            raise refuse("The form has no file: send it as the part `file`.", pointer="/file")
        return self.filename

    def _begin_part(self) -> None:
        self._headers.clear()
        self._value.clear()

    def _end_header(self) -> None:
        self._headers[self._header_name.decode("latin-1").lower()] = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get("content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if not self._is_file:
            return
        if self.filename is not None:
            raise invalid_form("it has two parts named file; send one file per request")
        # Some clients send a path, whose last part is the name.
        sent = options.get(b"filename", b"").decode("utf-8", "replace").replace("\\", "/")
        self.filename = sent.rpartition("/")[2].replace("\0", "")[:MAX_FILENAME_CHARS] or "upload"

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._take(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise invalid_form(f"field {self._name[:50]!r} exceeds the limit of {MAX_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if self._is_file:
            return
        if self._name not in self.fields and len(self.fields) >= MAX_FIELDS:
            raise invalid_form(f"it has more than {MAX_FIELDS} fields")
        self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_whole = True


def _sentence(error: Exception) -> str:
    """Return the error's text without capital and full stop, to end a sentence."""
    text = str(error)
    return (text[:1].lower() + text[1:]).rstrip(".")
