"""Stages: what a run has read of its source, in two unlogged tables of its own, and how it differs from a generation.

`seen` has the key of every row, for what vanished. `changes` has the rows that are not as in the generation, by their
position in the source, and behind them the keys that vanished. A crash of Postgres empties unlogged tables: a row that
is always there tells, and whoever reads the stage looks for it in the same transaction.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg import sql
from sqlalchemy import Connection

from vectormill.collections.collection import Generation
from vectormill.collections.kinds import choose_kind
from vectormill.collections.rows.attributes import attributes_name
from vectormill.collections.rows.generation_tables import assign_columns
from vectormill.domain.errors import RunError
from vectormill.jobs.item import Item
from vectormill.jobs.pair import PAIR_MARK

NEW: Final = "n"
CHANGED: Final = "c"
METADATA_ONLY: Final = "m"
VANISHED: Final = "v"

Driver = psycopg.Connection[Any]


class StageLost(RunError):
    """Postgres was restarted after a crash and what the run had read is gone; it reads again."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch of a source, with what is compared. `first` is the position of its first row, from 1."""

    first: int
    items: Sequence[Item]
    keys: Sequence[str]
    content_hashes: Sequence[bytes]
    metadata_hashes: Sequence[bytes | None]
    places: Sequence[int | None]


def pack_rows(first: int, items: Sequence[Item]) -> Rows:
    """Hash the items of a batch, in the thread that reads: the hashes are most of what a row costs."""
    return Rows(
        first,
        items,
        [item.key for item in items],
        [item.content_hash() for item in items],
        [item.metadata_hash() for item in items],
        [item.place for item in items],
    )


@dataclass(frozen=True, slots=True)
class RunTables:
    """The tables of one run beside one generation."""

    run_id: UUID
    generation: Generation

    def names(self) -> dict[str, sql.Composable]:
        prefix = stage_prefix(self.run_id)
        return {
            "seen": sql.Identifier("vectormill", f"{prefix}seen"),
            "changes": sql.Identifier("vectormill", f"{prefix}changes"),
            "moved": sql.Identifier("vectormill", f"{prefix}moved"),
            "table": sql.Identifier("vectormill", self.generation.table_name),
            "attributes": sql.Identifier("vectormill", attributes_name(self.generation.id)),
            **self._name_columns(),
        }

    def _name_columns(self) -> dict[str, sql.Composable]:
        """Return the columns of the generation's kind: of results, in three tables, and of kept texts."""
        kind, spec = choose_kind(self.generation.spec), self.generation.spec
        results = [column.name for column in kind.columns(spec)]
        comma = sql.SQL(", ")
        return {
            "results": comma.join(map(sql.Identifier, results)),
            "live_results": comma.join(sql.Identifier("live", name) for name in results),
            "moved_results": comma.join(sql.Identifier("moved", name) for name in results),
            "result_assignments": assign_columns(spec),
            "texts": comma.join(map(sql.Identifier, kind.text_columns)),
            "text_values": comma.join(sql.SQL(TEXT_VALUES[name]) for name in kind.text_columns),
            "text_assignments": comma.join(
                sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in kind.text_columns
            ),
            "mark": sql.Literal(PAIR_MARK),
        }

    def fill_in(self, statement: str) -> sql.Composed:
        return sql.SQL(statement).format(**self.names())


# Made of a staged text and the place of a pair's mark in it: what is kept in each column of texts.
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


def driver_of(connection: Connection) -> Driver:
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    return driver


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

# Tells a stage from one that a crash of Postgres has emptied.
MARK_STAGE: Final = "INSERT INTO {changes} (ordinal, kind, key) VALUES (0, 'marker', '')"

IS_MARKED: Final = "SELECT 1 FROM {changes} WHERE ordinal = 0"


def make_stage(connection: Connection, stage: RunTables) -> None:
    """Make an empty stage, in place of one that is there."""
    driver = driver_of(connection)
    drop_stage(connection, stage.run_id)
    for statement in (MAKE_SEEN, MAKE_CHANGES, MARK_STAGE):
        driver.execute(stage.fill_in(statement))


def drop_stage(connection: Connection, run_id: UUID) -> None:
    driver = driver_of(connection)
    for name in ("seen", "changes", "moved"):
        table = sql.Identifier("vectormill", stage_prefix(run_id) + name)
        driver.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(table))


