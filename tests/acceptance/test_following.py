"""A user's own table, followed on real processes: what is committed there is found within seconds, whoever dies."""

import signal

import pytest

from tests.acceptance import tiny
from tests.acceptance.parts import Parts
from tests.waiting import wait_for

pytestmark = pytest.mark.tail

# A round a second, a job, and a busy machine.
SECONDS = 60


def keys_of(parts: Parts, collection: str) -> set[object]:
    return {key for (key,) in parts.query(f"SELECT key FROM {collection}")}


def test_what_is_committed_in_a_followed_table_is_found_and_what_is_deleted_is_not(
    parts: Parts, collection: str
) -> None:
    table = f"public.{collection}_papers"
    parts.change(f"CREATE TABLE {table} (id text PRIMARY KEY, body text)")
    parts.start("indexer", "indexer")
    try:
        with parts.client() as client:
            client.wait(
                client.submit(tiny.items([0]), model=tiny.MODEL, collection=collection)["id"],
                timeout_seconds=240,
            )
            client.set_source(
                collection, "sql", {"query": f"SELECT id, body FROM {table}", "key": "id", "text": "body"}
            )
            client.follow(collection)
            parts.change(f"INSERT INTO {table} VALUES ('a', '{tiny.texts()[1]}'), ('b', '{tiny.texts()[2]}')")
            wait_for(lambda: {"a", "b"} <= keys_of(parts, collection), SECONDS, "both are there")
            scores = {match["key"]: match["score"] for match in client.search(collection, tiny.texts()[2])}
            assert scores["b"] >= max(scores.values()) - 1e-3  # random weights, and float16

            parts.end_part("indexer", signal.SIGKILL)
            parts.change(f"DELETE FROM {table} WHERE id = 'a'")
            parts.change(f"UPDATE {table} SET body = '{tiny.texts()[3]}' WHERE id = 'b'")
            parts.start("indexer", "indexer")
            wait_for(lambda: "a" not in keys_of(parts, collection), SECONDS, "the deleted one is gone")
            wait_for(
                lambda: client.search(collection, tiny.texts()[3], limit=1)[0]["score"] > 0.999,
                SECONDS,
                "the new text is found",
            )
            client.unfollow(collection)
    finally:
        parts.end_part("indexer")
