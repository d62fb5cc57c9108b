"""Differences between a source and a generation: choose which rows to read, stage them, compare, and apply.

Rows are staged in two unlogged tables per run. `seen` has the key of every row, to find rows that vanished
from the source. `changes` has the rows that differ from the generation, by position in the source, followed
by the vanished keys.

A crash of Postgres empties unlogged tables. A marker row, checked in each transaction that reads the stage,
detects this. Differences are applied in batches, one transaction each, and every statement is idempotent, so
that a run that was killed repeats its last batch. Rows that clients wrote after the run began to read are
left alone.

If a column of the source tells when each row was changed, a run does not read all rows. Each run reports the newest
value of that column that it has read. A later run reads from the value of the run before the last one on, so that a
transaction which was open during one run is found by the next. It also reads the rows whose texts the last run could
not encode, since nothing else would try them again before all rows are read.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg import sql
from sqlalchemy import Connection, Engine, text

from vectormill.collections.collection import Generation
from vectormill.collections.generation_tables import name_parts
from vectormill.collections.tombstones import hold_deletions_of, lock_deletions
from vectormill.db.locks import drop_tables
from vectormill.db.outages import blames_a_value
from vectormill.db.parameters import BYTEA_OID, TEXT_OID, accept_arrays, make_bytes_array, make_places_array
from vectormill.db.session import driver_of
from vectormill.domain.errors import RunError
from vectormill.jobs.item import PAIR_MARK, Item, Items
from vectormill.jobs.job import OPEN_JOB_STATES
from vectormill.runs.run import CHANGES, GOOD_RUN_STATES, READING, REINDEX, Run
from vectormill.sources.source import FULL_EVERY_HOURS, Source
from vectormill.workers.proofs import IS_UNPROVEN

NEW: Final = "n"
CHANGED: Final = "c"
METADATA_ONLY: Final = "m"
VANISHED: Final = "v"


class StageLost(RunError):
    """Postgres restarted after a crash and lost the staged rows; the run will read its source again."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch of rows of a source, with their hashes. `first` is the position of the first row, from 1.

    The hash of missing metadata is empty.
    """

    first: int
    items: Items
    content_hashes: Sequence[bytes]
    metadata_hashes: Sequence[bytes]

    def compared(self, seq: int, *, keep_text: bool) -> dict[str, object]:
        """Return the parameters of COMPARE_BATCH."""
        places = self.items.places
        return {
            "keys": make_bytes_array(TEXT_OID, self.items.encode_keys()),
            "content_hashes": make_bytes_array(BYTEA_OID, self.content_hashes),
            "metadata_hashes": make_bytes_array(BYTEA_OID, self.metadata_hashes, empty_is_null=True),
            "places": None if places is None else make_places_array(places),
            "seq": seq,
            "keep_text": keep_text,
        }


def pack_rows(first: int, items: Sequence[Item]) -> Rows:
    """Return a batch of items with their hashes.

    This is called in the reading thread, because hashing is most of the cost of a row.
    """
    columns = Items.of(items)
    return Rows(first, columns, columns.content_hashes(), columns.metadata_hashes())


@dataclass(frozen=True, slots=True)
class RunTables:
    """The names of a run's staging tables and of the tables of the generation that it is compared with."""

    run_id: UUID
    generation: Generation

    def fill_in(self, statement: str) -> sql.Composed:
        """Return a statement with the names of these tables and of the generation's columns."""
        spec, prefix = self.generation.spec, stage_prefix(self.run_id)
        texts = spec.text_columns
        return sql.SQL(statement).format(
            **name_parts(self.generation.id, spec),
            **{
                name: sql.Identifier("vectormill", f"{prefix}{name}") for name in ("seen", "changes", "moved")
            },
            text_values=sql.SQL(", ").join(sql.SQL(TEXT_VALUES[name]) for name in texts),
            mark=sql.Literal(PAIR_MARK),
            generation_id=sql.Literal(self.generation.id),
        )

    def execute(
        self, connection: Connection, statement: str, values: dict[str, Any] | None = None
    ) -> psycopg.Cursor[Any]:
        """Execute a statement on these tables."""
        return driver_of(connection).execute(self.fill_in(statement), values)

    def read_number(
        self, connection: Connection, statement: str, values: dict[str, Any] | None = None
    ) -> int:
        """Return the one number that a statement on these tables returns."""
        ((number,),) = self.execute(connection, statement, values).fetchall()
        return int(number)


