"""Coverage: check that a new generation has every row it should have, and list rows that could not be encoded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, text

from vectormill.collections.collection import Generation
from vectormill.collections.generation_tables import table_name
from vectormill.jobs.item import (
    EMPTY_TEXT,
    LONE_SURROGATE,
    NUL_CHARACTER,
    TEXT_TOO_LONG,
    TOO_MANY_TOKENS,
)
from vectormill.jobs.job import FINISHED_JOB_STATES, RECEIVED_JOB_STATES

MOST_NAMED_KEYS: Final = 20
# No model can encode a text with one of these errors.
OWN_FAULTS: Final = (EMPTY_TEXT, LONE_SURROGATE, NUL_CHARACTER, TEXT_TOO_LONG, TOO_MANY_TOKENS)

# A key that a client deleted since the run began to read does not count as missing, nor does a key with an item error.
_IS_MISSING: Final = """
      FROM {wanted} AS wanted
     WHERE {condition}
       AND NOT EXISTS (SELECT 1 FROM vectormill.{table} AS written WHERE written.key = wanted.key)
       AND NOT EXISTS (
           SELECT 1 FROM vectormill.tombstones
            WHERE tombstones.collection_id = :collection_id AND tombstones.key = wanted.key AND tombstones.seq > :seq)
       AND NOT EXISTS (
           SELECT 1 FROM vectormill.item_errors
            WHERE item_errors.job_id = ANY(CAST(:job_ids AS uuid[])) AND item_errors.key = wanted.key)
"""

COUNT_MISSING: Final = f"SELECT count(*) {_IS_MISSING}"

LIST_MISSING: Final = f"SELECT wanted.key {_IS_MISSING} ORDER BY wanted.key LIMIT :limit"

# The jobs that wrote a generation and have item errors.
LIST_WRITERS = text("""
    SELECT id FROM vectormill.jobs
     WHERE generation_id = :generation_id AND num_failed > 0 AND state <> 'deleting' ORDER BY seq
""")

COUNT_FAILED = text("""
    SELECT count(*) AS num_failed,
           count(*) FILTER (WHERE code <> ALL(CAST(:own_faults AS text[]))) AS num_unexpected
      FROM vectormill.item_errors WHERE job_id = ANY(CAST(:job_ids AS uuid[]))
""")

LIST_FAILED = text("""
    SELECT key, code FROM vectormill.item_errors
     WHERE job_id = ANY(CAST(:job_ids AS uuid[]))
     ORDER BY code = ANY(CAST(:own_faults AS text[])), key LIMIT :limit
""")

# Jobs that are being cancelled count too: no job of the run itself may still be at work when its rows are counted.
COUNT_OPEN_JOBS = text(f"""
    SELECT count(*) FROM vectormill.jobs
     WHERE generation_id = :generation_id AND twin_of IS NULL
       AND state IN {RECEIVED_JOB_STATES}
""")


# This condition holds for a row that clients wrote since the run began. Such a row needs to be there only if its twin
# job has finished: not while the twin is open, nor if it was cancelled.
HAS_BEEN_PUT: Final = f"""
    wanted.job_seq > :seq
       AND NOT EXISTS (
           SELECT 1 FROM vectormill.jobs AS twin
            WHERE twin.generation_id = :generation_id AND coalesce(twin.place, twin.seq) = wanted.job_seq
              AND twin.state NOT IN {FINISHED_JOB_STATES})
"""


@dataclass(frozen=True, slots=True)
class MissingRows:
    """The number of rows that a generation lacks; `keys` are the first of them."""

    number: int
    keys: list[str]


@dataclass(frozen=True, slots=True)
class Failures:
    """Item errors of the jobs that wrote a generation; `num_unexpected` are those not caused by the text itself.

    `items` are the first errors as (key, code), the unexpected ones before the others.
    """

    number: int
    num_unexpected: int
    items: list[tuple[str, str]]


def count_failures(connection: Connection, job_ids: Sequence[UUID]) -> Failures:
    values = {"job_ids": list(job_ids), "own_faults": list(OWN_FAULTS), "limit": MOST_NAMED_KEYS}
    row = connection.execute(COUNT_FAILED, values).one()
    items = [(each.key, each.code) for each in connection.execute(LIST_FAILED, values)]
    return Failures(row.num_failed, row.num_unexpected, items)


def count_open_jobs(connection: Connection, generation_id: int) -> int:
    """Count the open jobs that write the generation, without twins."""
    number: int = connection.execute(COUNT_OPEN_JOBS, {"generation_id": generation_id}).scalar_one()
    return number


def find_missing(
    connection: Connection,
    building: Generation,
    wanted: str,
    seq: int,
    job_ids: Sequence[UUID],
    condition: str = "true",
) -> MissingRows:
    """Return the rows of the table `wanted` that fulfil the SQL `condition` and that the generation lacks.

    `seq` is the sequence number of the run; `job_ids` are jobs whose item errors excuse a missing key.
    """
    names = {"wanted": f"vectormill.{wanted}", "condition": condition, "table": table_name(building.id)}
    values: dict[str, Any] = {
        "collection_id": building.collection_id,
        "generation_id": building.id,
        "seq": seq,
        "job_ids": list(job_ids),
    }
    number = connection.execute(text(COUNT_MISSING.format(**names)), values).scalar_one()
    if not number:
        return MissingRows(0, [])
    values["limit"] = MOST_NAMED_KEYS
    return MissingRows(number, list(connection.execute(text(LIST_MISSING.format(**names)), values).scalars()))


HAS_TABLE = text("SELECT to_regclass('vectormill.' || quote_ident(:name)) IS NOT NULL")

HAS_ROWS: Final = "SELECT EXISTS (SELECT 1 FROM vectormill.{table})"


def has_rows(connection: Connection, name: str) -> bool:
    """Return True if the table exists and has rows. A crash of Postgres empties an unlogged table."""
    if not connection.execute(HAS_TABLE, {"name": name}).scalar_one():
        return False
    return bool(connection.execute(text(HAS_ROWS.format(table=name))).scalar_one())
