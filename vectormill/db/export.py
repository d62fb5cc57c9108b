"""A job's vectors in item order, one chunk at a time, wherever they are kept."""

from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Engine, text

from vectormill.db.jobs import find_job
from vectormill.db.payloads import decode_payload
from vectormill.db.vectors import table_name
from vectormill.domain.item import Item
from vectormill.domain.job import Job


@dataclass(frozen=True, slots=True)
class VectorBlock:
    """A run of items: keys [n], vectors float32 [n, d], and whether each has a vector, bool [n]."""

    keys: list[str]
    vectors: npt.NDArray[np.float32]
    present: npt.NDArray[np.bool_]


LIST_CHUNKS = text("""
    SELECT chunks.id, chunks.first_item, payload.items, own.vectors
      FROM vectormill.chunks
      JOIN vectormill.chunk_payloads AS payload ON payload.chunk_id = chunks.id
      LEFT JOIN vectormill.chunk_vectors AS own ON own.chunk_id = chunks.id
     WHERE chunks.job_id = :job_id AND chunks.first_item > :after AND chunks.state <> 'split'
     ORDER BY chunks.first_item
     LIMIT :limit
""")

_CHUNKS_PER_PAGE = 8


def read_vectors(engine: Engine, job_id: UUID) -> Iterator[VectorBlock]:
    """Blocks of all items of a job, in the order of submission; memory does not grow with the job.

    In a collection another job may have given a key another text since; its vector is not this job's, and `present` is
    False for it, as for an item that failed. Raises JobNotFound before the first block.
    """
    with engine.connect() as connection:
        job = find_job(connection, job_id)
        generation_id = connection.execute(
            text("SELECT generation_id FROM vectormill.jobs WHERE id = :job_id"), {"job_id": job_id}
        ).scalar_one()
    return _read_blocks(engine, job, generation_id)


def _read_blocks(engine: Engine, job: Job, generation_id: int | None) -> Iterator[VectorBlock]:
    after = -1
    while True:
        # A transaction per page: a slow reader of a large export must not hold back vacuum for hours.
        blocks = []
        with engine.connect() as connection:
            values = {"job_id": job.id, "after": after, "limit": _CHUNKS_PER_PAGE}
            for row in connection.execute(LIST_CHUNKS, values).all():
                after = row.first_item
                items = decode_payload(row.items)
                if generation_id is None:
                    vectors = _own_vectors(row.vectors, len(items), job.spec.dimensions)
                else:
                    vectors = _collection_vectors(connection, generation_id, items, job.spec.dimensions)
                blocks.append(VectorBlock([item.key for item in items], vectors, ~np.isnan(vectors[:, 0])))
        if not blocks:
            return
        yield from blocks


def _own_vectors(blob: bytes | None, num_items: int, dimensions: int) -> npt.NDArray[np.float32]:
    if blob is None:
        return np.full((num_items, dimensions), np.nan, dtype=np.float32)
    return np.frombuffer(blob, dtype="<f4").reshape(num_items, dimensions)


# halfvec_send gives int16 dimensions, int16 zero, then big-endian float16: concatenated, NumPy reads all rows at once.
READ_COLLECTION = """
    SELECT item.ordinal, halfvec_send(live.embedding) AS embedding
      FROM unnest(CAST(:keys AS text[]), CAST(:hashes AS bytea[])) WITH ORDINALITY AS item (key, content_hash, ordinal)
      JOIN vectormill.{table} AS live ON live.key = item.key AND live.content_hash = item.content_hash
"""


def _collection_vectors(
    connection: Connection, generation_id: int, items: list[Item], dimensions: int
) -> npt.NDArray[np.float32]:
    values = {"keys": [item.key for item in items], "hashes": [item.content_hash() for item in items]}
    rows = connection.execute(text(READ_COLLECTION.format(table=table_name(generation_id))), values).all()
    vectors = np.full((len(items), dimensions), np.nan, dtype=np.float32)
    if rows:
        wire = np.frombuffer(b"".join(row.embedding for row in rows), dtype=">f2").reshape(
            len(rows), dimensions + 2
        )
        vectors[np.array([row.ordinal for row in rows]) - 1] = wire[:, 2:]
    return vectors