# Expressions for the kept-text columns, from a staged text and the position of the pair separator in it.
TEXT_VALUES: Final = {
    "text": """
        CASE WHEN %(keep_text)s::boolean
             THEN convert_from(CASE mark WHEN 0 THEN text ELSE substring(text FROM 1 FOR mark - 1) END, 'UTF8') END
    """,
    "text_pair": """
        CASE WHEN %(keep_text)s::boolean AND mark > 0 THEN convert_from(substring(text FROM mark + 1), 'UTF8') END
    """,
}


def stage_prefix(run_id: UUID) -> str:
    return f"run_{run_id.hex}_"


DROP_STAGE: Final = "DROP TABLE IF EXISTS {seen}, {changes}, {moved}"

MAKE_SEEN: Final = "CREATE UNLOGGED TABLE {seen} (key text NOT NULL) WITH (autovacuum_enabled = off)"

MAKE_CHANGES: Final = """
    CREATE UNLOGGED TABLE {changes} (
        ordinal       bigint PRIMARY KEY,
        kind          text NOT NULL,
        key           text NOT NULL,
        text          bytea,
        metadata      bytea,
        content_hash  bytea,
        metadata_hash bytea,
        place         bigint  -- in the order of writers; NULL for what vanished
    ) WITH (autovacuum_enabled = off)
"""

# A marker row, which is missing if a crash of Postgres has emptied the table.
MARK_STAGE: Final = "INSERT INTO {changes} (ordinal, kind, key) VALUES (0, 'marker', '')"

IS_MARKED: Final = "SELECT 1 FROM {changes} WHERE ordinal = 0"


def make_stage(connection: Connection, stage: RunTables) -> None:
    """Create empty staging tables, replacing any that exist."""
    for statement in (DROP_STAGE, MAKE_SEEN, MAKE_CHANGES, MARK_STAGE):
        stage.execute(connection, statement)


def has_table(connection: Connection, run_id: UUID, name: str) -> bool:
    table = f"vectormill.{stage_prefix(run_id)}{name}"
    row = driver_of(connection).execute("SELECT to_regclass(%s) IS NOT NULL", (table,)).fetchone()
    return row is not None and bool(row[0])


def require_stage(connection: Connection, stage: RunTables) -> None:
    """Raise StageLost if the stage is gone.

    Call in the transaction that reads the stage, as Postgres may crash between two transactions.
    """
    if (
        not has_table(connection, stage.run_id, "changes")
        or not stage.execute(connection, IS_MARKED).rowcount
    ):
        raise StageLost


LIST_LEFT_STAGES: Final = text("""
    SELECT class.relname
      FROM pg_class AS class
      JOIN pg_namespace AS namespace ON namespace.oid = class.relnamespace AND namespace.nspname = 'vectormill'
      LEFT JOIN vectormill.runs AS run ON replace(CAST(run.id AS text), '-', '') = substr(class.relname, 5, 32)
     WHERE class.relkind = 'r' AND class.relname ~ '^run_[0-9a-f]{32}_'
       AND (run.id IS NULL OR run.finished_at IS NOT NULL)
""")


def drop_left_stages(engine: Engine) -> int:
    """Drop the staging tables of runs that have ended or no longer exist; return the number of tables."""
    return drop_tables(engine, LIST_LEFT_STAGES)


# A batch has few keys compared with the generation, so each key is looked up by index. The planner might read
# a small generation completely instead.
LOOK_UP_BY_INDEX: Final = """
    SELECT set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true),
           set_config('enable_seqscan', 'off', true)
"""

