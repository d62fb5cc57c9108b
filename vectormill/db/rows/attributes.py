"""Attributes: what a row of a generation has beside its vector: metadata, and its text where a collection keeps texts.

In a table of their own, so that a change of metadata alone never touches the table that carries the vector index: an
update there inserts into every index (pgvector #875). Sparse: an item without metadata, whose text is not kept, has no
row here.
"""

from itertools import compress
from operator import not_
from typing import Final

from psycopg import Cursor, sql
from sqlalchemy import Connection, text

from vectormill.db.rows.arrays import BYTEA_OID, TEXT_OID, make_bytes_array
from vectormill.domain.jobs.item import Items

# Room for the next version of a row in its page: a change of metadata touches no index then.
STORAGE: Final = (
    "fillfactor = 85, autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05"
)


def attributes_name(generation_id: int) -> str:
    return f"generation_{generation_id}_attributes"


def create_attributes_table(connection: Connection, generation_id: int, language: str = "simple") -> None:
    """Makes the table beside a generation's. `language` is a text search configuration of Postgres.

    `search` is NULL where no text is kept. `document` is that of a passage: docs/GLOSSARY.md.
    """
    name = attributes_name(generation_id)
    driver = connection.connection.driver_connection
    assert driver is not None
    statement = sql.SQL("""
        CREATE TABLE {name} (
            key           text PRIMARY KEY,
            content_hash  bytea,  -- that of the vector's row: one look-up tells whether a row of a source is unchanged
            metadata      jsonb,
            metadata_hash bytea,  -- NULL when a worker of the former release wrote the metadata
            text          text,
            search        tsvector GENERATED ALWAYS AS (to_tsvector({language}::regconfig, text)) STORED,
            document      text GENERATED ALWAYS AS (metadata -> '_passage' ->> 'document') STORED,
            job_seq       bigint NOT NULL
        ) WITH ({storage})
    """)
    driver.execute(
        statement.format(
            name=sql.Identifier("vectormill", name),
            language=sql.Literal(f"pg_catalog.{language}"),
            storage=sql.SQL(STORAGE),
        )
    )
    connection.execute(
        text(f"""
        CREATE INDEX {name}_document ON vectormill.{name} (document) WHERE document IS NOT NULL
    """)
    )
    connection.execute(text("SELECT vectormill.carry_metadata_of(:id)"), {"id": generation_id})


# A column whose expression changes loses its index; who keeps indexes makes it again.
REWRITE_LANGUAGE: Final = """
    ALTER TABLE {name}
        DROP COLUMN search,
        ADD COLUMN search tsvector GENERATED ALWAYS AS (to_tsvector({language}::regconfig, text)) STORED
"""


def rewrite_language(connection: Connection, generation_id: int, language: str) -> None:
    """Reads every kept text in another language; nobody reads or writes the table until the transaction ends."""
    driver = connection.connection.driver_connection
    assert driver is not None
    driver.execute(
        sql.SQL(REWRITE_LANGUAGE).format(
            name=sql.Identifier("vectormill", attributes_name(generation_id)),
            language=sql.Literal(f"pg_catalog.{language}"),
        )
    )


# Only of rows that this job has just written: their own table decides which job is the newest, and has locked them.
# What a run has changed since, without encoding, is newer too.
UPSERT_ATTRIBUTES: Final = """
    INSERT INTO {attributes} AS kept (key, content_hash, metadata, metadata_hash, text, job_seq)
    SELECT item.key, live.content_hash, item.metadata::jsonb, item.metadata_hash, item.text, %(job_seq)s::bigint
      FROM unnest(%(keys)s::text[], %(metadata)s::text[], %(hashes)s::bytea[], %(texts)s::text[])
               AS item (key, metadata, metadata_hash, text)
      JOIN {table} AS live ON live.key = item.key AND live.job_seq = %(job_seq)s::bigint
     ORDER BY item.key
    ON CONFLICT (key) DO UPDATE
       SET content_hash = excluded.content_hash, metadata = excluded.metadata,
           metadata_hash = excluded.metadata_hash, text = excluded.text, job_seq = excluded.job_seq
     WHERE kept.job_seq <= excluded.job_seq
"""

DELETE_ATTRIBUTES: Final = """
    DELETE FROM {attributes} AS kept
     USING unnest(%(keys)s::text[]) AS item (key)
      JOIN {table} AS live ON live.key = item.key AND live.job_seq = %(job_seq)s::bigint
     WHERE kept.key = item.key AND kept.job_seq <= %(job_seq)s::bigint
"""


def write_attributes(
    cursor: Cursor[object], generation_id: int, job_seq: int, items: Items, *, keep_text: bool
) -> None:
    """Those of items whose vectors the caller has just written, in the same transaction."""
    names = {
        "attributes": sql.Identifier("vectormill", attributes_name(generation_id)),
        "table": sql.Identifier("vectormill", f"generation_{generation_id}"),
    }
    is_described = [keep_text or bool(metadata) for metadata in items.metadata]
    described = items if all(is_described) else items.take(compress(range(len(items)), is_described))
    if described:
        texts = described.texts if keep_text else [b""] * len(described)
        cursor.execute(
            sql.SQL(UPSERT_ATTRIBUTES).format(**names),
            {
                "job_seq": job_seq,
                "keys": make_bytes_array(TEXT_OID, described.encode_keys()),
                "metadata": make_bytes_array(TEXT_OID, described.metadata, empty_is_null=True),
                "hashes": make_bytes_array(BYTEA_OID, described.metadata_hashes(), empty_is_null=True),
                "texts": make_bytes_array(TEXT_OID, texts, empty_is_null=True),
            },
        )
    bare = items if not described else items.take(compress(range(len(items)), map(not_, is_described)))
    if bare:
        keys = make_bytes_array(TEXT_OID, bare.encode_keys())
        cursor.execute(sql.SQL(DELETE_ATTRIBUTES).format(**names), {"job_seq": job_seq, "keys": keys})
