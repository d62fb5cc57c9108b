"""Lines of a file that comes in pieces, in bounded memory however long a line is."""

from collections.abc import Iterable, Iterator
from typing import Final

BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


def read_lines(pieces: Iterable[bytes], max_line_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """The number of each line that is not blank, from 1, and its bytes; None for a line that is too long."""
    number, rest, is_too_long = 0, bytearray(), False
    for piece in pieces:
        start = 0
        while (end := piece.find(b"\n", start)) >= 0:
            number += 1
            if is_too_long or len(rest) + end - start > max_line_bytes:
                yield number, None
            else:
                line = bytes(rest) + piece[start:end] if rest else piece[start:end]
                yield from _give(number, line)
            rest.clear()
            is_too_long, start = False, end + 1
        if not is_too_long:
            rest += piece[start:]
            if len(rest) > max_line_bytes:
                is_too_long = True
                rest.clear()
    if is_too_long:
        yield number + 1, None
    else:
        yield from _give(number + 1, bytes(rest))


def _give(number: int, line: bytes) -> Iterator[tuple[int, bytes]]:
    if number == 1:
        line = line.removeprefix(BYTE_ORDER_MARK)
    if line.strip():
        yield number, line