# Needs no durable commit: rows that a crash of Postgres would lose are read again anyway.
COMMIT_AT_ONCE: Final = "SELECT set_config('synchronous_commit', 'off', true)"

# Most rows are unchanged, which one look-up shows: in the attributes if the row has any, else in the results.
# A row written in a later place is newer than the source and counts as unchanged. An equal row that is
# carried over from a later place raises the place of its attributes.
COMPARE_BATCH: Final = """
    WITH item AS MATERIALIZED (
        SELECT key, content_hash, metadata_hash, coalesce(own_place, %(seq)s::bigint) AS place,
               own_place IS NOT NULL AS is_carried, position
          FROM unnest(%(keys)s::text[], %(content_hashes)s::bytea[], %(metadata_hashes)s::bytea[], %(places)s::bigint[])
               WITH ORDINALITY AS item (key, content_hash, metadata_hash, own_place, position)
    ), noted AS (
        INSERT INTO {seen} (key) SELECT key FROM item
    ), other AS MATERIALIZED (
        SELECT item.key, item.content_hash, item.place, item.position, kept.job_seq AS described_seq,
               item.is_carried AND kept.job_seq < item.place
                   OR kept.metadata_hash IS DISTINCT FROM item.metadata_hash
                   OR (kept.metadata IS NULL) <> (item.metadata_hash IS NULL)
                   OR %(keep_text)s::boolean AND kept.text IS NULL AS is_described_otherwise
          FROM item
          LEFT JOIN {attributes} AS kept ON kept.key = item.key
         WHERE item.is_carried AND kept.job_seq < item.place
            OR kept.content_hash IS DISTINCT FROM item.content_hash
            OR kept.metadata_hash IS DISTINCT FROM item.metadata_hash
            OR (kept.metadata IS NULL) <> (item.metadata_hash IS NULL)
            OR %(keep_text)s::boolean AND kept.text IS NULL
    )
    SELECT other.position - 1,
           CASE WHEN live.key IS NULL THEN 'n' WHEN live.content_hash <> other.content_hash THEN 'c' ELSE 'm' END
      FROM other
      LEFT JOIN {table} AS live ON live.key = other.key
     WHERE live.key IS NULL
        OR greatest(live.job_seq, other.described_seq) <= other.place
           AND (live.content_hash <> other.content_hash OR other.is_described_otherwise)
"""

COPY_CHANGES: Final = """
    COPY {changes} (ordinal, kind, key, text, metadata, content_hash, metadata_hash, place) FROM STDIN (FORMAT BINARY)
"""


def stage_rows(
    connection: Connection, stage: RunTables, rows: Rows, seq: int, *, keep_text: bool
) -> dict[str, int]:
    """Stage a batch of rows and those that differ from the generation; return the number of rows by kind."""
    driver = driver_of(connection)
    stage.execute(connection, LOOK_UP_BY_INDEX)
    stage.execute(connection, COMMIT_AT_ONCE)
    accept_arrays(driver)
    values = rows.compared(seq, keep_text=keep_text)
    found = stage.execute(connection, COMPARE_BATCH, values).fetchall()
    counts = {NEW: 0, CHANGED: 0, METADATA_ONLY: 0}
    if found:
        with driver.cursor() as cursor, cursor.copy(stage.fill_in(COPY_CHANGES)) as copy:
            copy.set_types(["int8", "text", "text", "bytea", "bytea", "bytea", "bytea", "int8"])
            for position, kind in found:
                counts[kind] += 1
                item = rows.items[position]
                copy.write_row(
                    (
                        rows.first + position,
                        kind,
                        item.key,
                        item.text,
                        item.metadata,
                        rows.content_hashes[position],
                        rows.metadata_hashes[position] or None,
                        seq if item.place is None else item.place,
                    )
                )
    return counts


FIND_REPEATED_KEY: Final = "SELECT key FROM {seen} GROUP BY key HAVING count(*) > 1 LIMIT 1"


