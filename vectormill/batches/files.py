"""Files of requests in the database: stored as compressed parts, found, listed, read and deleted.

Parts are written while they arrive, under a file in state `uploading` that no client can find; the last
transaction makes it `processed`. If the writer is killed, the file's heartbeat stops, and the pruner removes
the file.
"""

import time
from collections.abc import Callable, Generator
from typing import Final, Self
from uuid import UUID, uuid4

import zstandard
from sqlalchemy import Connection, Engine, text

from vectormill.batches.request_batch import BATCH, RequestFile
from vectormill.db.idempotency import make_once
from vectormill.domain.errors import RequestFileInUse, RequestFileNotFound, UploadRemoved

# The largest decompressed size of one part. This module writes no larger ones.
MAX_PART_BYTES: Final = 64 << 20

_FILE: Final = """
    SELECT id, seq, purpose, filename, num_bytes, created_at, expires_at, batch_id
      FROM vectormill.request_files
     WHERE state = 'processed'
"""
_UNEXPIRED: Final = "AND (expires_at IS NULL OR expires_at > now())"
FIND_FILE = text(f"{_FILE} {_UNEXPIRED} AND id = :file_id")
FIND_FILE_EVEN_EXPIRED = text(f"{_FILE} AND id = :file_id")


def find_file(connection: Connection, file_id: UUID, *, may_be_expired: bool = False) -> RequestFile:
    """Return the file with this id. An expired file is kept until its batch has read it.

    Raise RequestFileNotFound, also for an expired file unless it `may_be_expired`.
    """
    statement = FIND_FILE_EVEN_EXPIRED if may_be_expired else FIND_FILE
    row = connection.execute(statement, {"file_id": file_id}).one_or_none()
    if row is None:
        raise RequestFileNotFound
    return RequestFile(**row._mapping)


# One statement per order and filter, so that each follows an index: that of all files, or that of one
# purpose.
LIST_NEWEST = text(f"{_FILE} {_UNEXPIRED} AND seq < :after ORDER BY seq DESC LIMIT :limit")
LIST_NEWEST_OF_PURPOSE = text(
    f"{_FILE} {_UNEXPIRED} AND purpose = :purpose AND seq < :after ORDER BY seq DESC LIMIT :limit"
)
LIST_OLDEST = text(f"{_FILE} {_UNEXPIRED} AND seq > :after ORDER BY seq LIMIT :limit")
LIST_OLDEST_OF_PURPOSE = text(
    f"{_FILE} {_UNEXPIRED} AND purpose = :purpose AND seq > :after ORDER BY seq LIMIT :limit"
)
MAX_SEQ: Final = 2**63 - 1


def list_files(
    connection: Connection, *, purpose: str | None, after: UUID | None, is_newest_first: bool, limit: int
) -> list[RequestFile]:
    """List up to `limit` files that follow the file `after` in this order, or the first ones if it is None.

    Raise RequestFileNotFound if the file `after` does not exist.
    """
    start = MAX_SEQ if is_newest_first else 0
    if after is not None:
        start = find_file(connection, after).seq
    values = {"purpose": purpose, "after": start, "limit": limit}
    if is_newest_first:
        statement = LIST_NEWEST if purpose is None else LIST_NEWEST_OF_PURPOSE
    else:
        statement = LIST_OLDEST if purpose is None else LIST_OLDEST_OF_PURPOSE
    return [RequestFile(**row._mapping) for row in connection.execute(statement, values)]


LOAD_PART = text("SELECT content FROM vectormill.request_file_parts WHERE file_id = :file_id AND seq = :seq")


def read_file(engine: Engine, file: RequestFile) -> Generator[bytes, None, None]:
    """Yield the content of a stored file in pieces of about a megabyte, each read in its own transaction.

    Raise RequestFileNotFound if the file is removed while it is read.
    """
    num_bytes, seq = 0, 0
    while num_bytes < file.num_bytes:
        with engine.connect() as connection:
            content = connection.execute(LOAD_PART, {"file_id": file.id, "seq": seq}).scalar_one_or_none()
        if content is None:
            raise RequestFileNotFound(
                f"The file {file.name} was removed while being read, after {num_bytes} of {file.num_bytes} bytes."
            )
        piece = zstandard.ZstdDecompressor().decompress(content, max_output_size=MAX_PART_BYTES)
        num_bytes += len(piece)
        seq += 1
        yield piece


LOCK_FILE = text("""
    SELECT 1 FROM vectormill.request_files WHERE id = :file_id AND state = 'processed' FOR UPDATE
""")

IS_BEING_READ = text("""
    SELECT EXISTS (SELECT 1 FROM vectormill.request_batches WHERE input_file_id = :file_id AND state = 'validating')
""")

DISCARD_FILE = text("""
    UPDATE vectormill.request_files SET state = 'deleting', updated_at = now() WHERE id = :file_id
""")


