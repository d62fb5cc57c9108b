"""Generation tables: each generation has a table for its results and one for its attributes, both made at run time.

The kind of the collection decides the columns of results. One statement writes the rows of a chunk: one array per
column in the binary format of Postgres, with no Python code per row for numbers.

Attributes are the other columns of a row: metadata, and the text if the collection keeps texts. They have their own
table, so that a change of metadata alone never touches the table with the vector index: an update there inserts into
every index (pgvector #875). An item without metadata and kept text has no row of attributes.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import not_
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from psycopg import Cursor, sql
from sqlalchemy import Connection, text

from vectormill.collections.codebooks import open_kind
from vectormill.collections.collection import Generation
from vectormill.collections.tombstones import hold_deletions
from vectormill.db.parameters import (
    BYTEA_OID,
    TEXT_OID,
    accept_arrays,
    find_type,
    make_bytes_array,
    make_places_array,
    to_jsonb,
)
from vectormill.db.session import driver_of
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import VECTORS
from vectormill.jobs.item import PAIR_MARK, Item, Items, split_pair
from vectormill.results.kind import Column, Results
from vectormill.results.table import choose_kind
from vectormill.vectors.quantization import Ranges

# Free space in each page for the next version of a row, so that a change of metadata updates no index (HOT update).
STORAGE: Final = (
    "fillfactor = 85, autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05"
)


def attributes_name(generation_id: int) -> str:
    return f"generation_{generation_id}_attributes"


# Attributes are written only for rows that this job has just written: the results table decides which job is newest,
# and its rows are locked. If a run with a later place has changed only the attributes, the row was not written either.
UPSERT_ATTRIBUTES: Final = """
    INSERT INTO {attributes} AS kept (key, content_hash, metadata, metadata_hash, {texts}, job_seq)
    SELECT item.key, live.content_hash, item.metadata::jsonb, item.metadata_hash, {item_texts}, item.place
      FROM unnest(%(keys)s::text[], %(metadata)s::text[], %(hashes)s::bytea[], %(places)s::bigint[], {text_arrays})
               AS item (key, metadata, metadata_hash, place, {texts})
      JOIN {table} AS live ON live.key = item.key AND live.job_seq = item.place
     ORDER BY item.key
    ON CONFLICT (key) DO UPDATE
       SET content_hash = excluded.content_hash, metadata = excluded.metadata,
           metadata_hash = excluded.metadata_hash, {text_assignments}, job_seq = excluded.job_seq
     WHERE kept.job_seq <= excluded.job_seq
"""

DELETE_ATTRIBUTES: Final = """
    DELETE FROM {attributes} AS kept
     USING unnest(%(keys)s::text[], %(places)s::bigint[]) AS item (key, place)
      JOIN {table} AS live ON live.key = item.key AND live.job_seq = item.place
     WHERE kept.key = item.key AND kept.job_seq <= item.place
"""


# The names by which statements refer to a row of a generation, or to one that becomes such a row.
_ALIASES: Final = ("item", "own", "described", "live", "moved")


def name_parts(generation_id: int, spec: EncodingSpec) -> dict[str, sql.Composable]:
    """Return the SQL of a generation's tables and columns, to fill into statements.

    `columns` and `texts` are lists of the columns of results and of kept texts; `item_columns` is the same list as
    columns of `item`, and so for each of _ALIASES. `assignments` and `text_assignments` are those of an upsert that
    overwrites them; in `arrays` and `text_arrays` the values of many rows are a parameter named as their column.
    """
    kind, comma = choose_kind(spec), sql.SQL(", ")
    filled, filled_attributes = filled_names(generation_id)
    columns = kind.columns(spec)
    lists = {"columns": [column.name for column in columns], "texts": spec.text_columns}
    assignments, text_assignments = (
        comma.join(sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in names)
        for names in lists.values()
    )
    return {
        "table": sql.Identifier("vectormill", table_name(generation_id)),
        "attributes": sql.Identifier("vectormill", attributes_name(generation_id)),
        "filled": sql.Identifier("vectormill", filled),
        "filled_attributes": sql.Identifier("vectormill", filled_attributes),
        **{what: comma.join(map(sql.Identifier, names)) for what, names in lists.items()},
        **{
            f"{alias}_{what}": comma.join(sql.Identifier(alias, name) for name in names)
            for alias in _ALIASES
            for what, names in lists.items()
        },
        "assignments": assignments,
        "text_assignments": text_assignments,
        "arrays": comma.join(sql.SQL(column.sent) for column in columns),
        "text_arrays": comma.join(sql.SQL(Column(name, "text").sent) for name in spec.text_columns),
    }


def send_text(text_columns: Sequence[str], table: str) -> str:
    """Return the SQL expression of a row's kept text as bytes, as an Item has it: a pair is joined by PAIR_MARK."""
    first, *rest = text_columns
    sent = f"convert_to({table}.{first}, 'UTF8')"
    mark = PAIR_MARK.hex()
    pairs = [f"coalesce('\\x{mark}'::bytea || convert_to({table}.{column}, 'UTF8'), '')" for column in rest]
    return " || ".join([sent, *pairs])