def has_repeated_key(connection: Connection, stage: RunTables) -> bool:
    """Return True if two rows of the source have the same key, where hashes of keys have only hinted at it."""
    return stage.execute(connection, FIND_REPEATED_KEY).rowcount > 0


LOAD_CHANGES: Final = """
    SELECT ordinal, key, text, metadata, nullif(place, %(seq)s::bigint) FROM {changes}
     WHERE ordinal > %(after)s::bigint AND kind = ANY(%(kinds)s::text[])
     ORDER BY ordinal LIMIT %(limit)s::bigint
"""


def load_changes(
    connection: Connection, stage: RunTables, seq: int, *, kinds: Sequence[str], after: int, limit: int
) -> list[tuple[int, Item]]:
    """Return up to `limit` staged rows of these kinds behind the ordinal `after`, each as (ordinal, item).

    `Item.place` is set only where it is not `seq`, the place of the run.
    """
    values = {"seq": seq, "after": after, "kinds": list(kinds), "limit": limit}
    rows: Iterator[Any] = driver_of(connection).execute(stage.fill_in(LOAD_CHANGES), values, binary=True)
    return [(row[0], Item(row[1], row[2], row[3], row[4])) for row in rows]


IS_DELETED_SINCE: Final = """
    SELECT 1 FROM vectormill.tombstones
     WHERE collection_id = %(collection_id)s::bigint AND seq > %(seq)s::bigint LIMIT 1
"""


def count_rows(connection: Connection, stage: RunTables) -> int:
    return stage.read_number(connection, "SELECT count(*) FROM {table}")


SORT_IN_MEMORY: Final = "SELECT set_config('work_mem', '64MB', true)"

FORGET_VANISHED: Final = "DELETE FROM {changes} WHERE ordinal > %(num_seen)s::bigint"

# Reads both tables once, whatever their sizes; the place of a row is compared when it is deleted.
NOTE_VANISHED: Final = """
    WITH vanished AS (
        SELECT live.key FROM {table} AS live
         WHERE NOT EXISTS (SELECT 1 FROM {seen} AS seen WHERE seen.key = live.key)
    ), noted AS (
        INSERT INTO {changes} (ordinal, kind, key)
        SELECT %(num_seen)s::bigint + row_number() OVER (ORDER BY key), 'v', key FROM vanished
        RETURNING 1
    )
    SELECT count(*) FROM noted
"""


def note_vanished(
    connection: Connection, stage: RunTables, *, num_rows: int, num_known: int, num_seen: int, seq: int
) -> int:
    """Stage the keys that the source no longer has; return their number.

    `num_known` rows of the source are in the generation, which has `num_rows`. If these are equal and no item
    was deleted since the run began to read, no row can have vanished, and the comparison is skipped.
    """
    stage.execute(connection, FORGET_VANISHED, {"num_seen": num_seen})
    values = {"collection_id": stage.generation.collection_id, "seq": seq}
    if num_rows == num_known and not stage.execute(connection, IS_DELETED_SINCE, values).rowcount:
        return 0
    stage.execute(connection, SORT_IN_MEMORY)
    stage.execute(connection, "ANALYZE {seen}")
    return stage.read_number(connection, NOTE_VANISHED, {"num_seen": num_seen})


