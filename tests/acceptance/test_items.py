"""Items put one by one on real processes: searchable when answered, kept whoever is killed, gone without a trace."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.acceptance import tiny
from tests.acceptance.parts import Parts, frozen
from tests.residue import find_residue
from tests.services import connected_engine
from tests.waiting import wait_for
from vectormill.client import Client
from vectormill.domain.errors import VectormillError
from vectormill.problems import ApiError

# The pruner looks every ten seconds, and rests a second between two passes.
SCRUB_SECONDS = 60.0


def make_collection(parts: Parts, collection: str) -> None:
    with parts.client() as client:
        job = client.submit(tiny.items([0, 1]), model=tiny.MODEL, collection=collection)
        client.wait(job["id"], timeout_seconds=240)


def count_open(parts: Parts) -> object:
    return next(iter(parts.query("SELECT count(*) FROM vectormill.jobs WHERE finished_at IS NULL")))[0]


def assert_found(client: Client, collection: str, key: str, content: str) -> None:
    """The key has the text's own vector. Of random weights, some texts are as near as float16 can tell."""
    scores = {match["key"]: match["score"] for match in client.search(collection, content, limit=100)}
    assert scores[key] >= max(scores.values()) - 1e-3


def test_a_put_is_found_at_once_and_a_deleted_one_is_not(parts: Parts, collection: str) -> None:
    make_collection(parts, collection)
    with parts.client() as client:
        for number in (2, 3):
            answer = client.put_item(collection, f"k{number}", tiny.texts()[number], wait_seconds=60)
            assert answer["is_searchable"]
            assert_found(client, collection, f"k{number}", tiny.texts()[number])
        client.delete_item(collection, "k3")
        assert "k3" not in {match["key"] for match in client.search(collection, tiny.texts()[3])}
        client.put_item(collection, "k3", tiny.texts()[4], wait_seconds=60)
        assert_found(client, collection, "k3", tiny.texts()[4])


def test_puts_that_were_committed_survive_the_api_that_took_them(parts: Parts, collection: str) -> None:
    make_collection(parts, collection)

    def put(number: int) -> None:
        with Client(parts.api_url, pause=lambda _: None) as client, pytest.raises(VectormillError):
            client.put_item(collection, f"k{number}", tiny.texts()[number], wait_seconds=60)

    with frozen([*parts.workers(), *parts.runners()]), ThreadPoolExecutor(8) as clients:
        puts = [clients.submit(put, number) for number in range(2, 10)]
        wait_for(lambda: _count_puts(parts, collection) >= 8, 30, "all puts are committed")
        parts.end_part("api", signal.SIGKILL)
        for each in puts:
            each.result()
        parts.start("api", "api", "--port", str(parts.api_port))
        parts.wait_until_ready()
    with parts.client() as client:
        wait_for(lambda: count_open(parts) == 0, 60, "the jobs of the puts have ended")
        for number in range(2, 10):
            assert_found(client, collection, f"k{number}", tiny.texts()[number])


def _count_puts(parts: Parts, collection: str) -> int:
    (row,) = parts.query(
        "SELECT coalesce(sum(jobs.num_items), 0) FROM vectormill.jobs"
        " JOIN vectormill.generations ON generations.id = jobs.generation_id"
        " JOIN vectormill.collections ON collections.id = generations.collection_id"
        f" WHERE jobs.forget_at = 'infinity' AND collections.name = '{collection}'"
    )
    return int(str(row[0]))


def test_a_deleted_item_leaves_no_byte_of_its_text_anywhere(parts: Parts, collection: str) -> None:
    make_collection(parts, collection)
    secret = "an unmistakable confession of mine"
    with connected_engine(parts.database_url) as engine, parts.client() as client:
        job = client.submit([{"key": "k", "text": secret}], model=tiny.MODEL, collection=collection)
        client.wait(job["id"], timeout_seconds=240)
        client.put_item(collection, "k", f"{secret}, again", wait_seconds=60)
        with frozen([*parts.workers(), *parts.runners()]):
            late = client.submit(
                [{"key": "k", "text": f"{secret}, late"}], model=tiny.MODEL, collection=collection
            )
            # Before the deletion: what is left after it may be gone as soon as the last job has ended.
            assert find_residue(engine, secret), "its jobs are there"
            client.delete_item(collection, "k")
        client.wait(late["id"], timeout_seconds=240)
        with pytest.raises(ApiError, match="no item"):
            client.get_item(collection, "k")
        wait_for(lambda: not find_residue(engine, secret), SCRUB_SECONDS, "every text is gone")
        assert list(client.vectors(job["id"])) == []
        assert client.job(job["id"])["state"] == "completed"
