"""Differences: what a run does about rows that are not as in its source, batch by batch, each in a transaction.

What is staged: see stages.py. Every statement may be repeated: a run that was killed between two batches does the last
one again. Nothing that a client wrote since the run began to read is touched.
"""

from collections.abc import Sequence
from typing import Any, Final

import psycopg
from sqlalchemy import Connection, text

from vectormill.collections.rows.tombstones import hold_deletions, lock_deletions
from vectormill.db.outages import blames_a_value
from vectormill.runs.stages import LOOK_UP_BY_INDEX, RunTables, driver_of, has_table

COUNT_ROWS: Final = "SELECT count(*) FROM {table}"

IS_DELETED_SINCE: Final = """
    SELECT 1 FROM vectormill.tombstones
     WHERE collection_id = %(collection_id)s::bigint AND seq > %(seq)s::bigint LIMIT 1
"""


def count_rows(connection: Connection, stage: RunTables) -> int:
    return _number(connection, stage, COUNT_ROWS, {})


FORGET_VANISHED: Final = "DELETE FROM {changes} WHERE ordinal > %(num_seen)s::bigint"

# The whole of both tables once, whatever their sizes; the seq is looked at where the row is deleted.
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
    """Stage the keys that the source no longer has; return how many.

    `num_known` rows of the source are in the generation. If these are all of its rows, and none was deleted since,
    none has vanished, and nothing needs to be compared.
    """
    driver = driver_of(connection)
    driver.execute(stage.fill_in(FORGET_VANISHED), {"num_seen": num_seen})
    values = {"collection_id": stage.generation.collection_id, "seq": seq}
    if num_rows == num_known and driver.execute(IS_DELETED_SINCE, values).fetchone() is None:
        return 0
    driver.execute("SELECT set_config('work_mem', '64MB', true)")
    driver.execute(stage.fill_in("ANALYZE {seen}"))
    return _number(connection, stage, NOTE_VANISHED, {"num_seen": num_seen})


# One row for each text that is wanted and there, found in one pass over the generation, which has no index of texts:
# few runs have new rows and many do not. The results are copied out first, so that two rows may change places.
MAKE_MOVED: Final = """
    CREATE UNLOGGED TABLE {moved} WITH (autovacuum_enabled = off) AS
    WITH wanted AS (
        SELECT DISTINCT content_hash FROM {changes} WHERE kind IN ('n', 'c')
    ), donor AS MATERIALIZED (
        SELECT live.content_hash, min(live.key) AS key
          FROM {table} AS live JOIN wanted ON wanted.content_hash = live.content_hash
         GROUP BY live.content_hash
    )
    SELECT change.ordinal, change.key, change.content_hash, change.place, {live_results}
      FROM {changes} AS change
      JOIN donor ON donor.content_hash = change.content_hash
      JOIN {table} AS live ON live.key = donor.key
     WHERE change.kind IN ('n', 'c')
"""


def note_moved(connection: Connection, stage: RunTables) -> None:
    """Copy results of texts that the generation has under another key to the rows that need them."""
    if has_table(connection, stage.run_id, "moved"):
        return
    driver = driver_of(connection)
    driver.execute("SELECT set_config('work_mem', '64MB', true)")
    driver.execute(stage.fill_in(MAKE_MOVED))
    driver.execute(stage.fill_in("ALTER TABLE {moved} ADD PRIMARY KEY (ordinal)"))


LIST_MOVED: Final = """
    SELECT ordinal FROM {moved} WHERE ordinal > %(after)s::bigint ORDER BY ordinal LIMIT %(limit)s::bigint
"""

# Deletions of the collection are held meanwhile, so that no tombstone comes between: see tombstones.py.
WRITE_MOVED: Final = """
    INSERT INTO {table} AS live (key, content_hash, {results}, job_seq)
    SELECT moved.key, moved.content_hash, {moved_results}, moved.place
      FROM {moved} AS moved
     WHERE moved.ordinal = ANY(%(ordinals)s::bigint[])
       AND NOT EXISTS (SELECT 1 FROM vectormill.tombstones AS tombstone
                        WHERE tombstone.collection_id = %(collection_id)s::bigint AND tombstone.key = moved.key
                          AND tombstone.seq > moved.place)
       AND NOT EXISTS (SELECT 1 FROM {attributes} AS kept
                        WHERE kept.key = moved.key AND kept.job_seq > moved.place)
     ORDER BY moved.key
    ON CONFLICT (key) DO UPDATE
       SET content_hash = excluded.content_hash, {result_assignments}, job_seq = excluded.job_seq
     WHERE live.job_seq <= excluded.job_seq
"""

