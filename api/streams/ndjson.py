"""NDJSON: decode a stream of blocks into items, in memory bounded by a block and the longest line.

All lines of a block are decoded at once (1 µs per line). Only if that fails are they decoded one by one, so that the
error can name the line.
"""

from collections.abc import Iterator
from contextlib import suppress

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
from vectormill.jobs.item import Item, Items
from vectormill.rows.decoding import WholeLines, decode_objects, list_lines

NO_ITEMS = Items((), (), ())


class ItemReader:
    """A decoder of consecutive blocks of one stream into items. All errors are Problems that name the line, from 1."""

    def __init__(self, *, max_line_bytes: int, max_key_bytes: int, reads_pairs: bool = False) -> None:
        self._max_line_bytes = max_line_bytes
        self._max_key_bytes = max_key_bytes
        self._reads_pairs = reads_pairs
        self._lines = WholeLines("the body", max_line_bytes)

    def read(self, block: bytes) -> Items:
        """Return the items of all lines that end in this block, and keep the unfinished last line."""
        try:
            return self._read_lines(self._lines.take(block))
        except SubmissionTooLarge as error:
            raise self._too_long(self._lines.num_read + 1) from error

    def finish(self) -> Items:
        """Return the item of the last line if it has no newline. Call it after the last block."""
        return self._read_lines(self._lines.end())

    def _read_lines(self, lines: bytes) -> Items:
        """Return the items of these lines, each of which ends with a newline."""
        # Longer lines than the limit are told from others one by one.
        num_lines = self._lines.num_read - self._lines.num_lines
        is_short = 0 < len(lines) <= self._max_line_bytes
        bodies = decode_objects(lines, num_lines, ITEM_DECODER) if is_short else None
        if bodies is not None:
            with suppress(UnreadableItem):
                return make_items(bodies, self._max_key_bytes, reads_pairs=self._reads_pairs)
        return Items.of(list(self._read_one_by_one(lines))) if lines else NO_ITEMS

    def _read_one_by_one(self, lines: bytes) -> Iterator[Item]:
        for number, line in enumerate(list_lines(lines), start=self._lines.num_lines + 1):
            if len(line) > self._max_line_bytes:
                raise self._too_long(number)
            if line and not line.isspace():
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
