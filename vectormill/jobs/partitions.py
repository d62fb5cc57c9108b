"""Partitions of the tables that hold texts and results of chunks: made ahead, and dropped when nobody needs them.

A span of chunk ids has one partition of each table. The scheduler makes spans ahead of the ids; if it was away for too
long, rows go to the default partitions, which it then turns into a span. A span is dropped when all its ids have been
drawn and none of its chunks is left. The ids of deleted chunks whose span stays are noted by a trigger in
`removed_chunks`, and their rows are deleted singly when they are due.

Writers know nothing of this. Who reads a chunk by a join calls `payload_of` or `vectors_of`, so that Postgres opens the
partition of that chunk only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Final, TypeVar

from sqlalchemy import Connection, Engine, text

from vectormill.db.locks import act_in_short_locks, limit_lock_wait

T = TypeVar("T")

TABLES: Final = ("chunk_payloads", "chunk_vectors", "chunk_truncations")
QUALIFIED: Final = [f"vectormill.{table}" for table in TABLES]
# The ids of a span: a job of a million chunks has six spans of its own. If chunks are large, a span has so many as take
# this many bytes on average. Ends are multiples of STEP ids apart.
SPAN: Final = 1 << 17
SPAN_BYTES: Final = 4 << 30
STEP: Final = 1 << 12
# So many spans are there ahead of the ids: minutes for a thousand workers, weeks for one.
AHEAD: Final = 3
# A span has at least this share of all ids, so that there are less than a hundred, however many chunks there are.
SHARE: Final = 16
# The ids that may be drawn while the default partitions are being closed: more than an hour for a thousand workers.
MARGIN: Final = 1 << 22
# Claims and commits wait this long for a lock at most. It is not 300 ms as elsewhere because there are three tables.
LOCK_MILLISECONDS: Final = 100


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """A range of chunk ids, `start` included and `end` not, with a partition of each table."""

    start: int
    end: int

    def name(self, table: str) -> str:
        """Return the name of the partition of this table."""
        return f"vectormill.{table}_to_{self.end}"


LIST_SPANS = text("""
    SELECT coalesce(CAST(substring(bounds FROM 'FROM [(].([0-9]+)') AS bigint), 0) AS start,
           CAST(substring(bounds FROM 'TO [(].([0-9]+)') AS bigint) AS "end"
      FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid,
           LATERAL pg_get_expr(relpartbound, pg_class.oid) AS bounds
     WHERE inhparent = CAST('vectormill.chunk_payloads' AS regclass) AND bounds <> 'DEFAULT'
     ORDER BY 2
""")

FIND_LAST_ID = text("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM vectormill.chunks_id_seq")

FIND_SIZE = text("""
    SELECT CAST(sum(pg_total_relation_size(relid)) AS bigint)
      FROM unnest(CAST(:tables AS regclass[])) AS parent, pg_partition_tree(parent)
""")

# With EXISTS the planner may read the whole table, because it expects one of the chunks soon.
IS_NEEDED = text("""
    SELECT (SELECT id FROM vectormill.chunks WHERE id >= :start AND id < :end ORDER BY id LIMIT 1) IS NOT NULL
""")

# The constraint is there if a scheduler was killed while it closed the default partitions. It would refuse chunks one
# day.
IS_DEFAULT_USED = text("""
    SELECT EXISTS (SELECT FROM pg_constraint WHERE conname = 'closing'
                      AND connamespace = CAST('vectormill' AS regnamespace))
           OR EXISTS (SELECT FROM vectormill.chunk_payloads_default)
           OR EXISTS (SELECT FROM vectormill.chunk_vectors_default)
           OR EXISTS (SELECT FROM vectormill.chunk_truncations_default)