def split_texts(texts: Sequence[bytes], text_columns: Sequence[str]) -> dict[str, Sequence[bytes]]:
    """Split the texts of items by column: with two columns, pairs into first and second text (empty if single)."""
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
    spec: EncodingSpec,
    *,
    keep_text: bool,
) -> None:
    """Write the attributes of items whose results the caller has just written, in the same transaction.

    `places` has the sequence number of each item among all writers, which was also written with its result.
    """
    parts = name_parts(generation_id, spec)
    is_described = [keep_text or bool(metadata) for metadata in items.metadata]
    described = items if all(is_described) else items.take(compress(range(len(items)), is_described))
    if described:
        texts = split_texts(described.texts if keep_text else [b""] * len(described), spec.text_columns)
        cursor.execute(
            sql.SQL(UPSERT_ATTRIBUTES).format(**parts),
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
        cursor.execute(sql.SQL(DELETE_ATTRIBUTES).format(**parts), {"places": bare_places, "keys": keys})


# A larger chunk is written by several statements, since client and server hold each parameter in memory, the server
# several times.
MAX_ARRAY_BYTES: Final = 32 << 20
# By default a vacuum starts at 20 % dead rows: two million in a table of ten million, all of them still in its indexes.
VACUUM: Final = "autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05"


def table_name(generation_id: int) -> str:
    return f"generation_{generation_id}"


def filled_names(generation_id: int) -> tuple[str, str]:
    """Return the names of the tables, for results and attributes, that a generation has during its first fill."""
    return f"generation_{generation_id}_fill", f"generation_{generation_id}_fill_attributes"


INSERT_GENERATION = text("""
    INSERT INTO vectormill.generations (collection_id, spec, fingerprint, state, report, live_at)
    SELECT id, CAST(:spec AS jsonb), :fingerprint, CAST(:state AS text), CAST(:report AS jsonb),
           CASE WHEN CAST(:state AS text) = 'live' THEN now() END
      FROM vectormill.collections WHERE id = :collection_id
    RETURNING id, (SELECT language FROM vectormill.collections WHERE id = :collection_id) AS language
""")

# The column `search` is NULL if no text is kept; `document` is the document that a passage belongs to, else NULL.
CREATE_TABLES: Final = """
    CREATE TABLE {table} (
        key          text PRIMARY KEY,
        content_hash bytea NOT NULL,
        {results},
        job_seq      bigint NOT NULL
    ) WITH ({vacuum});
    CREATE TABLE {attributes} (
        key           text PRIMARY KEY,
        content_hash  bytea,  -- that of the vector's row: one look-up tells whether a row of a source is unchanged
        metadata      jsonb,
        metadata_hash bytea,
        {text_definitions},
        search        tsvector GENERATED ALWAYS AS (to_tsvector({language}::regconfig, text)) STORED,
        document      text GENERATED ALWAYS AS (metadata -> '_passage' ->> 'document') STORED,
        job_seq       bigint NOT NULL
    ) WITH ({storage});
    CREATE INDEX {document_index} ON {attributes} (document) WHERE document IS NOT NULL
"""


def create_generation(
    connection: Connection,
    collection_id: int,
    collection: str,
    spec: EncodingSpec,
    state: str,
    report: Mapping[str, Any],
) -> Generation:
    """Create an empty generation of a collection with its tables, for results and for attributes."""
    values = {
        "collection_id": collection_id,
        "spec": to_jsonb(spec.to_json()),
        "fingerprint": spec.fingerprint(),
        "state": state,
        "report": to_jsonb(report),
    }
    generation_id, language = connection.execute(INSERT_GENERATION, values).one()
    kind, comma = choose_kind(spec), sql.SQL(", ")
    driver_of(connection).execute(
        sql.SQL(CREATE_TABLES).format(
            **name_parts(generation_id, spec),
            results=comma.join(sql.SQL(column.definition) for column in kind.columns(spec)),
            text_definitions=comma.join(
                sql.SQL("{} text").format(sql.Identifier(name)) for name in spec.text_columns
            ),
            language=sql.Literal(f"pg_catalog.{language}"),
            document_index=sql.Identifier(f"{attributes_name(generation_id)}_document"),
            vacuum=sql.SQL(VACUUM),
            storage=sql.SQL(STORAGE),
        )
    )
    return Generation(generation_id, collection_id, collection, spec, table_name(generation_id), state)


CREATE_VIEW: Final = """
    CREATE OR REPLACE VIEW {name} {options} AS
    SELECT live.key, {results}, attributes.metadata, live.content_hash, live.job_seq, {texts}
      FROM {table} AS live LEFT JOIN {attributes} AS attributes ON attributes.key = live.key
"""


def point_view_at(connection: Connection, generation: Generation, options: Sequence[str] = ()) -> None:
    """Create or replace the collection's SQL view so that it reads this generation.

    It has these `options`, each as `name=value`; Postgres takes all others away from a view that it replaces.
    """
    kind = choose_kind(generation.spec)
    # The text that a passage is read in is not shown: the view is the same with and without late chunking.
    columns = generation.spec.text_columns
    shown = columns[:1] if generation.kind == VECTORS else columns
    pairs = [option.split("=", 1) for option in options]
    chosen = sql.SQL(", ").join(
        sql.SQL("{} = {}").format(sql.Identifier(name), sql.Literal(value)) for name, value in pairs
    )
    driver_of(connection).execute(
        sql.SQL(CREATE_VIEW).format(
            options=sql.SQL("WITH ({})").format(chosen) if pairs else sql.SQL(""),
            name=sql.Identifier("public", generation.collection),
            results=sql.SQL(", ").join(map(sql.SQL, kind.shown(generation.spec))),
            texts=sql.SQL(", ").join(sql.Identifier("attributes", name) for name in shown),
            table=sql.Identifier("vectormill", generation.table_name),
            attributes=sql.Identifier("vectormill", attributes_name(generation.id)),
        )
    )


# Rows are sent as arrays and not through a staging table, which would be read again and truncated at every COMMIT. For
# 2,000 rows of halfvec(384) this saves a sixth of the server's time and a third of the worker's.
UPSERT_ROWS: Final = """
    WITH newer AS MATERIALIZED (  -- deleted since, or a run has described another text
        SELECT key, seq, CAST(NULL AS bytea) AS content_hash FROM vectormill.tombstones
         WHERE collection_id = %(collection_id)s::bigint AND key = ANY(%(keys)s::text[])
           AND seq > %(first_place)s::bigint
         UNION ALL
        SELECT key, job_seq, content_hash FROM {attributes}
         WHERE key = ANY(%(keys)s::text[]) AND job_seq > %(first_place)s::bigint
    )
    INSERT INTO {table} AS live (key, content_hash, {columns}, job_seq)
    SELECT item.key, item.content_hash, {item_columns}, item.place
      FROM unnest(%(keys)s::text[], %(hashes)s::bytea[], %(places)s::bigint[], {arrays})
               AS item (key, content_hash, place, {columns})
     WHERE NOT EXISTS (SELECT 1 FROM newer WHERE newer.key = item.key AND newer.seq > item.place
                          AND newer.content_hash IS DISTINCT FROM item.content_hash)
     ORDER BY item.key  -- one lock order for all chunks: no deadlocks between chunks that share keys
    ON CONFLICT (key) DO UPDATE
       SET content_hash = excluded.content_hash, {assignments}, job_seq = excluded.job_seq
     WHERE live.job_seq <= excluded.job_seq  -- an older job never overwrites a newer one
"""


# Keys are sorted as in UPSERT_ROWS, by the collation of the database, so that all parts lock rows in the same order.
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
) -> int:
    """Upsert one row per key into the generation's table, with its attributes, inside the caller's transaction.

    Of items with the same key only the last is written. `results` has a row per item, of the collection's kind, in its
    column type or as `make_column_rows` returns it: finite numbers, or JSON that jsonb accepts. `job_seq` is the
    sequence number of items without their own place. Items whose key was written or deleted with a later one are
    skipped. Deletions from the collection wait until the transaction ends. Return the number of items whose key comes
    again behind them.
    """
    columns, results, num_repeated = take_last(Items.of(items), results)
    if not columns:
        return 0
    driver = driver_of(connection)
    kind = open_kind(driver, spec, generation_id)
    with driver.cursor() as cursor:
        accept_arrays(cursor)
        hold = hold_deletions(cursor, generation_id)
        statement = sql.SQL(UPSERT_ROWS).format(**name_parts(generation_id, spec))
        row_bytes = measure_rows(results, spec)
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
                    **kind.make_arrays(part_results, spec, partial(find_type, cursor)),
                },
            )
            write_attributes(cursor, generation_id, own_places, part, spec, keep_text=keep_text)
    return num_repeated


