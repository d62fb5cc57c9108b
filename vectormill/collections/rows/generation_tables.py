"""Generation tables: one per generation, made at run time; a chunk's rows are written by one statement.

Which columns they have the kind of their collection says. Rows travel as an array for each column, laid out in the
server's binary form, and numbers with no Python per row.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from psycopg import Cursor, sql
from sqlalchemy import Connection, text

from vectormill.collections.collection import Generation
from vectormill.collections.kinds import choose_kind
from vectormill.collections.kinds.row_kind import Results
from vectormill.collections.rows.attributes import attributes_name, create_attributes_table, write_attributes
from vectormill.collections.rows.tombstones import hold_deletions
from vectormill.db.parameters import BYTEA_OID, TEXT_OID, accept_arrays, make_bytes_array, make_places_array
from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.item import Item, Items

# Both ends hold a parameter in memory, the server a few times: chunks of more are written in parts.
MAX_ARRAY_BYTES: Final = 32 << 20
# A fifth, the default, is two million dead rows of ten, and an index over them, before anything is cleared.
VACUUM: Final = "autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05"
# pgvector's limit for halfvec and vector columns; their HNSW indexes end at 4,000 and 2,000.
MAX_DIMENSIONS: Final = 16_000


def table_name(generation_id: int) -> str:
    return f"generation_{generation_id}"


def create_generation_tables(
    connection: Connection, generation_id: int, spec: EncodingSpec, language: str = "simple"
) -> None:
    """Makes a generation's tables, of results and of attributes."""
    kind = choose_kind(spec)
    results = "".join(f"{column.definition},\n            " for column in kind.columns(spec))
    connection.execute(
        text(f"""
        CREATE TABLE vectormill.{table_name(generation_id)} (
            key          text PRIMARY KEY,
            content_hash bytea NOT NULL,
            {results}job_seq      bigint NOT NULL
        ) WITH ({VACUUM})""")
    )
    create_attributes_table(connection, generation_id, kind.text_columns, language)


CREATE_VIEW: Final = """
    CREATE OR REPLACE VIEW {name} AS
    SELECT live.key, {results}, attributes.metadata, live.content_hash, live.job_seq, {texts}
      FROM {table} AS live LEFT JOIN {attributes} AS attributes ON attributes.key = live.key
"""


def point_view_at(connection: Connection, generation: Generation) -> None:
    """Makes the collection's view read this generation; users join it in their own SQL."""
    driver = connection.connection.driver_connection
    assert driver is not None
    kind = choose_kind(generation.spec)
    driver.execute(
        sql.SQL(CREATE_VIEW).format(
            name=sql.Identifier("public", generation.collection),
            results=sql.SQL(", ").join(kind.shown(generation.spec)),
            texts=sql.SQL(", ").join(sql.Identifier("attributes", name) for name in kind.text_columns),
            table=sql.Identifier("vectormill", generation.table_name),
            attributes=sql.Identifier("vectormill", attributes_name(generation.id)),
        )
    )


# Arrays and not a staging table: each row is read once, and no table is emptied at every COMMIT. Of 2,000 rows of
# halfvec(384) that saves a sixth of the server's time and a third of the worker's.
UPSERT_ROWS: Final = """
    WITH newer AS MATERIALIZED (  -- deleted since, or described anew: a run has changed its attributes alone
        SELECT key, seq FROM vectormill.tombstones
         WHERE collection_id = %(collection_id)s::bigint AND key = ANY(%(keys)s::text[])
           AND seq > %(first_place)s::bigint
         UNION ALL
        SELECT key, job_seq FROM {attributes}
         WHERE key = ANY(%(keys)s::text[]) AND job_seq > %(first_place)s::bigint
    )
    INSERT INTO {table} AS live (key, content_hash, {columns}, job_seq)
    SELECT item.key, item.content_hash, {values}, item.place
      FROM unnest(%(keys)s::text[], %(hashes)s::bytea[], %(places)s::bigint[], {arrays})
               AS item (key, content_hash, place, {columns})
     WHERE NOT EXISTS (SELECT 1 FROM newer WHERE newer.key = item.key AND newer.seq > item.place)
     ORDER BY item.key  -- one lock order for all chunks: no deadlocks between chunks that share keys
    ON CONFLICT (key) DO UPDATE
       SET content_hash = excluded.content_hash, {assignments}, job_seq = excluded.job_seq
     WHERE live.job_seq <= excluded.job_seq  -- an older job never overwrites a newer one
"""


