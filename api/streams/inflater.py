"""Inflater: decompress gzip in bounded pieces, so that a small body (a zip bomb) cannot fill the memory."""

import zlib
from collections.abc import Iterator
from typing import Final

from api.problems import Limit, Problem
from vectormill.domain.errors import SubmissionTooLarge
from vectormill.rows.decoding import is_bomb

PIECE_BYTES: Final = 1 << 20
_GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS


class Inflater:
    """A streaming decompressor of a gzip body, which may have several members (RFC 1952), with a limit on its ratio.

    A malicious gzip body can expand 1,000-fold; text expands 3 to 20-fold.
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
                raise Problem(
                    413,
                    SubmissionTooLarge.code,
                    f"The gzip body expands to more than {self._max_ratio.value} times its size "
                    f"({self._max_ratio.setting}); send it with less compression, or uncompressed.",
                    limit=self._max_ratio,
                )
            if piece:
                yield piece

    def finish(self) -> None:
        """Raise Problem if the last gzip member is incomplete. Call it after the last block."""
        if self._has_input and not self._member.eof:
            raise Problem(400, "invalid-gzip", "The gzip body ends before its last member is complete.")
