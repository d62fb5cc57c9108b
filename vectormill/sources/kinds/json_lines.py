"""JSON lines: blocks of a file become rows, many lines at a time. Knows nothing of keys or texts."""

import json
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import msgspec

from vectormill.domain.errors import SourceFailed

BLOCK_BYTES: Final = 1 << 20
ROW_DECODER: Final = msgspec.json.Decoder(dict[str, Any])
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


def read_json_lines(file: BinaryIO, name: str, max_line_bytes: int) -> Iterator[list[dict[str, Any]]]:
    """The objects of the lines, never an empty list. Raises SourceFailed naming the line that is none.

    Such a line is not passed over: which row it was nobody knows, and it would count as vanished.
    """
    rest = b""
    num_lines = 0
    while block := file.read(BLOCK_BYTES):
        if num_lines == 0 and not rest:
            block = block.removeprefix(BYTE_ORDER_MARK)
        lines, newline, rest_of_block = block.rpartition(b"\n")
        if not newline:
            rest += block
            if len(rest) > max_line_bytes:
                raise SourceFailed(
                    f"{name}, line {num_lines + 1}: it has more than {max_line_bytes} bytes "
                    "(VECTORMILL_MAX_LINE_BYTES)."
                )
            continue
        whole, rest = rest + lines, rest_of_block
        if rows := decode_lines(whole, name, num_lines):
            yield rows
        num_lines += whole.count(b"\n") + 1
    if rows := decode_lines(rest, name, num_lines):
        yield rows


def decode_lines(lines: bytes, name: str, num_before: int) -> list[dict[str, Any]]:
    """`num_before` lines stand before these."""
    try:
        return ROW_DECODER.decode_lines(lines)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        numbered = enumerate(lines.split(b"\n"), start=num_before + 1)
        return [decode_line(line, f"{name}, line {number}") for number, line in numbered if line.strip()]


def decode_line(line: bytes, place: str) -> dict[str, Any]:
    """Bytes that are not UTF-8, and halves of surrogate pairs, stay in the text, which fails alone."""
    try:
        row = json.loads(line.decode("utf-8", "surrogateescape"))
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise SourceFailed(f"{place}: it is not JSON ({reason}).") from error
    except RecursionError as error:
        raise SourceFailed(f"{place}: its JSON is nested too deeply.") from error
    if not isinstance(row, dict):
        raise SourceFailed(f"{place}: a JSON object is needed, with a key and a text.")
    return row
