"""NDJSON: decode a stream of blocks, compressed or not, into items, in memory bounded by a block and the longest line.

All lines of a block are decoded at once (1 µs per line). Only if that fails are they decoded one by one, so that the
error can name the line.
"""

import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from api.intake.requests import (
    DECODING_ERRORS,
    ITEM_DECODER,
    UnreadableItem,
    decode_json,
    describe_decoding_error,
    make_item,
    make_items,
)
from api.problems import Limit, Place, Problem, refuse_size
from vectormill.domain.errors import SubmissionTooLarge
from vectormill.jobs.item import Item, Items
from vectormill.rows.decoding import WholeLines, decode_objects, is_bomb, list_lines

PIECE_BYTES: Final = 1 << 20
_GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS


class Inflater:
    """A streaming decompressor of a gzip body, which may have several members (RFC 1952), with a limit on its ratio.

    A malicious gzip body (a zip bomb) can expand 1,000-fold; text expands 3 to 20-fold.
    """

    def __init__(self, max_ratio: Limit) -> None:
        self._max_ratio = max_ratio
        self._num_received = 0
        self._num_given = 0
        self._member = zlib.decompressobj(_GZIP_WINDOW)
        self._has_input = False

    def feed(self, block: bytes) -> Iterator[bytes]:
        """Yield the decompressed block in pieces of at most PIECE_BYTES. Raise Problem if it is not gzip, or if the
        body expands too much.
        """
        self._num_received += len(block)
        data, piece = block, b""
        while data or len(piece) == PIECE_BYTES:
            if self._member.eof:
                # Some writers pad the last member with zeros.
                data = data.lstrip(b"\0")
                if not data:
                    return
                self._member = zlib.decompressobj(_GZIP_WINDOW)
            try:
                piece = self._member.decompress(data, PIECE_BYTES)
            except zlib.error as error:
                raise Problem(400, "invalid-gzip", f"The body is not valid gzip: {error}.") from error
            self._has_input = True
            data = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
            self._num_given += len(piece)
            if is_bomb(self._num_given, self._num_received, self._max_ratio.value):
                raise refuse_size(
                    self._max_ratio,
                    f"The gzip body expands to more than {self._max_ratio.value} times its size "
                    f"({self._max_ratio.setting}); send it with less compression, or uncompressed.",
                )
            if piece:
                yield piece

    def finish(self) -> None:
        """Raise Problem if the last gzip member is incomplete. Call it after the last block."""
        if self._has_input and not self._member.eof:
            raise Problem(400, "invalid-gzip", "The gzip body ends before its last member is complete.")


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
            if not line or line.isspace():
                continue
            try:
                body = decode_json(line, ITEM_DECODER)
                yield make_item(body, self._max_key_bytes, reads_pairs=self._reads_pairs)
            except UnreadableItem as error:
                raise error.refuse(f"Line {number}", f"/{error.field}", line=number) from error
            except DECODING_ERRORS as error:
                raise describe_decoding_error(error, f"Line {number}", line=number) from error

    def _too_long(self, number: int) -> Problem:
        reason = f"the line has more than {self._max_line_bytes} bytes (VECTORMILL_MAX_LINE_BYTES)"
        return Problem(
            413, SubmissionTooLarge.code, f"Line {number}: {reason}.", errors=[Place(reason, line=number)]
        )