def compose_upsert(generation_id: int, spec: EncodingSpec) -> sql.Composed:
    """UPSERT_ROWS of one generation; the array of a column is the parameter of its name."""
    columns = choose_kind(spec).columns(spec)
    comma = sql.SQL(", ")
    return sql.SQL(UPSERT_ROWS).format(
        table=sql.Identifier("vectormill", table_name(generation_id)),
        attributes=sql.Identifier("vectormill", attributes_name(generation_id)),
        columns=comma.join(sql.Identifier(column.name) for column in columns),
        values=comma.join(sql.Identifier("item", column.name) for column in columns),
        arrays=comma.join(
            sql.SQL("{}::{}[]").format(sql.Placeholder(column.name), sql.Identifier(column.element))
            for column in columns
        ),
        assignments=assign_columns(spec),
    )


def assign_columns(spec: EncodingSpec) -> sql.Composable:
    """Assign each column of results, in an upsert, the value that would have been inserted."""
    return sql.SQL(", ").join(
        sql.SQL("{0} = excluded.{0}").format(sql.Identifier(column.name))
        for column in choose_kind(spec).columns(spec)
    )


# As the statement before does: by the collation of the database.
ORDER_KEYS: Final = """
    SELECT item.ordinal - 1 FROM unnest(%(keys)s::text[]) WITH ORDINALITY AS item (key, ordinal) ORDER BY item.key
"""


def upsert_rows(
    connection: Connection,
    generation_id: int,
    job_seq: int,
    items: Sequence[Item],
    results: Results,
    spec: EncodingSpec,
    *,
    keep_text: bool = False,
) -> None:
    """Writes one row per item into the generation's table, and its attributes, inside the caller's transaction.

    `results` has a row for each item, of its kind, as it is kept or as `make_column_rows` gives it: numbers that are
    finite, or JSON that jsonb takes.
    Keys are unique within `items`. `job_seq` is the place among the writers of items that have none of their own. What
    was written or deleted in a later place is passed over, and until the transaction ends nothing is deleted from the
    collection.
    """
    columns = Items.of(items)
    if not columns:
        return
    kind = choose_kind(spec)
    driver = connection.connection.driver_connection
    assert driver is not None
    with driver.cursor() as cursor:
        accept_arrays(cursor)
        hold = hold_deletions(cursor, generation_id)
        statement = compose_upsert(generation_id, spec)
        row_bytes = kind.row_bytes(spec) or max(1, sum(map(len, results)) // len(results))
        for places in _split(cursor, columns, MAX_ARRAY_BYTES // row_bytes):
            part, part_results = (
                (columns, results) if places is None else (columns.take(places), results[places])
            )
            own_places = part.places or [job_seq] * len(part)
            cursor.execute(
                statement,
                {
                    "collection_id": hold,
                    "first_place": min(own_places),
                    "places": make_places_array(own_places),
                    "keys": make_bytes_array(TEXT_OID, part.encode_keys()),
                    "hashes": make_bytes_array(BYTEA_OID, part.content_hashes()),
                    **kind.make_arrays(cursor, part_results, spec),
                },
            )
            write_attributes(cursor, generation_id, own_places, part, kind.text_columns, keep_text=keep_text)


def _split(cursor: Cursor[Any], items: Items, part_items: int) -> Iterator[npt.NDArray[np.int64] | None]:
    """Places of items that one statement takes, one part after the other in the order of keys; None for all of them."""
    if len(items) <= part_items:
        yield None
        return
    keys = make_bytes_array(TEXT_OID, items.encode_keys())
    order = [row[0] for row in cursor.execute(ORDER_KEYS, {"keys": keys})]
    for start in range(0, len(order), max(1, part_items)):
        yield np.array(order[start : start + max(1, part_items)], dtype=np.int64)


ESTIMATE_ROWS: Final = text("SELECT CAST(reltuples AS bigint) FROM pg_class WHERE oid = to_regclass(:table)")


def estimate_num_rows(connection: Connection, table: str) -> int | None:
    """Return the estimated rows of a table of the schema vectormill; None where it is missing or not counted
    yet.
    """
    estimate = connection.execute(ESTIMATE_ROWS, {"table": f"vectormill.{table}"}).scalar_one_or_none()
    return None if estimate is None or estimate < 0 else int(estimate)
