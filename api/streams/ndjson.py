"""NDJSON: decode a stream of blocks into items, in memory bounded by a block and the longest line.

All lines of a block are decoded at once (1 µs per line). Only if that fails are they decoded one by one, so that the
error can name the line.
"""

from collections.abc import Iterator

from api.intake.requests import (
    DECODING_ERRORS,
    ITEM_DECODER,
    UnreadableItem,
    decode_json,
    describe_decoding_error,
    make_item,
    make_items,
)
from api.problems import Place, Problem
from vectormill.domain.errors import InvalidItem, SubmissionTooLarge
from vectormill.jobs.bodies import ItemBody
from vectormill.jobs.item import Item, Items

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
NO_ITEMS = Items((), (), ())


class ItemReader:
    """A decoder of consecutive blocks of one stream into items. All errors are Problems that name the line, from 1."""

    def __init__(self, *, max_line_bytes: int, max_key_bytes: int, reads_pairs: bool = False) -> None:
        self._max_line_bytes = max_line_bytes
        self._max_key_bytes = max_key_bytes
        self._reads_pairs = reads_pairs
        self._unfinished: list[bytes] = []
        self._unfinished_bytes = 0
        self._num_lines = 0

    def read(self, block: bytes) -> Items:
        """Return the items of all lines that end in this block, and keep the unfinished last line."""
        end = block.rfind(b"\n") + 1
        if not end:
            self._keep(block)
            return NO_ITEMS
        lines = b"".join([*self._unfinished, block[:end]])
        self._unfinished, self._unfinished_bytes = [], 0
        self._keep(block[end:])
        return self._read_lines(lines)

    def finish(self) -> Items:
        """Return the item of the last line if it has no newline. Call it after the last block."""
        line = b"".join(self._unfinished)
        return self._read_lines(line + b"\n") if line else NO_ITEMS

    def _keep(self, part: bytes) -> None:
        if part:
            self._unfinished.append(part)
            self._unfinished_bytes += len(part)
        if self._unfinished_bytes > self._max_line_bytes:
            raise self._too_long(self._num_lines + 1)

    def _read_lines(self, lines: bytes) -> Items:
        """Return the items of these lines, each of which ends with a newline."""
        if self._num_lines == 0:
            lines = lines.removeprefix(BYTE_ORDER_MARK)
        num_lines = lines.count(b"\n")
        bodies = self._decode_together(lines, num_lines)
        try:
            items = (
                None
                if bodies is None
                else make_items(bodies, self._max_key_bytes, reads_pairs=self._reads_pairs)
            )
        except UnreadableItem:
            items = None
        if items is None:
            items = Items.of(list(self._read_one_by_one(lines)))
        self._num_lines += num_lines
        return items

    def _decode_together(self, lines: bytes, num_lines: int) -> list[ItemBody] | None:
        """Return a body per line, or None if a line is blank or wrong, or might be too long: then decode one by one."""
        if len(lines) > self._max_line_bytes or not is_object_per_line(lines, num_lines):
            return None
        try:
            bodies = ITEM_DECODER.decode_lines(lines)
        except DECODING_ERRORS:
            return None
        return bodies if len(bodies) == num_lines else None

    def _read_one_by_one(self, lines: bytes) -> Iterator[Item]:
        for number, line in enumerate(lines[:-1].split(b"\n"), start=self._num_lines + 1):
            if len(line) > self._max_line_bytes:
                raise self._too_long(number)
            if not line or line.isspace():
                continue
            yield self._read_line(number, line)

    def _read_line(self, number: int, line: bytes) -> Item:
        try:
            body = decode_json(line, ITEM_DECODER)
            return make_item(body, self._max_key_bytes, reads_pairs=self._reads_pairs)
        except UnreadableItem as error:
            raise Problem(
                422,
                InvalidItem.code,
                f"Line {number}: {error.reason}.",
                errors=[Place(error.reason, pointer=f"/{error.field}", line=number)],
            ) from error
        except DECODING_ERRORS as error:
            raise describe_decoding_error(error, f"Line {number}", line=number) from error

    def _too_long(self, number: int) -> Problem:
        reason = f"the line has more than {self._max_line_bytes} bytes (VECTORMILL_MAX_LINE_BYTES)"
        return Problem(
            413, SubmissionTooLarge.code, f"Line {number}: {reason}.", errors=[Place(reason, line=number)]
        )


def is_object_per_line(lines: bytes, num_lines: int) -> bool:
    """Return whether every line starts with { and ends with }.

    msgspec's decode_lines treats newlines as any white space: it accepts two objects on one line, or one on two lines.
    With this check and as many objects as lines, each line is exactly one object.
    """
    num_ends = lines.count(b"}\n") + lines.count(b"}\r\n")
    return lines.startswith(b"{") and lines.count(b"\n{") == num_lines - 1 and num_ends == num_lines