def discard_file(connection: Connection, file_id: UUID) -> None:
    """Delete a file; the pruner removes its parts later. Raise RequestFileNotFound and RequestFileInUse."""
    if connection.execute(LOCK_FILE, {"file_id": file_id}).one_or_none() is None:
        raise RequestFileNotFound
    find_file(connection, file_id)
    if connection.execute(IS_BEING_READ, {"file_id": file_id}).scalar_one():
        raise RequestFileInUse
    connection.execute(DISCARD_FILE, {"file_id": file_id})


# SKIP LOCKED passes over an upload that is being written at this moment.
DISCARD_STALE_FILES = text("""
    UPDATE vectormill.request_files SET state = 'deleting', updated_at = now()
     WHERE id IN (SELECT id FROM vectormill.request_files
                   WHERE state = 'uploading'
                     AND updated_at < now() - make_interval(secs => CAST(:timeout_seconds AS double precision))
                   LIMIT :limit FOR UPDATE SKIP LOCKED)
    RETURNING id
""")

DISCARD_EXPIRED_FILES = text("""
    UPDATE vectormill.request_files SET state = 'deleting', updated_at = now()
     WHERE id IN (SELECT id FROM vectormill.request_files
                   WHERE state = 'processed' AND expires_at <= now()
                     AND NOT EXISTS (SELECT 1 FROM vectormill.request_batches AS batch
                                      WHERE batch.input_file_id = request_files.id AND batch.state = 'validating')
                   ORDER BY expires_at LIMIT :limit FOR UPDATE SKIP LOCKED)
    RETURNING id
""")

# The lock lasts for the transaction, so that two pruners never work on one file.
FIND_DISCARDED_FILE = text("""
    SELECT id FROM vectormill.request_files WHERE state = 'deleting' LIMIT 1 FOR UPDATE SKIP LOCKED
""")

DELETE_PARTS = text("""
    DELETE FROM vectormill.request_file_parts
     WHERE file_id = :file_id AND seq IN (SELECT seq FROM vectormill.request_file_parts
                                           WHERE file_id = :file_id ORDER BY seq LIMIT :limit)
    RETURNING 1
""")

DELETE_FILE = text("DELETE FROM vectormill.request_files WHERE id = :file_id")

# At most this many parts are deleted in a transaction; each has some hundred kilobytes.
PARTS_AT_ONCE: Final = 200
FILES_AT_ONCE: Final = 1000


def discard_old_files(connection: Connection, upload_timeout_seconds: float) -> int:
    """Discard expired files and abandoned uploads; return their number.

    An upload is abandoned if no part of it was written for `upload_timeout_seconds`.
    """
    stale = {"timeout_seconds": float(upload_timeout_seconds), "limit": FILES_AT_ONCE}
    num_stale = len(connection.execute(DISCARD_STALE_FILES, stale).all())
    return num_stale + len(connection.execute(DISCARD_EXPIRED_FILES, {"limit": FILES_AT_ONCE}).all())


def delete_file_batch(connection: Connection) -> bool | None:
    """Delete some parts of one discarded file, and the file itself with its last part.

    Return True if the file is gone, False if it has more parts, and None if no file is discarded.
    """
    file_id = connection.execute(FIND_DISCARDED_FILE).scalar_one_or_none()
    if file_id is None:
        return None
    values = {"file_id": file_id, "limit": PARTS_AT_ONCE}
    if len(connection.execute(DELETE_PARTS, values).all()) == PARTS_AT_ONCE:
        return False
    connection.execute(DELETE_FILE, values)
    return True


# The size of a part, which is one row in Postgres (far below its limit) and what a reader holds in memory.
PART_BYTES: Final = 1 << 20
# While bytes arrive, a part is written at least this often: it is the upload's heartbeat.
PART_SECONDS: Final = 15.0
_COMPRESSION_LEVEL: Final = 1

BEGIN_FILE = text("""
    INSERT INTO vectormill.request_files (id, state, purpose, filename) VALUES (:id, 'uploading', :purpose, '')
""")

# This also locks the file until the part is committed, so that the pruner does not remove it meanwhile.
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
    """A writer that stores arriving bytes as compressed parts of a file, holding one part in memory.

    Use it as a context manager: leaving the block without `finish` or `finish_in` discards the file. Not
    thread-safe.
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
        """Buffer more bytes, and write a part if one is full or due."""
        self._pieces.append(piece)
        self._waiting_bytes += len(piece)
        self.num_bytes += len(piece)
        if self._waiting_bytes >= PART_BYTES or (self._is_begun and self._clock() >= self._part_due):
            with self._engine.begin() as connection:
                self.write(connection)

    def write(self, connection: Connection) -> None:
        """Write the bytes buffered since the last part, in the caller's transaction. Raise UploadRemoved."""
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
        """Make the file visible and return it, or return the earlier file with the same key and content.

        `lifetime_seconds` counts from the file's creation; None means for ever. Raise UploadRemoved,
        IdempotencyMismatch, and RequestFileNotFound if the earlier file is gone.
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
        """Make the file visible in the caller's transaction, and return it. Raise UploadRemoved."""
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

    def __exit__(self, *_: object) -> None:
        if self._is_begun and not self._is_finished:
            with self._engine.begin() as connection:
                connection.execute(DISCARD_UPLOAD, {"id": self.id})