# Selects one donor row per wanted text. Results are copied before any is written, so that two rows can swap
# places. OFFSET 0 keeps the planner from reading a whole table for what is found by key.
# A row whose vector may yet be found faulty is no donor, since only its own job would encode it again: one in the place
# of a job that goes on, is not proven, or has a suspect chunk. A job may also have
# carried rows in places of their own; while such a job is in doubt, no row is a donor.
MAKE_MOVED: Final = f"""
    CREATE UNLOGGED TABLE {{moved}} WITH (autovacuum_enabled = off) AS
    WITH wanted AS (
        SELECT DISTINCT content_hash FROM {{changes}} WHERE kind IN ('n', 'c')
    ), doubted AS MATERIALIZED (
        SELECT coalesce(place, seq) AS place, (
                   SELECT payload.places IS NOT NULL
                     FROM vectormill.chunks CROSS JOIN LATERAL vectormill.payload_of(chunks.id) AS payload
                    WHERE chunks.job_id = jobs.id AND chunks.state <> 'split' LIMIT 1) AS carries
          FROM vectormill.jobs
         WHERE generation_id = {{generation_id}}
           AND (state IN {OPEN_JOB_STATES} OR {IS_UNPROVEN}
                OR id IN (SELECT job_id FROM vectormill.chunks WHERE is_suspect))
    ), donor AS MATERIALIZED (
        SELECT candidate.content_hash, min(candidate.key) AS key
          FROM DONORS AS candidate JOIN wanted ON wanted.content_hash = candidate.content_hash
         WHERE candidate.job_seq NOT IN (SELECT place FROM doubted) AND NOT EXISTS (SELECT 1 FROM doubted WHERE carries)
         GROUP BY candidate.content_hash
    )
    SELECT change.ordinal, change.key, change.content_hash, change.place, {{live_columns}}
      FROM {{changes}} AS change
      JOIN donor ON donor.content_hash = change.content_hash
     CROSS JOIN LATERAL (SELECT {{columns}} FROM {{table}} AS live WHERE live.key = donor.key OFFSET 0) AS live
     WHERE change.kind IN ('n', 'c')
"""

# The rows that this run replaces or deletes: what is renamed, moved or exchanged is among them.
STAGED_DONORS: Final = """(
    SELECT live.key, live.content_hash, live.job_seq
      FROM {changes} AS staged
     CROSS JOIN LATERAL (SELECT key, content_hash, job_seq FROM {table} WHERE key = staged.key OFFSET 0) AS live
     WHERE staged.kind IN ('c', 'v'))"""

# All rows, in a single pass: their table has no index by text, since few runs have new rows.
ALL_DONORS: Final = "{table}"

# The number of pages of the generation that may be read for each wanted text, to find copies of rows that stay.
PAGES_PER_TEXT: Final = 16

COUNT_PAGES: Final = """
    SELECT pg_relation_size(CAST(%(name)s AS regclass)) / CAST(current_setting('block_size') AS bigint)
"""


def make_moved(num_wanted: int, num_pages: int) -> str:
    """Return the statement that finds donors of so many texts in a generation of so many pages."""
    donors = ALL_DONORS if num_pages <= PAGES_PER_TEXT * num_wanted else STAGED_DONORS
    return MAKE_MOVED.replace("DONORS", donors)


def note_moved(connection: Connection, stage: RunTables, num_wanted: int) -> None:
    """Copy the results of texts that the generation has under another key, for rows that need them.

    For few texts only rows that this run replaces or deletes are looked at, which are found by key. For many,
    all rows are.
    """
    if has_table(connection, stage.run_id, "moved"):
        return
    stage.execute(connection, SORT_IN_MEMORY)
    stage.execute(connection, "ANALYZE {changes}")
    table = {"name": f"vectormill.{stage.generation.table_name}"}
    num_pages = stage.read_number(connection, COUNT_PAGES, table)
    stage.execute(connection, make_moved(num_wanted, num_pages))
    stage.execute(connection, "ALTER TABLE {moved} ADD PRIMARY KEY (ordinal)")
    stage.execute(connection, "CREATE INDEX ON {moved} (content_hash)")


LIST_MOVED: Final = """
    SELECT ordinal FROM {moved} WHERE ordinal > %(after)s::bigint ORDER BY ordinal LIMIT %(limit)s::bigint
"""

