"""Files of requests: found, listed, read part by part, and given back. What they contain is nobody's matter here."""

from collections.abc import Generator
from typing import Any, Final
from uuid import UUID

import zstandard
from sqlalchemy import Connection, Engine, Row, text

from vectormill.batches.request_file import RequestFile
from vectormill.domain.errors import RequestFileInUse, RequestFileNotFound

# The most bytes of one part; more would be read from a row that nobody here wrote.
MAX_PART_BYTES: Final = 64 << 20

FIND_FILE = text("""
    SELECT id, seq, purpose, filename, num_bytes, created_at, expires_at, batch_id
      FROM vectormill.request_files
     WHERE id = :file_id AND state = 'processed' AND (expires_at IS NULL OR expires_at > now())
""")


def find_file(connection: Connection, file_id: UUID) -> RequestFile:
    """Raises RequestFileNotFound, too for one whose time is over although nobody has removed it yet."""
    row = connection.execute(FIND_FILE, {"file_id": file_id}).one_or_none()
    if row is None:
        raise RequestFileNotFound
    return _file(row)


FIND_WHOLE_FILE = text("""
    SELECT id, seq, purpose, filename, num_bytes, created_at, expires_at, batch_id
      FROM vectormill.request_files WHERE id = :file_id AND state = 'processed'
""")


def find_whole_file(connection: Connection, file_id: UUID) -> RequestFile:
    """Find a file that is being read, and so is kept beyond its time. Raise RequestFileNotFound."""
    row = connection.execute(FIND_WHOLE_FILE, {"file_id": file_id}).one_or_none()
    if row is None:
        raise RequestFileNotFound
    return _file(row)


def _file(row: Row[Any]) -> RequestFile:
    return RequestFile(**row._mapping)


# One for each end, so that each goes along an index, of all files or of a purpose.
LIST_NEWEST = text("""
    SELECT id, seq, purpose, filename, num_bytes, created_at, expires_at, batch_id
      FROM vectormill.request_files
     WHERE state = 'processed' AND (expires_at IS NULL OR expires_at > now()) AND seq < :after
     ORDER BY seq DESC LIMIT :limit
""")
LIST_NEWEST_OF_PURPOSE = text("""
    SELECT id, seq, purpose, filename, num_bytes, created_at, expires_at, batch_id
      FROM vectormill.request_files
     WHERE state = 'processed' AND (expires_at IS NULL OR expires_at > now()) AND purpose = :purpose AND seq < :after
     ORDER BY seq DESC LIMIT :limit
""")
LIST_OLDEST = text("""
    SELECT id, seq, purpose, filename, num_bytes, created_at, expires_at, batch_id
      FROM vectormill.request_files
     WHERE state = 'processed' AND (expires_at IS NULL OR expires_at > now()) AND seq > :after
     ORDER BY seq LIMIT :limit
""")
LIST_OLDEST_OF_PURPOSE = text("""
    SELECT id, seq, purpose, filename, num_bytes, created_at, expires_at, batch_id
      FROM vectormill.request_files
     WHERE state = 'processed' AND (expires_at IS NULL OR expires_at > now()) AND purpose = :purpose AND seq > :after
     ORDER BY seq LIMIT :limit
""")
_MAX_SEQ: Final = 2**63 - 1


def list_files(
    connection: Connection, *, purpose: str | None, after: UUID | None, is_newest_first: bool, limit: int
) -> list[RequestFile]:
    """Files behind the one with the id `after`: a keyset page. Raises RequestFileNotFound when that one is gone."""
    start = _MAX_SEQ if is_newest_first else 0
    if after is not None:
        start = find_file(connection, after).seq
    values = {"purpose": purpose, "after": start, "limit": limit}
    if is_newest_first:
        statement = LIST_NEWEST if purpose is None else LIST_NEWEST_OF_PURPOSE
    else:
        statement = LIST_OLDEST if purpose is None else LIST_OLDEST_OF_PURPOSE
    return [_file(row) for row in connection.execute(statement, values)]


LOAD_PART = text("SELECT content FROM vectormill.request_file_parts WHERE file_id = :file_id AND seq = :seq")


def read_file(engine: Engine, file: RequestFile) -> Generator[bytes, None, None]:
    """The content of a stored file in pieces of about a megabyte, each read in a transaction of its own.

    Raises RequestFileNotFound in the middle when the file is removed meanwhile.
    """
    num_bytes, seq = 0, 0
    while num_bytes < file.num_bytes:
        with engine.connect() as connection:
            content = connection.execute(LOAD_PART, {"file_id": file.id, "seq": seq}).scalar_one_or_none()
        if content is None:
            raise RequestFileNotFound(
                f"The file {file.name} was removed while it was read: {num_bytes} of {file.num_bytes} bytes were there."
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
    """Makes a file vanish; its parts go in batches. Raises RequestFileNotFound and RequestFileInUse."""
    if connection.execute(LOCK_FILE, {"file_id": file_id}).one_or_none() is None:
        raise RequestFileNotFound
    find_file(connection, file_id)
    if connection.execute(IS_BEING_READ, {"file_id": file_id}).scalar_one():
        raise RequestFileInUse
    connection.execute(DISCARD_FILE, {"file_id": file_id})


# Locked first: an upload that goes on at this moment is passed over.
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

# Locked until the batch is through, so that two pruners never work on one file.
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

# The parts of one transaction: each is some hundred kilobytes.
PARTS_AT_ONCE: Final = 200
FILES_AT_ONCE: Final = 1000


def discard_old_files(connection: Connection, upload_timeout_seconds: float) -> int:
    """Uploads whose client went silent, and files past their time; how many."""
    stale = {"timeout_seconds": float(upload_timeout_seconds), "limit": FILES_AT_ONCE}
    num_stale = len(connection.execute(DISCARD_STALE_FILES, stale).all())
    return num_stale + len(connection.execute(DISCARD_EXPIRED_FILES, {"limit": FILES_AT_ONCE}).all())


def delete_file_batch(connection: Connection) -> bool | None:
    """Removes some parts of a discarded file; whether the file is gone with them. None when there is none."""
    file_id = connection.execute(FIND_DISCARDED_FILE).scalar_one_or_none()
    if file_id is None:
        return None
    values = {"file_id": file_id, "limit": PARTS_AT_ONCE}
    if len(connection.execute(DELETE_PARTS, values).all()) == PARTS_AT_ONCE:
        return False
    connection.execute(DELETE_FILE, values)
    return True
