"""Indexes of a generation: which there are, which are wanted, what became of their tables since.

How they are built: index_builds.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, text

from vectormill.collections.rows.attributes import attributes_name
from vectormill.collections.rows.generation_tables import table_name
from vectormill.db.parameters import to_jsonb

# A table so small is counted; of a larger one Postgres' estimate is near enough.
COUNTED_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class FoundIndex:
    """One index of a generation as the catalog has it; one that is not valid serves nobody.

    `is_ours` tells those that Vectormill made from those that somebody made by hand, which stay as they are.
    """

    name: str
    table: str
    method: str
    operator_class: str
    is_valid: bool
    is_ours: bool
    options: Mapping[str, int]
    num_bytes: int
    last_used_at: datetime | None

    @property
    def is_vector_index(self) -> bool:
        return self.method == "hnsw"


# indclass counts from 0, unlike an array.
LIST_INDEXES: Final = text("""
    SELECT class.relname AS name, home.relname AS table_name, method.amname AS method,
           operator_class.opcname AS operator_class, entry.indisvalid AND entry.indisready AS is_valid,
           coalesce(class.reloptions, '{}') AS options, pg_relation_size(class.oid) AS num_bytes,
           pg_stat_get_lastscan(class.oid) AS last_used_at
      FROM pg_index AS entry
      JOIN pg_class AS class ON class.oid = entry.indexrelid
      JOIN pg_class AS home ON home.oid = entry.indrelid
      JOIN pg_am AS method ON method.oid = class.relam
      JOIN pg_opclass AS operator_class ON operator_class.oid = entry.indclass[0]
     WHERE entry.indrelid IN (to_regclass(:vectors), to_regclass(:attributes)) AND NOT entry.indisprimary
     ORDER BY class.relname
""")


def find_indexes(connection: Connection, generation_id: int) -> list[FoundIndex]:
    """All but the primary keys, and that of passages' documents, which belongs to its table."""
    vectors, attributes = table_name(generation_id), attributes_name(generation_id)
    ours = (hnsw_prefix(generation_id), f"{attributes}_on_", f"{attributes}_search")
    rows = connection.execute(
        LIST_INDEXES, {"vectors": f"vectormill.{vectors}", "attributes": f"vectormill.{attributes}"}
    )
    return [
        FoundIndex(
            row.name,
            row.table_name,
            row.method,
            row.operator_class,
            row.is_valid,
            row.name.startswith(ours),
            {name: int(value) for name, value in (option.split("=", 1) for option in row.options)}
            if row.method == "hnsw"
            else {},
            row.num_bytes,
            row.last_used_at,
        )
        for row in rows
        if row.name != f"{attributes}_document"
    ]


def hnsw_prefix(generation_id: int) -> str:
    return f"{table_name(generation_id)}_hnsw_"


def name_next_hnsw(generation_id: int, found: list[FoundIndex]) -> str:
    """A name that is free: a new index is built while the one before it still serves."""
    taken = {index.name for index in found}
    names = (f"{hnsw_prefix(generation_id)}{number}" for number in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)


@dataclass(frozen=True, slots=True)
class KeptWishes:
    """The wishes of a collection's owner for the indexes of its generations, as they are kept."""

    policy: str
    options: Mapping[str, Any]
    filters: tuple[str, ...]
    keep_text: bool


FIND_WISHES: Final = text("""
    SELECT collections.index_policy, collections.index_options, collections.filters, collections.keep_text
      FROM vectormill.collections
      JOIN vectormill.generations ON generations.collection_id = collections.id
     WHERE generations.id = :generation_id
""")


def find_wishes(connection: Connection, generation_id: int) -> KeptWishes:
    row = connection.execute(FIND_WISHES, {"generation_id": generation_id}).one()
    return KeptWishes(row.index_policy, row.index_options, tuple(row.filters), row.keep_text)


SET_WISHES: Final = text("""
    UPDATE vectormill.collections
       SET index_policy = coalesce(:policy, index_policy),
           index_options = coalesce(CAST(:options AS jsonb), index_options),
           filters = coalesce(CAST(:filters AS jsonb), filters)
     WHERE name = :name
""")


