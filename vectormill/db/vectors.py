"""Vector tables: one per generation, made at run time; filled by binary COPY, through a staged upsert.

The wire format of `halfvec` and `vector` is int16 dimensions, int16 zero, then big-endian float16 or float32 (pgvector,
src/halfvec.c and src/vector.c), so a whole chunk is laid out by NumPy in one go, with no Python per row.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from psycopg import sql
from sqlalchemy import Connection, text

from vectormill.domain.item import Item

_COPY_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_TRAILER = b"\xff\xff"
# The largest finite float16; a component beyond it would make COPY refuse the whole chunk.
MAX_HALF = 65504.0
# pgvector's limit for halfvec columns is 16,000 dimensions; HNSW indexes end at 4,000.
MAX_DIMENSIONS = 16_000


def table_name(generation_id: int) -> str:
    return f"generation_{generation_id}"


def create_vector_table(connection: Connection, generation_id: int, dimensions: int) -> None:
    """Makes a generation's table, of halfvec: a 768-d row stays inline in the heap page, and WAL is halved."""
    connection.execute(
        text(f"""
        CREATE TABLE vectormill.{table_name(generation_id)} (
            key          text PRIMARY KEY,
            content_hash bytea NOT NULL,
            embedding    halfvec({int(dimensions)}) NOT NULL,
            job_seq      bigint NOT NULL,
            metadata     jsonb
        )""")
    )


def point_view_at(connection: Connection, collection: str, generation_id: int) -> None:
    """Makes the collection's view read this generation; users join it in their own SQL."""
    driver = connection.connection.driver_connection
    assert driver is not None
    name = sql.Identifier("public", collection)
    table = sql.Identifier("vectormill", table_name(generation_id))
    statement = sql.SQL(
        "CREATE OR REPLACE VIEW {} AS SELECT key, embedding, metadata, content_hash, job_seq FROM {}"
    )
    driver.execute(statement.format(name, table))


def pack_copy_rows(
    ordinals: npt.NDArray[np.int32], hashes: npt.NDArray[np.void], vectors: npt.NDArray[np.float32]
) -> bytes:
    """Rows (ordinal int4, content_hash bytea of 16 bytes, embedding halfvec) in PostgreSQL's binary COPY format.

    `vectors` is float32 [n, dimensions], finite and within ±65504; `hashes` is V16 [n].
    """
    n, dimensions = vectors.shape
    row = np.dtype(
        [
            ("num_fields", ">i2"),
            ("ordinal_bytes", ">i4"),
            ("ordinal", ">i4"),
            ("hash_bytes", ">i4"),
            ("hash", "V16"),
            ("vector_bytes", ">i4"),
            ("dimensions", ">i2"),
            ("unused", ">i2"),
            ("vector", ">f2", (dimensions,)),
        ]
    )
    rows = np.zeros(n, dtype=row)
    rows["num_fields"] = 3
    rows["ordinal_bytes"] = 4
    rows["ordinal"] = ordinals
    rows["hash_bytes"] = 16
    rows["hash"] = hashes
    rows["vector_bytes"] = 4 + 2 * dimensions
    rows["dimensions"] = dimensions
    rows["vector"] = vectors
    return _COPY_HEADER + rows.tobytes() + _COPY_TRAILER


UPSERT_STAGED = """
    INSERT INTO {table} AS live (key, content_hash, embedding, job_seq, metadata)
    SELECT item.key, staged.content_hash, staged.embedding, %(job_seq)s, item.metadata::jsonb
      FROM {stage} AS staged
      JOIN unnest(%(keys)b::text[], %(metadata)b::text[]) WITH ORDINALITY AS item (key, metadata, ordinal)
        ON item.ordinal = staged.ordinal
     ORDER BY item.key  -- one lock order for all chunks: no deadlocks between chunks that share keys
    ON CONFLICT (key) DO UPDATE
       SET content_hash = excluded.content_hash, embedding = excluded.embedding,
           job_seq = excluded.job_seq, metadata = excluded.metadata
     WHERE live.job_seq <= excluded.job_seq  -- an older job never overwrites a newer one
"""


def upsert_vectors(
    connection: Connection,
    generation_id: int,
    job_seq: int,
    items: Sequence[Item],
    vectors: npt.NDArray[np.float32],
) -> None:
    """Writes one vector per item into the generation's table, inside the caller's transaction.

    `vectors` is float32 [len(items), dimensions]; keys are unique within `items`.
    """
    if not items:
        return
    dimensions = vectors.shape[1]
    driver = connection.connection.driver_connection
    assert driver is not None
    stage = sql.Identifier(f"stage_{dimensions}")
    hashes = np.frombuffer(b"".join(item.content_hash() for item in items), dtype="V16")
    ordinals = np.arange(1, len(items) + 1, dtype=np.int32)
    with driver.cursor() as cursor:
        cursor.execute(
            sql.SQL(
                "CREATE TEMP TABLE IF NOT EXISTS {} (ordinal int, content_hash bytea, embedding halfvec({}))"
                " ON COMMIT DELETE ROWS"
            ).format(stage, sql.Literal(dimensions))
        )
        with cursor.copy(sql.SQL("COPY {} FROM STDIN (FORMAT BINARY)").format(stage)) as copy:
            copy.write(pack_copy_rows(ordinals, hashes, vectors))
        cursor.execute(
            sql.SQL(UPSERT_STAGED).format(
                table=sql.Identifier("vectormill", table_name(generation_id)), stage=stage
            ),
            {
                "job_seq": job_seq,
                "keys": [item.key for item in items],
                "metadata": [item.metadata.decode() or None for item in items],
            },
        )
