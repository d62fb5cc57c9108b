"""Inflater: gzip in, plain bytes out, in bounded pieces, so that a small body cannot fill the memory."""

import zlib
from collections.abc import Iterator
from typing import Final

from api.problems import Problem

PIECE_BYTES: Final = 1 << 20
_GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS


class Inflater:
    """Decompresses consecutive blocks of a gzip body, which may have several members (RFC 1952)."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(_GZIP_WINDOW)
        self._has_input = False

    def feed(self, block: bytes) -> Iterator[bytes]:
        """Pieces of at most PIECE_BYTES. Raises Problem when the block is not gzip."""
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
            if piece:
                yield piece

    def finish(self) -> None:
        """Raises Problem when the last member has no end."""
        if self._has_input and not self._member.eof:
            raise Problem(400, "invalid-gzip", "The gzip body ends before its last member does.")