def has_table(connection: Connection, run_id: UUID, name: str) -> bool:
    table = f"vectormill.{stage_prefix(run_id)}{name}"
    row = driver_of(connection).execute("SELECT to_regclass(%s) IS NOT NULL", (table,)).fetchone()
    return row is not None and bool(row[0])


def require_stage(connection: Connection, stage: RunTables) -> None:
    """Raise StageLost if the stage is gone. Call it in the transaction that reads, or a crash may come between."""
    if not has_table(connection, stage.run_id, "changes"):
        raise StageLost
    if driver_of(connection).execute(stage.fill_in(IS_MARKED)).fetchone() is None:
        raise StageLost


LIST_LEFT_STAGES: Final = """
    SELECT class.relname
      FROM pg_class AS class
      JOIN pg_namespace AS namespace ON namespace.oid = class.relnamespace AND namespace.nspname = 'vectormill'
      LEFT JOIN vectormill.runs AS run ON replace(CAST(run.id AS text), '-', '') = substr(class.relname, 5, 32)
     WHERE class.relkind = 'r' AND class.relname ~ '^run_[0-9a-f]{{32}}_'
       AND (run.id IS NULL OR run.finished_at IS NOT NULL)
"""


def drop_left_stages(connection: Connection) -> int:
    """Remove the stages of runs that have ended; return how many tables."""
    driver = driver_of(connection)
    names = [row[0] for row in driver.execute(LIST_LEFT_STAGES.replace("{{", "{").replace("}}", "}"))]
    for name in names:
        driver.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier("vectormill", name)))
    return len(names)


# A batch is looked up row by row: its keys are few beside those of the generation, which is not to be read whole for
# each of them. The planner may believe otherwise of a small one.
LOOK_UP_BY_INDEX: Final = """
    SELECT set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true),
           set_config('enable_seqscan', 'off', true)
"""

# Rows that a crash of Postgres would lose are read again anyway.
COMMIT_AT_ONCE: Final = "SELECT set_config('synchronous_commit', 'off', true)"

# Most rows are unchanged, and one look-up tells: that of the attributes, where they exist, else that of the vector's
# row. What was written in a later place is newer than the source: as if it were unchanged. An equal row that is
# carried from a later place raises that of the attributes.
COMPARE_BATCH: Final = """
    WITH item AS MATERIALIZED (
        SELECT key, content_hash, metadata_hash, coalesce(own_place, %(seq)s::bigint) AS place,
               own_place IS NOT NULL AS is_carried, position
          FROM unnest(%(keys)b::text[], %(content_hashes)b::bytea[], %(metadata_hashes)b::bytea[], %(places)b::bigint[])
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
    """Stage a batch, and what of it differs from the generation; return how many rows by kind."""
    driver = driver_of(connection)
    driver.execute(LOOK_UP_BY_INDEX)
    driver.execute(COMMIT_AT_ONCE)
    values = {
        "keys": rows.keys,
        "content_hashes": rows.content_hashes,
        "metadata_hashes": rows.metadata_hashes,
        "places": rows.places,
        "seq": seq,
        "keep_text": keep_text,
    }
    found = driver.execute(stage.fill_in(COMPARE_BATCH), values).fetchall()
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
                        rows.metadata_hashes[position],
                        seq if item.place is None else item.place,
                    )
                )
    return counts


LOAD_CHANGES: Final = """
    SELECT ordinal, key, text, metadata, nullif(place, %(seq)s::bigint) FROM {changes}
     WHERE ordinal > %(after)s::bigint AND kind = ANY(%(kinds)s::text[])
     ORDER BY ordinal LIMIT %(limit)s::bigint
"""


def load_changes(
    connection: Connection, stage: RunTables, seq: int, *, kinds: Sequence[str], after: int, limit: int
) -> list[tuple[int, Item]]:
    """Load rows behind a position that are to be encoded, each with its own. `seq` is the place of the run."""
    values = {"seq": seq, "after": after, "kinds": list(kinds), "limit": limit}
    rows: Iterator[Any] = driver_of(connection).execute(stage.fill_in(LOAD_CHANGES), values, binary=True)
    return [(row[0], Item(row[1], row[2], row[3], row[4])) for row in rows]