# The caller holds off deletions of the collection, so that no tombstone appears meanwhile: see tombstones.py.
WRITE_MOVED: Final = """
    INSERT INTO {table} AS live (key, content_hash, {columns}, job_seq)
    SELECT moved.key, moved.content_hash, {moved_columns}, moved.place
      FROM {moved} AS moved
     WHERE moved.ordinal = ANY(%(ordinals)s::bigint[])
       AND NOT EXISTS (SELECT 1 FROM vectormill.tombstones AS tombstone
                        WHERE tombstone.collection_id = %(collection_id)s::bigint AND tombstone.key = moved.key
                          AND tombstone.seq > moved.place)
       AND NOT EXISTS (SELECT 1 FROM {attributes} AS kept
                        WHERE kept.key = moved.key AND kept.job_seq > moved.place)
     ORDER BY moved.key
    ON CONFLICT (key) DO UPDATE
       SET content_hash = excluded.content_hash, {assignments}, job_seq = excluded.job_seq
     WHERE live.job_seq <= excluded.job_seq
"""

MARK_MOVED: Final = """
    WITH found AS (
        SELECT ordinal, kind FROM {changes} WHERE ordinal = ANY(%(ordinals)s::bigint[]) AND kind IN ('n', 'c')
    ), marked AS (
        UPDATE {changes} AS change SET kind = 'moved' FROM found WHERE change.ordinal = found.ordinal
        RETURNING found.kind
    )
    SELECT count(*) FILTER (WHERE kind = 'n'), count(*) FILTER (WHERE kind = 'c') FROM marked
"""


def write_moved(
    connection: Connection, stage: RunTables, *, after: int, limit: int, keep_text: bool
) -> tuple[int, int, int | None]:
    """Write the copied results of up to `limit` rows after a position, and mark the rows as moved.

    Return how many of them were new and how many changed, and the last row's position; None after the last row.
    """
    hold_deletions_of(connection, stage.generation.collection_id)
    rows = stage.execute(connection, LIST_MOVED, {"after": after, "limit": limit})
    ordinals = [ordinal for (ordinal,) in rows]
    if not ordinals:
        return 0, 0, None
    values = {"ordinals": ordinals, "collection_id": stage.generation.collection_id}
    stage.execute(connection, LOOK_UP_BY_INDEX)
    stage.execute(connection, WRITE_MOVED, values)
    _write_attributes(connection, stage, ordinals, keep_text=keep_text)
    ((num_new, num_changed),) = stage.execute(connection, MARK_MOVED, values).fetchall()
    return num_new, num_changed, ordinals[-1]


LIST_STAGED: Final = """
    SELECT ordinal, key FROM {changes}
     WHERE ordinal > %(after)s::bigint AND kind = %(kind)s::text ORDER BY ordinal LIMIT %(limit)s::bigint
"""


def list_staged(
    connection: Connection, stage: RunTables, kind: str, *, after: int, limit: int
) -> list[tuple[int, str]]:
    """Return up to `limit` staged keys of a kind after a position, each as (position, key)."""
    values = {"kind": kind, "after": after, "limit": limit}
    return list(stage.execute(connection, LIST_STAGED, values))


# If an older job has changed the text of a row since it was compared, the row must be encoded after all.
MARK_CHANGED: Final = """
    WITH marked AS (
        UPDATE {changes} AS change SET kind = 'c'
          FROM {table} AS live
         WHERE change.ordinal = ANY(%(ordinals)s::bigint[]) AND change.kind = 'm' AND live.key = change.key
           AND live.content_hash <> change.content_hash AND live.job_seq <= change.place
        RETURNING 1
    )
    SELECT count(*) FROM marked
"""


def write_metadata(
    connection: Connection, stage: RunTables, *, after: int, limit: int, keep_text: bool
) -> tuple[int, int, int | None]:
    """Write the metadata of up to `limit` rows after a position whose texts are unchanged.

    Return three values: how many rows have another text by now and must be encoded, how many texts Postgres
    refused to keep, and the last row's position (None after the last row).

    Nobody else can write rows of the collection meanwhile; otherwise an older job could write its result
    alongside these attributes.
    """
    lock_deletions(connection, stage.generation.collection_id)
    staged = list_staged(connection, stage, METADATA_ONLY, after=after, limit=limit)
    ordinals = [ordinal for ordinal, _ in staged]
    if not ordinals:
        return 0, 0, None
    stage.execute(connection, LOOK_UP_BY_INDEX)
    num_changed = stage.read_number(connection, MARK_CHANGED, {"ordinals": ordinals})
    num_refused = _write_attributes(connection, stage, ordinals, keep_text=keep_text)
    return num_changed, num_refused, ordinals[-1]