""")


def plan_end(spans: Sequence[ChunkSpan], last_id: int, num_bytes: int) -> int | None:
    """Return the end of the next span to make; None if there are enough ahead of `last_id`.

    `num_bytes` is the size of all spans.
    """
    num_kept = last_id - spans[0].start + 1
    chunk_bytes = num_bytes // max(num_kept, STEP) + 1
    num_ids = max(min(SPAN, SPAN_BYTES // chunk_bytes), num_kept // SHARE, STEP) // STEP * STEP
    return spans[-1].end + num_ids if spans[-1].end <= last_id + AHEAD * num_ids else None


def list_spans(connection: Connection) -> list[ChunkSpan]:
    """Return all spans, the oldest first."""
    return [ChunkSpan(row.start, row.end) for row in connection.execute(LIST_SPANS)]


def keep_partitions(engine: Engine) -> int:
    """Make spans ahead and drop those that nobody needs. Return the number of dropped ones.

    Raise LocksHeld if somebody holds a lock that is needed, such as a dump; a later call goes on.
    """
    with engine.connect() as connection:
        is_default_used = connection.execute(IS_DEFAULT_USED).scalar_one()
        spans, last_id = list_spans(connection), connection.execute(FIND_LAST_ID).scalar_one()
        num_bytes = connection.execute(FIND_SIZE, {"tables": QUALIFIED}).scalar_one()
    if is_default_used:
        spans.append(_close_default(engine, spans[-1].end, last_id))
    while (end := plan_end(spans, last_id, num_bytes)) is not None:
        spans.append(ChunkSpan(spans[-1].end, end))
        _act(engine, partial(_make, span=spans[-1]))
    num_dropped = 0
    for span in spans:
        with engine.connect() as connection:
            is_needed = span.end > last_id + 1 or _is_needed(connection, span)
        if not is_needed and _act(engine, partial(_drop, span=span)):
            num_dropped += 1
            with engine.begin() as connection:
                connection.execute(FORGET_REMOVED, {"start": span.start, "end": span.end})
    return num_dropped


FORGET_REMOVED = text("""
    DELETE FROM vectormill.removed_chunks
     WHERE chunk_ids[1] >= :start AND chunk_ids[cardinality(chunk_ids)] < :end
""")


def _act(engine: Engine, act: Callable[[Connection], T]) -> T:
    def act_soon(connection: Connection) -> T:
        limit_lock_wait(connection, LOCK_MILLISECONDS)
        return act(connection)

    return act_in_short_locks(engine, act_soon, patience_seconds=0)


# Attaching a table lets others read and write meanwhile, which `CREATE TABLE … PARTITION OF` does not.
MAKE_PARTITION: Final = """
    CREATE TABLE {name} (LIKE vectormill.{table} INCLUDING ALL);
    ALTER TABLE vectormill.{table} ATTACH PARTITION {name} FOR VALUES FROM ({start}) TO ({end})
"""


def _make(connection: Connection, span: ChunkSpan) -> None:
    for table in TABLES:
        _fill_in(connection, MAKE_PARTITION, table, span)


def _fill_in(connection: Connection, statements: str, table: str, span: ChunkSpan) -> None:
    connection.exec_driver_sql(
        statements.format(table=table, name=span.name(table), start=span.start, end=span.end)
    )


LOCK_TABLES = text(f"LOCK TABLE {', '.join(QUALIFIED)} IN ACCESS EXCLUSIVE MODE")


def _is_needed(connection: Connection, span: ChunkSpan) -> bool:
    return bool(connection.execute(IS_NEEDED, {"start": span.start, "end": span.end}).scalar_one())


# A transaction that has drawn ids and not ended holds a lock on the payloads, since it writes both in one statement. So
# under the lock every chunk of the span is seen.
def _drop(connection: Connection, span: ChunkSpan) -> bool:
    connection.execute(LOCK_TABLES)
    if _is_needed(connection, span):
        return False
    connection.exec_driver_sql(f"DROP TABLE {', '.join(map(span.name, TABLES))}")
    return True


# The rows are read while others read and write; with this constraint attaching the table reads none.
BOUND_DEFAULT: Final = """
    ALTER TABLE vectormill.{table}_default DROP CONSTRAINT IF EXISTS closing,
        ADD CONSTRAINT closing CHECK (chunk_id >= {start} AND chunk_id < {end}) NOT VALID
