"""Bulk loads: a generation that is built beside the live one is first copied into tables without any index.

A random key costs more to insert into a large primary key than its whole row. So the job of the run that builds the
generation, and it alone, copies its rows into two fill tables, for results and attributes. All other writers (twins
of clients' jobs, deletions, the run itself) write the generation's own tables, as ever. Once the job has ended, the
bulk load is closed, its keys are sorted into unique indexes, the rows of the other writers are merged into it, and it
takes the place of the generation's tables.

Why no row is lost or comes back:

- A commit copies only after it has seen, under the lock that all commits share, that the bulk load is open for its job.
  Closing takes this lock exclusively. Afterwards nobody writes the fill tables but the run, under its own lock.
- Rows are merged by their places in the order of writers: the later one stays, with its own attributes. Of one place,
  which a chunk has that was copied and is encoded again, that of the generation's own tables stays.
- A deletion does not look into the fill tables, which have no index. Its tombstone removes the older row when the bulk
  load is merged, or before it is forgotten itself: when all older writers have ended (scheduler/scrubber.py).
- The last merge, the removals and the exchange of the tables are one transaction, which no writer overlaps.

A worker that knows nothing of bulk loads writes the generation's own tables, which is right too. The report of the
generation tells that there is a bulk load: `{"fill": {"job": id}}` while it is open, `{"fill": {"job": null}}` once it
is closed.
"""

from functools import partial
from typing import Any, Final
from uuid import UUID

from psycopg import Cursor, sql
from sqlalchemy import Connection, text

from vectormill.collections.codebooks import open_kind
from vectormill.collections.collection import Generation
from vectormill.collections.collections import SELECT_GENERATIONS, read_generation
from vectormill.collections.generation_tables import (
    STORAGE,
    VACUUM,
    attributes_name,
    filled_names,
    measure_rows,
    name_parts,
    split_texts,
    table_name,
)
from vectormill.collections.tombstones import hold_deletions, lock_deletions
from vectormill.db.parameters import JSONB_VERSION, Field, encode_rows, find_type
from vectormill.db.session import driver_of
from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.item import Items
from vectormill.results.kind import Results

# The columns are those of the generation's own tables; primary keys and indexes are left out.
CREATE_FILL_TABLES: Final = """
    CREATE TABLE IF NOT EXISTS {filled} (LIKE {table} INCLUDING ALL EXCLUDING INDEXES) WITH ({vacuum});
    CREATE TABLE IF NOT EXISTS {filled_attributes} (LIKE {attributes} INCLUDING ALL EXCLUDING INDEXES) WITH ({storage})
"""

# If an earlier job of the run has copied rows already, nobody may copy the same keys again.
BEGIN_BULK_LOAD: Final = """
    UPDATE vectormill.generations
       SET report = report || jsonb_build_object('fill', jsonb_build_object(
               'job', CASE WHEN NOT EXISTS (SELECT 1 FROM {filled}) THEN %(job_id)s::text END))
     WHERE id = %(generation_id)s
"""

FIND_BULK_LOAD = text(
    "SELECT report #>> '{fill,job}' AS job FROM vectormill.generations WHERE id = :id AND report ? 'fill'"
)

LIST_BULK_LOADS = text(f"""{SELECT_GENERATIONS}
     WHERE collections.id = :collection_id AND generations.state = 'building' AND generations.report ? 'fill'
""")

IS_OPEN: Final = """
    SELECT report #>> '{fill,job}' = %(job_id)s::text FROM vectormill.generations WHERE id = %(generation_id)s
"""

CLOSE_BULK_LOAD = text("""
    UPDATE vectormill.generations SET report = report || '{"fill": {"job": null}}' WHERE id = :id AND report ? 'fill'
""")

FORGET_BULK_LOAD = text("UPDATE vectormill.generations SET report = report - 'fill' WHERE id = :id")

COPY_ATTRIBUTES: Final = """
    COPY {filled_attributes} (key, content_hash, metadata, metadata_hash, {texts}, job_seq) FROM STDIN (FORMAT BINARY)
"""

COPY_RESULTS: Final = "COPY {filled} (key, content_hash, {columns}, job_seq) FROM STDIN (FORMAT BINARY)"


# Two indexers may both come here, if one has lost its run without knowing it; the second then finds the index.
INDEX_KEYS: Final = "CREATE UNIQUE INDEX IF NOT EXISTS {key_index} ON {filled} (key)"
INDEX_KEYS_OF_ATTRIBUTES: Final = """
    CREATE UNIQUE INDEX IF NOT EXISTS {attributes_key_index} ON {filled_attributes} (key)
"""
INDEX_DOCUMENTS: Final = """
    CREATE INDEX IF NOT EXISTS {document_index} ON {filled_attributes} (document) WHERE document IS NOT NULL
"""

