"""A run copies a stored vector to a renamed row only if no later proof can find that the vector is faulty."""

import json
from typing import NamedTuple
from uuid import uuid4

import pytest
from sqlalchemy import Engine

from tests.building import encode_all, put
from tests.database import execute
from tests.protocol import SPEC, register_worker, submit, vector_of
from vectormill.collections.collections import find_generation
from vectormill.db.session import driver_of
from vectormill.jobs.item import Item
from vectormill.runs.differences import RunTables, make_stage, note_moved

JOB = "(SELECT id FROM vectormill.jobs ORDER BY seq LIMIT 1)"
# The chunks of the first job were computed in a period that began a minute ago.
COMPUTE = (
    "WITH period AS (INSERT INTO vectormill.proofs (worker, incarnation, model, began_at, failed_at) "
    "SELECT name, incarnation, model, now() - interval '1 minute', CAST(%s AS timestamptz) FROM vectormill.workers "
    f"RETURNING id) UPDATE vectormill.chunks SET proof_id = period.id FROM period WHERE job_id = {JOB}"
)


class Doubt(NamedTuple):
    """A statement after which the vectors of the first job are not vouched for, and one after which they are.

    `copied` are the rows that get a vector nevertheless.
    """

    what: str
    begin: str
    end: str
    copied: frozenset[str] = frozenset({"copy"})


DOUBTS = (
    Doubt(
        "its job goes on",
        f"UPDATE vectormill.jobs SET state = 'running', finished_at = NULL WHERE id = {JOB}",
        "UPDATE vectormill.jobs SET state = 'completed', finished_at = now()",
    ),
    Doubt(
        "a chunk of its job is suspect",
        f"UPDATE vectormill.chunks SET is_suspect = true WHERE job_id = {JOB}",
        "UPDATE vectormill.chunks SET is_suspect = NULL",
    ),
    Doubt(
        "its worker has yet to be proven",
        COMPUTE % "NULL",
        "UPDATE vectormill.proofs SET proven_at = now()",
    ),
    Doubt(
        "a retry has moved on from a period that has yet to be proven",
        COMPUTE % "NULL" + "; UPDATE vectormill.chunks SET earlier_proofs = ARRAY[proof_id], proof_id = NULL "
        "WHERE proof_id IS NOT NULL",
        "UPDATE vectormill.proofs SET proven_at = now()",
    ),
    Doubt(
        "its worker was killed before a proof",
        COMPUTE % "NULL",
        "DELETE FROM vectormill.workers",
    ),
    Doubt(
        "its worker was faulty",
        COMPUTE % "now()",
        "UPDATE vectormill.proofs SET repaired_at = now()",
    ),
    Doubt(
        "a job that carried rows in their own places goes on",
        f"UPDATE vectormill.jobs SET state = 'running', finished_at = NULL, place = 1000 WHERE id = {JOB}; "
        f"UPDATE vectormill.chunk_payloads SET places = '{{1}}' WHERE chunk_id IN "
        f"(SELECT id FROM vectormill.chunks WHERE job_id = {JOB})",
        "UPDATE vectormill.jobs SET state = 'completed', finished_at = now()",
        frozenset(),
    ),
)


def list_copied(engine: Engine, *wanted: Item) -> dict[str, str]:
    """Return the vectors that a run copies to these rows as Postgres writes them, by key."""
    with engine.begin() as connection:
        stage = RunTables(uuid4(), find_generation(connection, "docs"))
        make_stage(connection, stage)
        driver = driver_of(connection)
        insert = stage.fill_in(
            "INSERT INTO {changes} (ordinal, kind, key, content_hash) VALUES (%s, 'n', %s, %s)"
        )
        for ordinal, item in enumerate(wanted, 1):
            driver.execute(insert, (ordinal, item.key, item.content_hash()))
        note_moved(connection, stage, 1000)
        rows = driver.execute(stage.fill_in("SELECT key, embedding::text FROM {moved}")).fetchall()
    return dict(rows)


@pytest.mark.parametrize("doubt", DOUBTS, ids=lambda doubt: doubt.what)
def test_a_vector_is_copied_only_if_it_is_vouched_for(engine: Engine, doubt: Doubt) -> None:
    register_worker(engine)
    put(engine, "old", content="same")
    put(engine, "other")
    encode_all(engine)
    renamed, copy = Item("renamed", b"same old"), Item("copy", b"text other")
    execute(engine, doubt.begin)
    assert set(list_copied(engine, renamed, copy)) == doubt.copied
    execute(engine, doubt.end)
    assert set(list_copied(engine, renamed, copy)) == {"renamed", "copy"}


def test_of_rows_with_one_text_one_that_is_vouched_for_is_copied(engine: Engine) -> None:
    for key in ("a", "b"):
        submit(engine, [Item(key, b"same")], collection="docs")
    encode_all(engine)
    table = execute(engine, "SELECT 'generation_' || max(id) FROM vectormill.generations").scalar_one()
    zeros = str([0.0] * SPEC.dimensions)
    execute(engine, f"UPDATE vectormill.{table} SET embedding = '{zeros}' WHERE key = 'a'")
    execute(engine, DOUBTS[0].begin)
    copied = list_copied(engine, Item("renamed", b"same"))
    assert json.loads(copied["renamed"]) == pytest.approx(vector_of(b"same").tolist(), abs=1e-3)
