"""SIGKILL of the indexer in each phase of a run, with real workers: what follows ends as if nothing had happened."""

import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import psycopg
import pytest

from tests.acceptance import tiny
from tests.acceptance.parts import Parts, frozen
from tests.waiting import wait_for
from vectormill.client import Client

NUM_ROWS = 300
# Of the rows of the table, by number: a tenth at the most of each.
CHANGED = range(10, 30)
RETOLD = range(30, 40)  # other metadata
VANISHED = range(40, 50)
RENAMED = range(50, 60)
NEW = range(NUM_ROWS, NUM_ROWS + 40)


def fill(parts: Parts, table: str) -> None:
    url = parts.database_url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(url, autocommit=True) as connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE TABLE {table} (key text PRIMARY KEY, text text, page int)".encode())
        rows = [(f"k{number}", tiny.texts()[number], 1) for number in range(NUM_ROWS)]
        cursor.executemany(f"INSERT INTO {table} VALUES (%s, %s, %s)".encode(), rows)


def change(parts: Parts, table: str) -> None:
    url = parts.database_url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        for number in CHANGED:
            cursor.execute(
                f"UPDATE {table} SET text = %s WHERE key = %s".encode(),
                (tiny.texts()[1000 + number], f"k{number}"),
            )
        for number in RETOLD:
            cursor.execute(f"UPDATE {table} SET page = 2 WHERE key = %s".encode(), (f"k{number}",))
        for number in VANISHED:
            cursor.execute(f"DELETE FROM {table} WHERE key = %s".encode(), (f"k{number}",))
        for number in RENAMED:
            cursor.execute(
                f"UPDATE {table} SET key = 'renamed-' || key WHERE key = %s".encode(), (f"k{number}",)
            )
        rows = [(f"k{number}", tiny.texts()[number], 3) for number in NEW]
        cursor.executemany(f"INSERT INTO {table} VALUES (%s, %s, %s)".encode(), rows)


@contextmanager
def held(parts: Parts, statement: str) -> Iterator[None]:
    """What the statement locks stays so while the block runs."""
    url = parts.database_url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(url) as connection:
        connection.execute(statement.encode())
        yield
        connection.rollback()


@pytest.mark.slow  # a real model, and four leases that end
@pytest.mark.timeout(600)
def test_an_indexer_killed_in_each_phase_is_followed_by_another_which_encodes_nothing_twice(
    parts: Parts, collection: str
) -> None:
    table = f"source_of_{collection}"
    fill(parts, table)
    parts.start("indexer", "indexer")
    try:
        with parts.client() as client:
            client.create_collection(collection, model=tiny.MODEL)
            client.set_source(collection, "sql", {"query": f"SELECT * FROM {table}", "metadata": ["page"]})
            first = client.wait_run(client.reindex(collection)["id"])
            assert (first["state"], first["counts"]["num_new"]) == ("completed", NUM_ROWS)
            change(parts, table)
            (generation,) = parts.query(
                "SELECT 'generation_' || generations.id FROM vectormill.generations"
                " JOIN vectormill.collections ON collections.id = collection_id"
                f" WHERE name = '{collection}' AND state = 'live'"
            )
            run = kill_in_each_phase(parts, client, collection, table, str(generation[0]))
    finally:
        if "indexer" in parts.processes:
            parts.end_part("indexer")
    assert (run["state"], run["error"]) == ("completed", None)
    counts = {name: number for name, number in run["counts"].items() if number}
    assert counts == {
        "num_seen": NUM_ROWS - len(VANISHED) + len(NEW),
        "num_unchanged": NUM_ROWS - len(CHANGED) - len(RETOLD) - len(VANISHED) - len(RENAMED),
        "num_metadata_only": len(RETOLD),
        "num_new": len(NEW) + len(RENAMED),
        "num_changed": len(CHANGED),
        "num_moved": len(RENAMED),
        "num_deleted": len(VANISHED) + len(RENAMED),
    }
    check(parts, collection, table, run["id"])


def kill_in_each_phase(
    parts: Parts, client: Client, collection: str, table: str, generation: str
) -> Mapping[str, Any]:
    """The run's end. What each phase needs is held back until its indexer has died in it."""
    first_moved, first_vanished = f"renamed-k{RENAMED[0]}", f"k{VANISHED[0]}"
    moved = f"INSERT INTO vectormill.{generation} SELECT '{first_moved}', content_hash, embedding, 0"
    with ExitStack() as stack:
        holds = {
            "reading": stack.enter_context(ExitStack()),
            "comparing": stack.enter_context(ExitStack()),
            "encoding": stack.enter_context(ExitStack()),
            "deleting": stack.enter_context(ExitStack()),
        }
        holds["reading"].enter_context(held(parts, f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"))
        holds["comparing"].enter_context(held(parts, f"{moved} FROM vectormill.{generation} LIMIT 1"))
        row = f"SELECT 1 FROM vectormill.{generation} WHERE key = '{first_vanished}' FOR UPDATE"
        holds["deleting"].enter_context(held(parts, row))
        run_id = client.reindex(collection)["id"]
        for phase, hold in holds.items():
            wait_for(lambda phase=phase: client.run(run_id)["phase"] == phase, 60, f"the run is {phase}")  # type: ignore[misc]
            parts.end_part("indexer", signal.SIGKILL)
            if phase == "comparing":
                holds["encoding"].enter_context(frozen(parts.workers()))
            hold.close()
            parts.start("indexer", "indexer")
        return client.wait_run(run_id, timeout_seconds=120)


def check(parts: Parts, collection: str, table: str, run_id: str) -> None:
    differing = (
        f"SELECT count(*) FROM {table} AS wanted FULL JOIN {collection} AS found USING (key)"
        " WHERE found.key IS NULL OR wanted.key IS NULL OR CAST(metadata ->> 'page' AS int) <> page"
    )
    assert list(parts.query(differing)) == [(0,)]
    encoded = (
        "SELECT sum(num_done), sum(num_failed) FROM vectormill.jobs"
        f" WHERE metadata ->> 'run' = '{run_id}' AND state <> 'deleting'"
    )
    assert list(parts.query(encoded)) == [(len(CHANGED) + len(NEW), 0)]
    found = list(parts.query(f"SELECT key, embedding::text FROM {collection} ORDER BY key"))
    numbers = []
    for key, _ in found:
        number = int(str(key).rpartition("k")[2])
        numbers.append(1000 + number if number in CHANGED else number)
    vectors = np.array([[float(value) for value in str(text)[1:-1].split(",")] for _, text in found])
    assert tiny.wrong_vectors(parts.directory, numbers, vectors) == []