# A chunk copies its rows once: what is encoded again, because the worker was faulty, is in the generation's own tables
# with the same place, and is newer.
MERGE_ROWS: Final = """
    WITH newer AS MATERIALIZED (
        SELECT own.key
          FROM {table} AS own
          LEFT JOIN {attributes} AS described ON described.key = own.key
          LEFT JOIN {filled} AS filled ON filled.key = own.key
          LEFT JOIN {filled_attributes} AS kept ON kept.key = own.key
         WHERE filled.key IS NULL
            OR greatest(own.job_seq, described.job_seq) >= greatest(filled.job_seq, kept.job_seq)
    ), results AS (
        INSERT INTO {filled} (key, content_hash, {columns}, job_seq)
        SELECT own.key, own.content_hash, {own_columns}, own.job_seq
          FROM newer JOIN {table} AS own ON own.key = newer.key
        ON CONFLICT (key) DO UPDATE
           SET content_hash = excluded.content_hash, {assignments}, job_seq = excluded.job_seq
    ), bare AS (
        DELETE FROM {filled_attributes} AS kept USING newer
         WHERE kept.key = newer.key
           AND NOT EXISTS (SELECT 1 FROM {attributes} AS described WHERE described.key = newer.key)
    )
    INSERT INTO {filled_attributes} AS kept (key, content_hash, metadata, metadata_hash, {texts}, job_seq)
    SELECT described.key, described.content_hash, described.metadata, described.metadata_hash, {described_texts},
           described.job_seq
      FROM newer JOIN {attributes} AS described ON described.key = newer.key
    ON CONFLICT (key) DO UPDATE
       SET content_hash = excluded.content_hash, metadata = excluded.metadata,
           metadata_hash = excluded.metadata_hash, {text_assignments}, job_seq = excluded.job_seq
"""

REMOVE_DELETED: Final = """
    WITH gone AS (
        DELETE FROM {filled} AS filled USING vectormill.tombstones AS tombstone
         WHERE tombstone.collection_id = %(collection_id)s AND tombstone.key = filled.key
           AND tombstone.seq > filled.job_seq
        RETURNING filled.key
    )
    DELETE FROM {filled_attributes} AS kept USING gone WHERE kept.key = gone.key
"""

# Rows of exactly these texts and places: what others have written since stays.
REMOVE_ROWS: Final = """
    WITH gone AS MATERIALIZED (
        SELECT * FROM unnest(%(keys)s::text[], %(hashes)s::bytea[], %(places)s::bigint[]) AS gone (key, hash, place)
    ), results AS (
        DELETE FROM {table} AS live USING gone
         WHERE live.key = gone.key AND live.content_hash = gone.hash AND live.job_seq = gone.place
    )
    DELETE FROM {attributes} AS kept USING gone
     WHERE kept.key = gone.key AND kept.content_hash = gone.hash AND kept.job_seq = gone.place
"""

EXCHANGE_TABLES: Final = """
    DROP TABLE {table}, {attributes};
    ALTER TABLE {filled} RENAME TO {table_name};
    ALTER TABLE {filled_attributes} RENAME TO {attributes_name};
    ALTER TABLE {table} ADD CONSTRAINT {key_name} PRIMARY KEY USING INDEX {key_index};
    ALTER TABLE {attributes} ADD CONSTRAINT {attributes_key_name} PRIMARY KEY USING INDEX {attributes_key_index};
    ALTER INDEX {filled_document_index} RENAME TO {document_name}
"""


def _fill_in(statement: str, generation_id: int, spec: EncodingSpec) -> sql.Composed:
    """Return a statement of this module with the names of a generation's tables, columns and indexes."""
    table, attributes = table_name(generation_id), attributes_name(generation_id)
    filled, filled_attributes = filled_names(generation_id)
    return sql.SQL(statement).format(
        **name_parts(generation_id, spec),
        vacuum=sql.SQL(VACUUM),
        storage=sql.SQL(STORAGE),
        key_index=sql.Identifier(f"{filled}_key"),
        attributes_key_index=sql.Identifier(f"{filled_attributes}_key"),
        document_index=sql.Identifier(f"{filled_attributes}_document"),
        filled_document_index=sql.Identifier("vectormill", f"{filled_attributes}_document"),
        table_name=sql.Identifier(table),
        attributes_name=sql.Identifier(attributes),
        key_name=sql.Identifier(f"{table}_pkey"),
        attributes_key_name=sql.Identifier(f"{attributes}_pkey"),
        document_name=sql.Identifier(f"{attributes}_document"),
    )


def _execute(
    connection: Connection, statement: str, generation: Generation, values: dict[str, Any] | None = None
) -> None:
    driver_of(connection).execute(_fill_in(statement, generation.id, generation.spec), values)


def begin_bulk_load(connection: Connection, generation: Generation, job_id: UUID) -> None:
    """Let this job, which has not been queued yet, copy its rows into the generation's fill tables.

    They are created if there are none.
    """
    _execute(connection, CREATE_FILL_TABLES, generation)
    _execute(connection, BEGIN_BULK_LOAD, generation, {"job_id": str(job_id), "generation_id": generation.id})


def hold_bulk_load(cursor: Cursor[Any], generation_id: int, job_id: UUID) -> bool:
    """Return whether the bulk load is open for this job; then it stays open until the transaction ends.

    Deletions from the collection are blocked until then, as by every commit. The second statement sees what was
    committed while the first one waited.
    """
    hold_deletions(cursor, generation_id)
    row = cursor.execute(IS_OPEN, {"generation_id": generation_id, "job_id": str(job_id)}).fetchone()
    return row is not None and bool(row[0])