def set_wishes(
    connection: Connection,
    collection: str,
    *,
    policy: str | None,
    options: Mapping[str, Any] | None,
    filters: list[str] | None,
) -> None:
    """Keeps what was asked for; None leaves it as it is."""
    values = {
        "name": collection,
        "policy": policy,
        "options": None if options is None else to_jsonb(dict(options)),
        "filters": None if filters is None else to_jsonb(filters),
    }
    connection.execute(SET_WISHES, values)


MEASURE_TABLE: Final = text("""
    SELECT pg_relation_size(to_regclass(:table)) AS num_bytes,
           pg_stat_get_tuples_deleted(to_regclass(:table)) + pg_stat_get_tuples_updated(to_regclass(:table))
               AS num_removed
""")


COUNT_ROWS: Final = "SELECT count(*) FROM vectormill.{table}"
ESTIMATE_ROWS: Final = "EXPLAIN (FORMAT JSON) SELECT 1 FROM vectormill.{table}"


def count_rows(connection: Connection, table: str) -> int:
    """Count the rows of a small table exactly; of a large one return the planner's estimate."""
    measured = connection.execute(MEASURE_TABLE, {"table": f"vectormill.{table}"}).one()
    if measured.num_bytes <= COUNTED_BYTES:
        return int(connection.execute(text(COUNT_ROWS.format(table=table))).scalar_one())
    (plan,) = connection.execute(text(ESTIMATE_ROWS.format(table=table))).scalar_one()
    return int(plan["Plan"]["Plan Rows"])


def count_removed(connection: Connection, table: str) -> int:
    """Row versions that were deleted or replaced in a table, since Postgres counts."""
    measured = connection.execute(MEASURE_TABLE, {"table": f"vectormill.{table}"}).one()
    return int(measured.num_removed or 0)


# Beside what others keep in the report.
RECORD_INDEX: Final = text("""
    UPDATE vectormill.generations
       SET report = report || jsonb_build_object('index', CAST(:index AS jsonb))
     WHERE id = :generation_id
""")


def record_index(connection: Connection, generation_id: int, index: Mapping[str, Any] | None) -> None:
    """Keeps with the generation what its index was built of; None when it has none any more."""
    connection.execute(RECORD_INDEX, {"generation_id": generation_id, "index": to_jsonb(index)})


FIND_RECORD: Final = text(
    "SELECT report -> 'index' AS record FROM vectormill.generations WHERE id = :generation_id"
)


def find_record(connection: Connection, generation_id: int) -> Mapping[str, Any]:
    """Return the record that record_index kept; empty when there is none."""
    return connection.execute(FIND_RECORD, {"generation_id": generation_id}).scalar_one_or_none() or {}


def share_removed(record: Mapping[str, Any], num_removed: int) -> float:
    """Rows that were deleted or replaced since the index was built, of those that it was built of; 0 when unknown.

    Postgres forgets its counts when it crashes; then counting begins anew.
    """
    since = num_removed - int(record.get("num_removed", num_removed))
    num_rows = int(record.get("num_rows", 0))
    return since / num_rows if num_rows and since > 0 else 0.0


COUNT_RECENTLY_USED: Final = text("""
    SELECT count(*)
      FROM pg_index AS entry
     WHERE entry.indrelid = to_regclass(:vectors) AND NOT entry.indisprimary
       AND pg_stat_get_lastscan(entry.indexrelid) > now() - make_interval(secs => CAST(:seconds AS double precision))
""")


def count_recently_used(connection: Connection, generation_id: int, seconds: float) -> int:
    """Vector indexes that a search used within so many seconds."""
    values = {"vectors": f"vectormill.{table_name(generation_id)}", "seconds": seconds}
    return int(connection.execute(COUNT_RECENTLY_USED, values).scalar_one())


def analyze_table(connection: Connection, table: str) -> None:
    """Lets the planner know what its columns, and the expressions of its indexes, look like."""
    connection.execute(text(f"ANALYZE vectormill.{table}"))