"""
CHECK_DEFAULT: Final = "ALTER TABLE vectormill.{table}_default VALIDATE CONSTRAINT closing"
CLOSE_DEFAULT: Final = """
    ALTER TABLE vectormill.{table} DETACH PARTITION vectormill.{table}_default;
    ALTER TABLE vectormill.{table}_default RENAME TO {table}_to_{end};
    ALTER TABLE vectormill.{table} ATTACH PARTITION {name} FOR VALUES FROM ({start}) TO ({end});
    ALTER TABLE {name} DROP CONSTRAINT closing;
    CREATE TABLE vectormill.{table}_default PARTITION OF vectormill.{table} DEFAULT
"""


def _close_default(engine: Engine, start: int, last_id: int) -> ChunkSpan:
    """Turn the default partitions into a span from `start` on, and make new ones. No row is moved."""
    span = ChunkSpan(start, (max(last_id, start) + MARGIN) // STEP * STEP)
    for table in TABLES:
        _act(engine, partial(_fill_in, statements=BOUND_DEFAULT, table=table, span=span))
        with engine.begin() as connection:
            _fill_in(connection, CHECK_DEFAULT, table, span)
    _act(engine, partial(_close, span=span))
    return span


def _close(connection: Connection, span: ChunkSpan) -> None:
    connection.execute(LOCK_TABLES)
    for table in TABLES:
        _fill_in(connection, CLOSE_DEFAULT, table, span)


TAKE_REMOVED = text("""
    DELETE FROM vectormill.removed_chunks WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM vectormill.removed_chunks WHERE due_at <= now()
         ORDER BY due_at LIMIT :limit FOR UPDATE SKIP LOCKED))
    RETURNING chunk_ids
""")

DELETE_CONTENTS: Final = "DELETE FROM {table} WHERE chunk_id = ANY(CAST(:chunk_ids AS bigint[]))"


def delete_removed(connection: Connection, limit: int) -> int:
    """Delete the texts and results of deleted chunks that are due, at most 100 * `limit` chunks.

    Return the number of rows of `removed_chunks` that are done.
    """
    rows = connection.execute(TAKE_REMOVED, {"limit": limit}).scalars().all()
    if rows:
        for table in QUALIFIED:
            chunk_ids = {"chunk_ids": list(chain.from_iterable(rows))}
            connection.execute(text(DELETE_CONTENTS.format(table=table)), chunk_ids)
    return len(rows)


BULKY: Final = {"chunk_payloads": "items", "chunk_vectors": "vectors"}
MEASURE = text("SELECT pg_table_size(CAST(:name AS regclass))")
IS_SPARSE: Final = """
    SELECT count(*) <= {most_rows} AND coalesce(sum(pg_column_size({column})), 0) * 4 < {num_bytes}
      FROM (SELECT {column} FROM {name} LIMIT {most_rows} + 1) AS kept
"""


def shrink_partitions(engine: Engine, least_bytes: int = 64 << 20, most_rows: int = 1_000) -> int:
    """Rewrite partitions of ended spans that are larger than their few rows need. Return their number.

    Nobody writes new rows into them, so the space of deleted ones would be used by nobody. Who needs one of these
    rows waits until they are rewritten, a second or two; a partition that somebody has locked is left for later.
    """
    num_shrunk = 0
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        last_id = connection.execute(FIND_LAST_ID).scalar_one()
        ended = [span for span in list_spans(connection) if span.end <= last_id + 1]
        for span, (table, column) in product(ended, BULKY.items()):
            name = span.name(table)
            num_bytes = connection.execute(MEASURE, {"name": name}).scalar_one()
            is_sparse = IS_SPARSE.format(name=name, column=column, most_rows=most_rows, num_bytes=num_bytes)
            if num_bytes > least_bytes and connection.exec_driver_sql(is_sparse).scalar_one():
                connection.exec_driver_sql(f"VACUUM (FULL, SKIP_LOCKED) {name}")
                num_shrunk += 1
    return num_shrunk