# The row with the result is locked but not changed, so only the attributes have the later place. They are
# kept even if the metadata is removed, because they stop an older job from overwriting the row.
WRITE_ATTRIBUTES: Final = """
    WITH change AS MATERIALIZED (
        SELECT change.kind, change.key, live.content_hash, change.metadata, change.metadata_hash, change.text,
               change.place,
               position({mark} IN change.text) AS mark
          FROM {changes} AS change
          JOIN {table} AS live ON live.key = change.key AND live.job_seq <= change.place
                              AND live.content_hash = change.content_hash
         WHERE change.ordinal = ANY(%(ordinals)s::bigint[])
         ORDER BY change.key
           FOR SHARE OF live
    )
    INSERT INTO {attributes} AS kept (key, content_hash, metadata, metadata_hash, {texts}, job_seq)
    SELECT key, content_hash, CAST(nullif(convert_from(metadata, 'UTF8'), '') AS jsonb), metadata_hash,
           {text_values}, place
      FROM change
     WHERE metadata_hash IS NOT NULL OR %(keep_text)s::boolean OR kind = 'm'
     ORDER BY key
    ON CONFLICT (key) DO UPDATE
       SET content_hash = excluded.content_hash, metadata = excluded.metadata,
           metadata_hash = excluded.metadata_hash, {text_assignments}, job_seq = excluded.job_seq
     WHERE kept.job_seq <= excluded.job_seq
"""

# Relies on the row locks of the statement before.
CLEAR_ATTRIBUTES: Final = """
    WITH change AS MATERIALIZED (
        SELECT change.key, change.metadata_hash, change.place
          FROM {changes} AS change
          JOIN {table} AS live ON live.key = change.key AND live.job_seq <= change.place
         WHERE change.ordinal = ANY(%(ordinals)s::bigint[]) AND change.kind <> 'm'
    )
    DELETE FROM {attributes} AS kept USING change
     WHERE change.metadata_hash IS NULL AND kept.key = change.key AND kept.job_seq <= change.place
"""


def _write_attributes(
    connection: Connection, stage: RunTables, ordinals: Sequence[int], *, keep_text: bool
) -> int:
    """Write the attributes of these rows; return how many texts Postgres refused to keep.

    A text that full-text search cannot index (SQLSTATE 54000) is left out, but its row keeps vector and
    metadata.
    """
    values = {"ordinals": list(ordinals), "keep_text": keep_text}
    stage.execute(connection, LOOK_UP_BY_INDEX)
    try:
        with driver_of(connection).transaction():
            stage.execute(connection, WRITE_ATTRIBUTES, values)
    except psycopg.Error as error:
        if not keep_text or not blames_a_value(error):
            raise
        if len(ordinals) == 1:
            return 1 + _write_attributes(connection, stage, ordinals, keep_text=False)
        middle = len(ordinals) // 2
        halves = ordinals[:middle], ordinals[middle:]
        return sum(_write_attributes(connection, stage, half, keep_text=True) for half in halves)
    if not keep_text:
        stage.execute(connection, CLEAR_ATTRIBUTES, values)
    return 0


LIST_RENAMED: Final = """
    SELECT live.key FROM {table} AS live
     WHERE live.key = ANY(%(keys)s::text[])
       AND EXISTS (SELECT 1 FROM {moved} AS moved WHERE moved.content_hash = live.content_hash)
"""


def list_renamed(connection: Connection, stage: RunTables, keys: Sequence[str]) -> list[str]:
    """Return those of these vanished keys whose text another row has taken over with its result."""
    stage.execute(connection, LOOK_UP_BY_INDEX)
    return [key for (key,) in stage.execute(connection, LIST_RENAMED, {"keys": list(keys)})]