# A larger chunk is sent in parts, each of which the client holds in memory.
PART_BYTES: Final = 8 << 20


def copy_rows(
    cursor: Cursor[Any],
    generation_id: int,
    job_seq: int,
    items: Items,
    results: Results,
    spec: EncodingSpec,
    *,
    keep_text: bool,
) -> None:
    """Copy one row per item into the fill tables, with its attributes; see upsert_rows for the parameters.

    The caller has called `hold_bulk_load`.
    """
    kind = open_kind(cursor.connection, spec, generation_id)
    hashes = items.content_hashes()
    part_rows = max(1, PART_BYTES // measure_rows(results, spec))
    for start in range(0, len(items), part_rows):
        part = items[start : start + part_rows]
        fields = kind.make_fields(results[start : start + part_rows], spec, partial(find_type, cursor))
        content = encode_rows(
            [
                part.encode_keys(),
                hashes[start : start + part_rows],
                *fields.values(),
                _send_places(part, job_seq),
            ]
        )
        with cursor.copy(_fill_in(COPY_RESULTS, generation_id, spec)) as copy:
            copy.write(content)
    chosen = [place for place, metadata in enumerate(items.metadata) if keep_text or metadata]
    if not chosen:
        return
    described = items.take(chosen)
    texts = split_texts(described.texts if keep_text else [b""] * len(described), spec.text_columns)
    content = encode_rows(
        [
            described.encode_keys(),
            [hashes[place] for place in chosen],
            [JSONB_VERSION + metadata if metadata else None for metadata in described.metadata],
            _nullify(described.metadata_hashes()),
            *(_nullify(texts[column]) for column in spec.text_columns),
            _send_places(described, job_seq),
        ]
    )
    with cursor.copy(_fill_in(COPY_ATTRIBUTES, generation_id, spec)) as copy:
        copy.write(content)


def _nullify(values: Any) -> list[Field]:
    return [value or None for value in values]


def _send_places(items: Items, job_seq: int) -> list[bytes]:
    return [place.to_bytes(8) for place in items.places or [job_seq] * len(items)]


def has_bulk_load(connection: Connection, generation_id: int) -> bool:
    """Return whether the generation has a bulk load that is not merged yet."""
    return connection.execute(FIND_BULK_LOAD, {"id": generation_id}).one_or_none() is not None


def remove_rows(connection: Connection, generation_id: int, items: Items, job_seq: int) -> None:
    """Remove the rows of these items from a generation and from its bulk load, unless others have been written since.

    `job_seq` is the place in the order of writers of items without their own.
    """
    own = table_name(generation_id), attributes_name(generation_id)
    with driver_of(connection).cursor() as cursor:
        hold_deletions(cursor, generation_id)
        tables = [own, filled_names(generation_id)] if has_bulk_load(connection, generation_id) else [own]
        for table, attributes in tables:
            statement = sql.SQL(REMOVE_ROWS).format(
                table=sql.Identifier("vectormill", table), attributes=sql.Identifier("vectormill", attributes)
            )
            cursor.execute(
                statement,
                {
                    "keys": list(items.keys),
                    "hashes": list(items.content_hashes()),
                    "places": list(items.places or [job_seq] * len(items)),
                },
            )


def close_bulk_load(connection: Connection, generation: Generation) -> None:
    """Let nobody copy any more: a later commit of the job writes the generation's own tables."""
    lock_deletions(connection, generation.collection_id)
    connection.execute(CLOSE_BULK_LOAD, {"id": generation.id})


def compose_indexes(generation: Generation) -> list[sql.Composed]:
    """Return the statements that build the indexes of a closed bulk load, from sorted keys."""
    statements = (INDEX_KEYS, INDEX_KEYS_OF_ATTRIBUTES, INDEX_DOCUMENTS)
    return [_fill_in(statement, generation.id, generation.spec) for statement in statements]


def merge_rows(connection: Connection, generation: Generation) -> None:
    """Copy rows of other writers that are newer into the closed bulk load, whose indexes are there."""
    _execute(connection, MERGE_ROWS, generation)


def list_bulk_loads(connection: Connection, collection_id: int) -> list[Generation]:
    """Return the generation of a collection that has a bulk load which is not merged yet."""
    return list(map(read_generation, connection.execute(LIST_BULK_LOADS, {"collection_id": collection_id})))


def remove_deleted(connection: Connection, generation: Generation) -> None:
    """Remove rows that were deleted after they were written from the bulk load, by reading all of it."""
    _execute(connection, REMOVE_DELETED, generation, {"collection_id": generation.collection_id})


def finish_bulk_load(connection: Connection, generation: Generation) -> None:
    """Merge what is left, remove what was deleted, and put the fill tables in the place of the generation's own."""
    lock_deletions(connection, generation.collection_id)
    merge_rows(connection, generation)
    remove_deleted(connection, generation)
    _execute(connection, EXCHANGE_TABLES, generation)
    connection.execute(FORGET_BULK_LOAD, {"id": generation.id})