def take_last(items: Items, results: Results) -> tuple[Items, Results, int]:
    """Return the last item of each key with its result, in order, and the number of items that were left out.

    A statement of Postgres refuses to write one row twice (SQLSTATE 21000).
    """
    last = dict(zip(items.keys, range(len(items)), strict=True))
    num_repeated = len(items) - len(last)
    if not num_repeated:
        return items, results, 0
    places = sorted(last.values())
    return items.take(places), results[places], num_repeated


def measure_rows(results: Results, spec: EncodingSpec) -> int:
    """Return the bytes of a row's result on the wire: the most that it can have, or else the mean of `results`."""
    return choose_kind(spec).row_bytes(spec) or max(1, sum(map(len, results)) // max(1, len(results)))


def _split(cursor: Cursor[Any], items: Items, part_items: int) -> Iterator[npt.NDArray[np.int64] | None]:
    """Yield the indices of the items that each statement writes, sorted by key; None if one statement takes all."""
    if len(items) <= part_items:
        yield None
        return
    keys = make_bytes_array(TEXT_OID, items.encode_keys())
    order = [row[0] for row in cursor.execute(ORDER_KEYS, {"keys": keys})]
    for start in range(0, len(order), max(1, part_items)):
        yield np.array(order[start : start + max(1, part_items)], dtype=np.int64)


ESTIMATE_ROWS: Final = text("SELECT CAST(reltuples AS bigint) FROM pg_class WHERE oid = to_regclass(:table)")


def estimate_num_rows(connection: Connection, table: str) -> int | None:
    """Return the estimated row count of a table in the schema vectormill, as of the last VACUUM or ANALYZE.

    Return None if there is no such table, or if Postgres has not counted it yet.
    """
    estimate = connection.execute(ESTIMATE_ROWS, {"table": f"vectormill.{table}"}).scalar_one_or_none()
    return None if estimate is None or estimate < 0 else int(estimate)


FIND_RANGES = text("SELECT ranges FROM vectormill.calibrations WHERE fingerprint = :fingerprint")

# If two workers measure at the same time, the ranges that are committed first apply to everybody.
INSERT_RANGES = text("""
    INSERT INTO vectormill.calibrations (fingerprint, ranges) VALUES (:fingerprint, :ranges)
    ON CONFLICT (fingerprint) DO NOTHING
""")


def find_ranges(connection: Connection, spec: EncodingSpec) -> Ranges | None:
    """Return the ranges of codes in the spec's vector space; None for other types, or if they are not measured yet."""
    if not spec.kept_type.has_ranges:
        return None
    content = connection.execute(FIND_RANGES, {"fingerprint": spec.fingerprint()}).scalar_one_or_none()
    return None if content is None else Ranges.from_bytes(content)


def keep_ranges(connection: Connection, spec: EncodingSpec, ranges: Ranges) -> None:
    """Store the ranges of codes of the spec's vector space, unless it has ranges already."""
    values = {"fingerprint": spec.fingerprint(), "ranges": ranges.to_bytes()}
    connection.execute(INSERT_RANGES, values)
