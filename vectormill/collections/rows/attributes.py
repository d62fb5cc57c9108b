"""Attributes: what a row of a generation has beside its result: metadata, and its text where a collection keeps texts.

In a table of their own, so that a change of metadata alone never touches the table that carries the vector index: an
update there inserts into every index (pgvector #875). Sparse: an item without metadata, whose text is not kept, has no
row here.
"""

from collections.abc import Sequence
from itertools import compress
from operator import not_
from typing import Final

from psycopg import Cursor, sql
from sqlalchemy import Connection, text

from vectormill.db.parameters import BYTEA_OID, TEXT_OID, make_bytes_array, make_places_array
from vectormill.jobs.item import PAIR_MARK, Items, split_pair

# Room for the next version of a row in its page: a change of metadata touches no index then.
STORAGE: Final = (
    "fillfactor = 85, autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05"
)


def attributes_name(generation_id: int) -> str:
    return f"generation_{generation_id}_attributes"


def create_attributes_table(
    connection: Connection, generation_id: int, text_columns: Sequence[str], language: str = "simple"
) -> None:
    """Makes the table beside a generation's. `language` is a text search configuration of Postgres.

    `text_columns` are `text` and, where items are pairs, the column of the second text. `search` is NULL where no text
    is kept. `document` is that of a passage: docs/GLOSSARY.md.
    """
    name = attributes_name(generation_id)
    driver = connection.connection.driver_connection
    assert driver is not None
    statement = sql.SQL("""
        CREATE TABLE {name} (
            key           text PRIMARY KEY,
            content_hash  bytea,  -- that of the vector's row: one look-up tells whether a row of a source is unchanged
            metadata      jsonb,
            metadata_hash bytea,
            {texts},
            search        tsvector GENERATED ALWAYS AS (to_tsvector({language}::regconfig, text)) STORED,
            document      text GENERATED ALWAYS AS (metadata -> '_passage' ->> 'document') STORED,
            job_seq       bigint NOT NULL
        ) WITH ({storage})
    """)
    driver.execute(
        statement.format(
            name=sql.Identifier("vectormill", name),
            language=sql.Literal(f"pg_catalog.{language}"),
            texts=sql.SQL(", ").join(
                sql.SQL("{} text").format(sql.Identifier(column)) for column in text_columns
            ),
            storage=sql.SQL(STORAGE),
        )
    )
    connection.execute(
        text(f"""
        CREATE INDEX {name}_document ON vectormill.{name} (document) WHERE document IS NOT NULL
    """)
    )


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
# Where a run has changed attributes alone, in a later place, the row was not written either.
UPSERT_ATTRIBUTES: Final = """
    INSERT INTO {attributes} AS kept (key, content_hash, metadata, metadata_hash, {texts}, job_seq)
    SELECT item.key, live.content_hash, item.metadata::jsonb, item.metadata_hash, {values}, item.place
      FROM unnest(%(keys)s::text[], %(metadata)s::text[], %(hashes)s::bytea[], %(places)s::bigint[], {arrays})
               AS item (key, metadata, metadata_hash, place, {texts})
      JOIN {table} AS live ON live.key = item.key AND live.job_seq = item.place
     ORDER BY item.key
    ON CONFLICT (key) DO UPDATE
       SET content_hash = excluded.content_hash, metadata = excluded.metadata,
           metadata_hash = excluded.metadata_hash, {assignments}, job_seq = excluded.job_seq
     WHERE kept.job_seq <= excluded.job_seq
"""

DELETE_ATTRIBUTES: Final = """
    DELETE FROM {attributes} AS kept
     USING unnest(%(keys)s::text[], %(places)s::bigint[]) AS item (key, place)
      JOIN {table} AS live ON live.key = item.key AND live.job_seq = item.place
     WHERE kept.key = item.key AND kept.job_seq <= item.place
"""


def name_texts(text_columns: Sequence[str]) -> dict[str, sql.Composable]:
    """Name the columns of texts for UPSERT_ATTRIBUTES; the array of each is the parameter of its name."""
    comma = sql.SQL(", ")
    names = [sql.Identifier(column) for column in text_columns]
    return {
        "texts": comma.join(names),
        "values": comma.join(sql.Identifier("item", column) for column in text_columns),
        "arrays": comma.join(
            sql.SQL("{}::text[]").format(sql.Placeholder(column)) for column in text_columns
        ),
        "assignments": comma.join(sql.SQL("{0} = excluded.{0}").format(name) for name in names),
    }


def send_text(text_columns: Sequence[str], table: str) -> str:
    """SQL of a row's kept text as an Item has it: of a pair both, with the mark between them."""
    first, *rest = text_columns
    sent = f"convert_to({table}.{first}, 'UTF8')"
    mark = PAIR_MARK.hex()
    pairs = [f"coalesce('\\x{mark}'::bytea || convert_to({table}.{column}, 'UTF8'), '')" for column in rest]
    return " || ".join([sent, *pairs])


def split_texts(texts: Sequence[bytes], text_columns: Sequence[str]) -> dict[str, Sequence[bytes]]:
    """The texts of each column: of a pair the first and the second one, which is empty for a text alone."""
    if len(text_columns) == 1:
        return {text_columns[0]: texts}
    pairs = [split_pair(text) for text in texts]
    first, second = text_columns
    return {first: [text for text, _ in pairs], second: [text_pair or b"" for _, text_pair in pairs]}


def write_attributes(
    cursor: Cursor[object],
    generation_id: int,
    places: Sequence[int],
    items: Items,
    text_columns: Sequence[str],
    *,
    keep_text: bool,
) -> None:
    """Write the attributes of items whose results the caller has just written in these places, in the same
    transaction.
    """
    names = {
        "attributes": sql.Identifier("vectormill", attributes_name(generation_id)),
        "table": sql.Identifier("vectormill", f"generation_{generation_id}"),
    }
    is_described = [keep_text or bool(metadata) for metadata in items.metadata]
    described = items if all(is_described) else items.take(compress(range(len(items)), is_described))
    if described:
        texts = split_texts(described.texts if keep_text else [b""] * len(described), text_columns)
        cursor.execute(
            sql.SQL(UPSERT_ATTRIBUTES).format(**names, **name_texts(text_columns)),
            {
                "places": make_places_array(list(compress(places, is_described))),
                "keys": make_bytes_array(TEXT_OID, described.encode_keys()),
                "metadata": make_bytes_array(TEXT_OID, described.metadata, empty_is_null=True),
                "hashes": make_bytes_array(BYTEA_OID, described.metadata_hashes(), empty_is_null=True),
                **{
                    column: make_bytes_array(TEXT_OID, own, empty_is_null=True)
                    for column, own in texts.items()
                },
            },
        )
    bare = items if not described else items.take(compress(range(len(items)), map(not_, is_described)))
    if bare:
        keys = make_bytes_array(TEXT_OID, bare.encode_keys())
        bare_places = make_places_array(list(compress(places, map(not_, is_described))))
        cursor.execute(sql.SQL(DELETE_ATTRIBUTES).format(**names), {"places": bare_places, "keys": keys})
