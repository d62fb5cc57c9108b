"""Vector tables: one per generation, made at run time; a chunk's rows are written by one statement.

They travel as three arrays, laid out in the server's binary form with no Python per row.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from psycopg import Cursor, sql
from sqlalchemy import Connection, text

from vectormill.db.rows.arrays import (
    BYTEA_OID,
    TEXT_OID,
    accept_arrays,
    find_type,
    make_bytes_array,
    open_array,
)
from vectormill.db.rows.attributes import attributes_name, create_attributes_table, write_attributes
from vectormill.db.rows.tombstones import hold_deletions
from vectormill.domain.jobs.item import Item, Items
from vectormill.vectors.vector_types import Rows, VectorType, write_columns

# Both ends hold a parameter in memory, the server a few times: chunks of more are written in parts.
MAX_ARRAY_BYTES: Final = 32 << 20
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


# Arrays and not a staging table: each row is read once, and no table is emptied at every COMMIT. Of 2,000 rows of
# halfvec(384) that saves a sixth of the server's time and a third of the worker's.
UPSERT_ROWS: Final = """
    WITH buried AS MATERIALIZED (  -- deleted after the job was submitted
        SELECT key FROM vectormill.tombstones
         WHERE collection_id = %(collection_id)s::bigint AND key = ANY(%(keys)s::text[])
           AND seq > %(job_seq)s::bigint
    )
    INSERT INTO {table} AS live (key, content_hash, embedding, job_seq)
    SELECT item.key, item.content_hash, item.embedding, %(job_seq)s::bigint
      FROM unnest(%(keys)s::text[], %(hashes)s::bytea[], %(embeddings)s::{column}[])
               AS item (key, content_hash, embedding)
     WHERE NOT EXISTS (SELECT 1 FROM buried WHERE buried.key = item.key)
     ORDER BY item.key  -- one lock order for all chunks: no deadlocks between chunks that share keys
    ON CONFLICT (key) DO UPDATE
       SET content_hash = excluded.content_hash, embedding = excluded.embedding, job_seq = excluded.job_seq
     WHERE live.job_seq <= excluded.job_seq  -- an older job never overwrites a newer one
"""

# As the statement before does: by the collation of the database.
ORDER_KEYS: Final = """
    SELECT item.ordinal - 1 FROM unnest(%(keys)s::text[]) WITH ORDINALITY AS item (key, ordinal) ORDER BY item.key
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

    `rows` is [len(items), width], of floats that are finite; keys are unique within `items`. What was deleted after the
    job was submitted is passed over, and until the transaction ends nothing is deleted from the collection.
    """
    columns = Items.of(items)
    if not columns:
        return
    driver = connection.connection.driver_connection
    assert driver is not None
    with driver.cursor() as cursor:
        accept_arrays(cursor)
        hold = hold_deletions(cursor, generation_id)
        statement = sql.SQL(UPSERT_ROWS).format(
            table=sql.Identifier("vectormill", table_name(generation_id)), column=sql.Identifier(kind.column)
        )
        oid = find_type(cursor, kind.column)
        for places in _split(cursor, columns, MAX_ARRAY_BYTES // kind.column_bytes(dimensions)):
            part, part_rows = (columns, rows) if places is None else (columns.take(places), rows[places])
            embeddings, elements = open_array(oid, len(part), kind.column_bytes(dimensions))
            write_columns(elements, part_rows, kind, dimensions)
            cursor.execute(
                statement,
                {
                    "collection_id": hold,
                    "job_seq": job_seq,
                    "keys": make_bytes_array(TEXT_OID, part.encode_keys()),
                    "hashes": make_bytes_array(BYTEA_OID, part.content_hashes()),
                    "embeddings": embeddings,
                },
            )
            write_attributes(cursor, generation_id, job_seq, part, keep_text=keep_text)


def _split(cursor: Cursor[Any], items: Items, part_items: int) -> Iterator[npt.NDArray[np.int64] | None]:
    """Places of items that one statement takes, one part after the other in the order of keys; None for all of them."""
    if len(items) <= part_items:
        yield None
        return
    keys = make_bytes_array(TEXT_OID, items.encode_keys())
    order = [row[0] for row in cursor.execute(ORDER_KEYS, {"keys": keys})]
    for start in range(0, len(order), max(1, part_items)):
        yield np.array(order[start : start + max(1, part_items)], dtype=np.int64)