# The failed row of a carried-over item has its own place, so that a newer row in the generation is kept.
LIST_FAILED_KEYS: Final = text("""
    SELECT failed.item, failed.key,
           coalesce(payload.places[failed.item - chunks.first_item + 1], jobs.place, jobs.seq) AS place
      FROM vectormill.item_errors AS failed
      JOIN vectormill.jobs ON jobs.id = failed.job_id
      LEFT JOIN vectormill.chunks ON chunks.id = failed.chunk_id
      LEFT JOIN vectormill.chunk_payloads AS payload ON payload.chunk_id = failed.chunk_id
     WHERE failed.job_id = :job_id AND failed.item > :after ORDER BY failed.item LIMIT :limit
""")


def list_failed_keys(
    connection: Connection, job_id: object, *, after: int, limit: int
) -> list[tuple[int, str, int]]:
    """Return up to `limit` failed items of a job after a position, each as (position, key, place).

    The place is the item's own place in the order of writers, else that of the job.
    """
    rows = connection.execute(LIST_FAILED_KEYS, {"job_id": job_id, "after": after, "limit": limit})
    return [(row.item, row.key, row.place) for row in rows]


# Marks were once compared by Python, whose order of texts is not that of a database; those are not taken up.
ORDER: Final = "database"
# With more rows that could not be encoded, all rows are read.
MOST_FAILED: Final = 10_000

# Uses ix_runs_collection_id, and stops after two rows.
LIST_MARKS: Final = text(f"""
    SELECT report #> '{{{READING},{CHANGES}}}' AS mark, generation_id, num_failed, job_id,
           EXISTS (SELECT 1 FROM vectormill.jobs WHERE jobs.id = runs.job_id AND state <> 'deleting') AS has_job
      FROM vectormill.runs
     WHERE collection_id = :collection_id AND kind = '{REINDEX}' AND state IN {GOOD_RUN_STATES}
     ORDER BY created_at DESC LIMIT 2
""")
IS_RECENT: Final = text("SELECT CAST(:moment AS timestamptz) > now() - make_interval(hours => :hours)")
NOW: Final = text("SELECT now()::text")


def find_digest(source: Source) -> str:
    """Return a digest of what a source reads, so that marks of another query are not taken for its own."""
    said = json.dumps([source.kind, dict(source.options), dict(source.split), ORDER], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()


def begin_mark(
    connection: Connection, run: Run, generation_id: int, source: Source
) -> tuple[dict[str, Any], list[str]]:
    """Return the mark of a run that begins to read, and the keys of rows that the last run could not encode.

    `since` in the mark is None if it has to read all rows: for the first two runs on a generation or with another
    source, if the last complete reading is older than the source allows, if nothing tells any more which texts the last
    run could not encode, and if the run was told so.
    """
    digest = find_digest(source)
    whole = {"source": digest, "since": None, "newest": None, "whole_at": connection.scalar(NOW)}
    if run.options.get("full"):
        return whole, []
    found = connection.execute(LIST_MARKS, {"collection_id": run.collection_id}).all()
    marks = [row.mark for row in found if row.mark and row.generation_id == generation_id]
    if len(marks) < 2 or any(mark["source"] != digest or mark["newest"] is None for mark in marks):
        return whole, []
    last, before = marks
    hours = int(source.options.get("full_every_hours", FULL_EVERY_HOURS))
    if not connection.scalar(IS_RECENT, {"moment": last["whole_at"], "hours": hours}):
        return whole, []
    mark = {**last, "since": before["newest"]}
    if not found[0].num_failed:
        return mark, []
    failed = list_failed_keys(connection, found[0].job_id, after=-1, limit=MOST_FAILED + 1)
    if not found[0].has_job or len(failed) > MOST_FAILED:
        return whole, []
    return mark, [key for _, key, _ in failed]
