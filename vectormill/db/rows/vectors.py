"""Vector tables: one per generation, made at run time; filled by binary COPY, through a staged upsert.

A whole chunk is laid out by NumPy in one go, with no Python per row.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from psycopg import sql
from sqlalchemy import Connection, text

from vectormill.db.rows.attributes import attributes_name, create_attributes_table, write_attributes
from vectormill.db.rows.tombstones import hold_deletions
from vectormill.domain.jobs.item import Item
from vectormill.vectors.vector_types import Rows, VectorType

_COPY_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_TRAILER = b"\xff\xff"
# A fifth, the default, is two million dead rows of ten, and an index over them, before anything is cleared.
VACUUM: Final = "autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05"
# pgvector's limit for halfvec and vector columns; their HNSW indexes end at 4,000 and 2,000.
MAX_DIMENSIONS: Final = 16_000


def table_name(generation_id: int) -> str:
    return f"generation_{generation_id}"


def create_vector_table(
    connection: Connection, generation_id: int, kind: VectorType, dimensions: int, language: str = "simple"
) -> None:
    """Makes a generation's tables, of vectors and of attributes.

    By default of halfvec: a 768-d row stays inline in its page, and WAL is halved.
    """
    connection.execute(
        text(f"""
        CREATE TABLE vectormill.{table_name(generation_id)} (
            key          text PRIMARY KEY,
            content_hash bytea NOT NULL,
            embedding    {kind.column}({int(dimensions)}) NOT NULL,
            job_seq      bigint NOT NULL,
            metadata     jsonb  -- only workers of the former release write it: see attributes.py
        ) WITH ({VACUUM})""")
    )
    create_attributes_table(connection, generation_id, language)


CREATE_VIEW: Final = """
    CREATE OR REPLACE VIEW {name} AS
    SELECT live.key, live.embedding, attributes.metadata, live.content_hash, live.job_seq, attributes.text
      FROM {table} AS live LEFT JOIN {attributes} AS attributes ON attributes.key = live.key
"""


def point_view_at(connection: Connection, collection: str, generation_id: int) -> None:
    """Makes the collection's view read this generation; users join it in their own SQL."""
    driver = connection.connection.driver_connection
    assert driver is not None
    name = sql.Identifier("public", collection)
    table = sql.Identifier("vectormill", table_name(generation_id))
    attributes = sql.Identifier("vectormill", attributes_name(generation_id))
    driver.execute(sql.SQL(CREATE_VIEW).format(name=name, table=table, attributes=attributes))


def pack_copy_rows(
    ordinals: npt.NDArray[np.int32],
    hashes: npt.NDArray[np.void],
    rows: Rows,
    kind: VectorType,
    dimensions: int,
) -> bytes:
    """Rows (ordinal int4, content_hash bytea of 16 bytes, embedding) in PostgreSQL's binary COPY format.

    `rows` is [n, width], of floats that are finite; `hashes` is V16 [n].
    """
    n, width = rows.shape
    values = np.dtype((kind.wire, (width,)))
    line = np.dtype(
        [
            ("num_fields", ">i2"),
            ("ordinal_bytes", ">i4"),
            ("ordinal", ">i4"),
            ("hash_bytes", ">i4"),
            ("hash", "V16"),
            ("vector_bytes", ">i4"),
            ("vector_header", "V4"),
            ("vector", values),
        ]
    )
    lines = np.zeros(n, dtype=line)
    lines["num_fields"] = 3
    lines["ordinal_bytes"] = 4
    lines["ordinal"] = ordinals
    lines["hash_bytes"] = 16
    lines["hash"] = hashes
    lines["vector_bytes"] = 4 + values.itemsize
    lines["vector_header"] = np.void(kind.header(dimensions))
    lines["vector"] = rows
    return _COPY_HEADER + lines.tobytes() + _COPY_TRAILER


UPSERT_STAGED = """
    WITH buried AS MATERIALIZED (  -- deleted after the job was submitted
        SELECT key FROM vectormill.tombstones
         WHERE collection_id = %(collection_id)s::bigint AND key = ANY(%(keys)b::text[])
           AND seq > %(job_seq)s::bigint
    )
    INSERT INTO {table} AS live (key, content_hash, embedding, job_seq)
    SELECT item.key, staged.content_hash, staged.embedding, %(job_seq)s
      FROM {stage} AS staged
      JOIN unnest(%(keys)b::text[]) WITH ORDINALITY AS item (key, ordinal)
        ON item.ordinal = staged.ordinal
     WHERE NOT EXISTS (SELECT 1 FROM buried WHERE buried.key = item.key)
     ORDER BY item.key  -- one lock order for all chunks: no deadlocks between chunks that share keys
    ON CONFLICT (key) DO UPDATE
       SET content_hash = excluded.content_hash, embedding = excluded.embedding, job_seq = excluded.job_seq
     WHERE live.job_seq <= excluded.job_seq  -- an older job never overwrites a newer one
"""


def upsert_vectors(
    connection: Connection,
    generation_id: int,
    job_seq: int,
    items: Sequence[Item],
    rows: Rows,
    kind: VectorType,
    dimensions: int,
    *,
    keep_text: bool = False,
) -> None:
    """Writes one row per item into the generation's table, and its attributes, inside the caller's transaction.

    `rows` is [len(items), width]; keys are unique within `items`. What was deleted after the job was submitted is
    passed over, and until the transaction ends nothing is deleted from the collection.
    """
    if not items:
        return
    driver = connection.connection.driver_connection
    assert driver is not None
    stage = sql.Identifier(f"stage_{kind.column}_{dimensions}")
    hashes = np.frombuffer(b"".join(item.content_hash() for item in items), dtype="V16")
    ordinals = np.arange(1, len(items) + 1, dtype=np.int32)
    with driver.cursor() as cursor:
        cursor.execute(
            sql.SQL(
                "CREATE TEMP TABLE IF NOT EXISTS {} (ordinal int, content_hash bytea, embedding {}({}))"
                " ON COMMIT DELETE ROWS"
            ).format(stage, sql.Identifier(kind.column), sql.Literal(dimensions))
        )
        with cursor.copy(sql.SQL("COPY {} FROM STDIN (FORMAT BINARY)").format(stage)) as copy:
            copy.write(pack_copy_rows(ordinals, hashes, rows, kind, dimensions))
        collection_id = hold_deletions(cursor, generation_id)
        cursor.execute(
            sql.SQL(UPSERT_STAGED).format(
                table=sql.Identifier("vectormill", table_name(generation_id)), stage=stage
            ),
            {"job_seq": job_seq, "keys": [item.key for item in items], "collection_id": collection_id},
        )
        write_attributes(cursor, generation_id, job_seq, items, keep_text=keep_text)
