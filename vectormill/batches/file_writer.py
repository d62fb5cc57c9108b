"""FileWriter: bytes that arrive become a file of compressed parts, all or nothing, in the memory of one part.

Parts are written while they arrive, below a file in state `uploading` that nobody finds; the last transaction makes it
`processed`. A file whose writer was killed gives no sign of life any more, and the pruner removes it.
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self
from uuid import UUID, uuid4

import zstandard
from sqlalchemy import Connection, Engine, text

from vectormill.batches.files import find_file
from vectormill.batches.request_file import BATCH, RequestFile
from vectormill.db.idempotency import make_once
from vectormill.domain.errors import UploadRemoved

# One row of Postgres, far from its limit; and what a reader has in memory.
PART_BYTES: Final = 1 << 20
# While bytes arrive a part is written so often at the least: it is the upload's sign of life.
PART_SECONDS: Final = 15.0
_COMPRESSION_LEVEL: Final = 1

BEGIN_FILE = text("""
    INSERT INTO vectormill.request_files (id, state, purpose, filename) VALUES (:id, 'uploading', :purpose, '')
""")

# Locks the file until the part is committed, so that nobody removes it meanwhile.
GIVE_SIGN_OF_LIFE = text("""
    UPDATE vectormill.request_files SET updated_at = now() WHERE id = :id AND state = 'uploading' RETURNING id
""")

INSERT_PART = text("""
    INSERT INTO vectormill.request_file_parts (file_id, seq, num_bytes, content)
    VALUES (:file_id, :seq, :num_bytes, :content)
""")

FINISH_FILE = text("""
    UPDATE vectormill.request_files
       SET state = 'processed', purpose = :purpose, filename = :filename, num_bytes = :num_bytes, updated_at = now(),
           expires_at = created_at + make_interval(secs => CAST(:lifetime_seconds AS double precision))
     WHERE id = :id
""")

DISCARD_UPLOAD = text("""
    UPDATE vectormill.request_files SET state = 'deleting', updated_at = now()
     WHERE id = :id AND state = 'uploading'
""")


class FileWriter:
    """Writes one file. Use as a context manager: leaving it without `finish` removes what was written.

    Not thread-safe.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._part_due = 0.0
        self.id: UUID = uuid4()
        self._is_begun = False
        self._is_finished = False
        self._pieces: list[bytes] = []
        self._waiting_bytes = 0
        self.num_bytes = 0
        self._num_parts = 0

    def __enter__(self) -> Self:
        return self

    def add(self, piece: bytes) -> None:
        """Takes more bytes; writes a part when one is full."""
        self._pieces.append(piece)
        self._waiting_bytes += len(piece)
        self.num_bytes += len(piece)
        if self._waiting_bytes >= PART_BYTES or (self._is_begun and self._clock() >= self._part_due):
            with self._engine.begin() as connection:
                self.write(connection)

    def write(self, connection: Connection) -> None:
        """Writes what has come since the last part, in the caller's transaction. Raises UploadRemoved."""
        if not self._is_begun:
            connection.execute(BEGIN_FILE, {"id": self.id, "purpose": BATCH})
            self._is_begun = True
        elif connection.execute(GIVE_SIGN_OF_LIFE, {"id": self.id}).one_or_none() is None:
            raise UploadRemoved
        content = b"".join(self._pieces)
        rows = []
        for start in range(0, len(content), PART_BYTES):
            part = content[start : start + PART_BYTES]
            rows.append(
                {
                    "file_id": self.id,
                    "seq": self._num_parts,
                    "num_bytes": len(part),
                    "content": zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL).compress(part),
                }
            )
            self._num_parts += 1
        if rows:
            connection.execute(INSERT_PART, rows)
        self._pieces, self._waiting_bytes = [], 0
        self._part_due = self._clock() + PART_SECONDS

    def finish(
        self,
        purpose: str,
        filename: str,
        lifetime_seconds: float | None,
        idempotency_key: str | None = None,
        content: bytes = b"",
    ) -> RequestFile:
        """Make the file visible, unless an earlier one with the same key and content is, which is returned instead.

        `lifetime_seconds` counts from its creation, None is for ever. Raises UploadRemoved, IdempotencyMismatch, and
        RequestFileNotFound where the earlier one is gone.
        """

        def make() -> str:
            return str(self.finish_in(connection, purpose, filename, lifetime_seconds).id)

        with self._engine.begin() as connection:
            file_id = UUID(make_once(connection, "file", idempotency_key, content, make))
            file = find_file(connection, file_id)
        self._is_finished = file_id == self.id
        return file

    def finish_in(
        self, connection: Connection, purpose: str, filename: str, lifetime_seconds: float | None
    ) -> RequestFile:
        """Finish the file in the caller's transaction, which then decides whether the file is there."""
        self.write(connection)
        values = {
            "id": self.id,
            "purpose": purpose,
            "filename": filename,
            "num_bytes": self.num_bytes,
            "lifetime_seconds": lifetime_seconds,
        }
        connection.execute(FINISH_FILE, values)
        return find_file(connection, self.id)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_begun and not self._is_finished:
            with self._engine.begin() as connection:
                connection.execute(DISCARD_UPLOAD, {"id": self.id})
