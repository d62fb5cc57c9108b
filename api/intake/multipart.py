"""MultipartReader: a multipart form read as a stream (RFC 7578). A file's bytes go on as they come; fields are short.

Knows nothing of what a form is for, nor where a file goes.
"""

from collections.abc import Callable
from typing import Final

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from api.door.media_types import unsupported_media_type
from api.problems import Place, Problem

FORM_TYPE: Final = "multipart/form-data"
MAX_FIELD_BYTES: Final = 4096
MAX_FIELDS: Final = 100
MAX_FILENAME_CHARS: Final = 255


def read_boundary(request: Request) -> bytes:
    """Return the boundary of the request's form. Raise Problem when the body is no form."""
    media_type, options = parse_options_header(request.headers.get("content-type", ""))
    if media_type != FORM_TYPE.encode():
        raise unsupported_media_type(media_type.decode("latin-1"), FORM_TYPE)
    boundary = options.get(b"boundary")
    if not boundary:
        raise invalid_form("its Content-Type names no boundary")
    return boundary


def invalid_form(reason: str) -> Problem:
    return Problem(400, "invalid-form", f"The body is not a whole multipart form: {reason}.")


class MultipartReader:
    """Parts without a filename are `fields`; the bytes of the one part that is called `file` are given to `take`.

    `filename` is what the client calls the file, None until it came. Raise Problem for a form that cannot be read.
    """

    def __init__(self, boundary: bytes, take: Callable[[bytes], None]) -> None:
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
        """Read on. Raise Problem, and whatever `take` raises."""
        try:
            self._parser.write(block)
        except FormParserError as error:
            raise invalid_form(_sentence(error)) from error

    def finish(self) -> None:
        """Raise Problem when the form has no end, or no file."""
        if not self._is_whole:
            raise invalid_form("it ends before its last boundary")
        if self.filename is None:
            detail = "There is no file in the form; send one as the part `file`."
            raise Problem(422, "invalid-request", detail, errors=[Place(detail, pointer="/file")])

    def _begin_part(self) -> None:
        self._headers = {}
        self._header_name.clear()
        self._header_value.clear()
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
            raise invalid_form("it has two parts that are called file; send each file alone")
        # Some clients send a path; of that the name is the last part.
        sent = options.get(b"filename", b"").decode("utf-8", "replace").replace("\\", "/")
        self.filename = sent.rpartition("/")[2].replace("\0", "")[:MAX_FILENAME_CHARS] or "upload"

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._take(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise invalid_form(f"the field {self._name[:50]!r} has more than {MAX_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if self._is_file:
            return
        if self._name not in self.fields and len(self.fields) >= MAX_FIELDS:
            raise invalid_form(f"it has more than {MAX_FIELDS} fields")
        self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_whole = True


def _sentence(error: Exception) -> str:
    """Return the error's text as the end of a sentence."""
    text = str(error)
    return (text[:1].lower() + text[1:]).rstrip(".")