MARK_MOVED: Final = """
    WITH marked AS (
        UPDATE {changes} SET kind = 'moved' WHERE ordinal = ANY(%(ordinals)s::bigint[]) AND kind IN ('n', 'c')
        RETURNING 1
    )
    SELECT count(*) FROM marked
"""


def write_moved(
    connection: Connection, stage: RunTables, *, after: int, limit: int, keep_text: bool
) -> tuple[int, int | None]:
    """Write the copied results of the next rows behind a position; return how many, and the last one's position."""
    driver = driver_of(connection)
    with driver.cursor() as cursor:
        hold_deletions(cursor, stage.generation.id)
    rows = driver.execute(stage.fill_in(LIST_MOVED), {"after": after, "limit": limit}).fetchall()
    ordinals = [row[0] for row in rows]
    if not ordinals:
        return 0, None
    values = {"ordinals": ordinals, "collection_id": stage.generation.collection_id}
    driver.execute(LOOK_UP_BY_INDEX)
    driver.execute(stage.fill_in(WRITE_MOVED), values)
    _write_attributes(connection, stage, ordinals, keep_text=keep_text)
    return _number(connection, stage, MARK_MOVED, values), ordinals[-1]


LIST_METADATA_ONLY: Final = """
    SELECT ordinal FROM {changes}
     WHERE ordinal > %(after)s::bigint AND kind = 'm' ORDER BY ordinal LIMIT %(limit)s::bigint
"""


# An older job has given the row another text since it was compared: it is encoded with the others.
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
    """Give the next rows whose text is unchanged their metadata; return how many have another text by now.

    Those are to be encoded. The second number is that of texts which Postgres refused to keep, and the last value the
    position of the last row.

    No commit overlaps it: an older one would write its result beside these attributes.
    """
    driver = driver_of(connection)
    lock_deletions(connection, stage.generation.collection_id)
    rows = driver.execute(stage.fill_in(LIST_METADATA_ONLY), {"after": after, "limit": limit}).fetchall()
    ordinals = [row[0] for row in rows]
    if not ordinals:
        return 0, 0, None
    driver.execute(LOOK_UP_BY_INDEX)
    num_changed = _number(connection, stage, MARK_CHANGED, {"ordinals": ordinals})
    num_refused = _write_attributes(connection, stage, ordinals, keep_text=keep_text)
    return num_changed, num_refused, int(ordinals[-1])


# The row with the result is locked and not changed: the attributes alone have the later place. So they stay where the
# metadata is taken away: they tell an older job that it comes too late.
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

# Counts rows that the statement before has locked.
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

    A text that the full-text search cannot take (SQLSTATE 54000) is left out; its row keeps its vector and metadata.
    """
    driver = driver_of(connection)
    values = {"ordinals": list(ordinals), "keep_text": keep_text}
    driver.execute(LOOK_UP_BY_INDEX)
    try:
        with driver.transaction():
            driver.execute(stage.fill_in(WRITE_ATTRIBUTES), values)
    except psycopg.Error as error:
        if not keep_text or not blames_a_value(error):
            raise
        if len(ordinals) == 1:
            return 1 + _write_attributes(connection, stage, ordinals, keep_text=False)
        middle = len(ordinals) // 2
        halves = ordinals[:middle], ordinals[middle:]
        return sum(_write_attributes(connection, stage, half, keep_text=True) for half in halves)
    if not keep_text:
        driver.execute(stage.fill_in(CLEAR_ATTRIBUTES), values)
    return 0


LIST_VANISHED: Final = """
    SELECT ordinal, key FROM {changes}
     WHERE ordinal > %(after)s::bigint AND kind = 'v' ORDER BY ordinal LIMIT %(limit)s::bigint
"""


def list_vanished(
    connection: Connection, stage: RunTables, *, after: int, limit: int
) -> list[tuple[int, str]]:
    """List staged keys that the source no longer has, behind a position, each with its own."""
    values = {"after": after, "limit": limit}
    rows = driver_of(connection).execute(stage.fill_in(LIST_VANISHED), values).fetchall()
    return [(row[0], row[1]) for row in rows]


# A row that was carried failed in its own place: what is newer in the generation stays.
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
    """List items without a result behind a position in the job: position, key, and place among the writers."""
    rows = connection.execute(LIST_FAILED_KEYS, {"job_id": job_id, "after": after, "limit": limit})
    return [(row.item, row.key, row.place) for row in rows]


def _number(connection: Connection, stage: RunTables, statement: str, values: dict[str, Any]) -> int:
    row = driver_of(connection).execute(stage.fill_in(statement), values).fetchone()
    assert row is not None
    return int(row[0])
