"""What a user is promised: nothing is lost, whatever dies in the middle. Real processes, real model, real text."""

import signal
from itertools import islice

import psutil
import pytest

from tests.acceptance.stack import Stack
from tests.waiting import wait_for
from vectormill.corpus import read_docstrings
from vectormill.files.ndjson import ItemJson

MODEL = "all-MiniLM-L6-v2"
# Some seconds of work on two cores, and one on a processor with matrix units: long enough to be hurt in the middle.
NUM_ITEMS = 600


def docstrings(collection: str) -> list[ItemJson]:
    """Texts that name their collection: the worker takes over no vector that an earlier test has made it compute."""
    return [
        {"key": text.key, "text": f"{collection} {text.text[:400]}"}
        for text in islice(read_docstrings(), NUM_ITEMS)
    ]


def submit_and_wait_for_the_middle(stack: Stack, collection: str) -> str:
    """A job that has some of its vectors, but not all."""
    with stack.client() as client:
        job = client.submit(docstrings(collection), model=MODEL, collection=collection)
        wait_for(lambda: client.job(job["id"])["num_done"] > 0, 60, "some vectors are there")
        assert client.job(job["id"])["state"] == "running"
    return str(job["id"])


def assert_every_key_has_exactly_one_vector(stack: Stack, job_id: str, collection: str) -> None:
    with stack.client() as client:
        job = client.wait(job_id, timeout_seconds=150)
        assert (job["state"], job["num_done"], job["num_failed"]) == ("completed", NUM_ITEMS, 0)
        exported = [vector["key"] for vector in client.vectors(job_id)]
    keys = [item["key"] for item in docstrings(collection)]
    assert exported == keys
    assert sorted(str(key) for (key,) in stack.query(f"SELECT key FROM {collection}")) == sorted(keys)


def test_a_worker_killed_in_the_middle_costs_time_but_no_item(stack: Stack, collection: str) -> None:
    job_id = submit_and_wait_for_the_middle(stack, collection)
    worker = wait_for(lambda: stack.find_process("worker.app"), 5, "a worker runs")
    runners = worker.children(recursive=True)
    worker.kill()
    psutil.wait_procs([worker], timeout=10)
    _, alive = psutil.wait_procs(runners, timeout=10)
    assert not alive, "the model process outlived its worker"
    assert_every_key_has_exactly_one_vector(stack, job_id, collection)
    with stack.client() as client:
        assert client.job(job_id)["num_retried_chunks"] > 0


def test_a_flushed_redis_costs_seconds_but_no_item(stack: Stack, collection: str) -> None:
    job_id = submit_and_wait_for_the_middle(stack, collection)
    for _ in range(3):
        stack.redis().flushall()
    assert_every_key_has_exactly_one_vector(stack, job_id, collection)


def test_a_stack_stopped_in_the_middle_goes_on_when_it_is_started_again(
    stack: Stack, collection: str
) -> None:
    job_id = submit_and_wait_for_the_middle(stack, collection)
    processes = stack.processes()
    stack.stop(signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive, "a process outlived the stack"
    stack.start()
    assert_every_key_has_exactly_one_vector(stack, job_id, collection)


def test_a_stack_killed_with_all_its_processes_recovers_and_goes_on(stack: Stack, collection: str) -> None:
    job_id = submit_and_wait_for_the_middle(stack, collection)
    stack.kill_everything()
    stack.start()
    assert_every_key_has_exactly_one_vector(stack, job_id, collection)


@pytest.mark.parametrize("victim", ["scheduler", "api", "valkey-server", "postgres"])
def test_a_killed_process_comes_back_and_the_job_goes_on(stack: Stack, collection: str, victim: str) -> None:
    job_id = submit_and_wait_for_the_middle(stack, collection)
    process = stack.find_process(victim)
    assert process is not None
    process.kill()
    psutil.wait_procs([process], timeout=10)
    wait_for(stack.is_ready, 60, f"the stack is ready again without its {victim}")
    assert_every_key_has_exactly_one_vector(stack, job_id, collection)


def test_a_cancelled_job_stops_and_adds_nothing_afterwards(stack: Stack, collection: str) -> None:
    job_id = submit_and_wait_for_the_middle(stack, collection)
    with stack.client() as client:
        client.cancel(job_id)
        job = client.wait(job_id, timeout_seconds=30)
    assert job["state"] == "cancelled"
    count = f"SELECT count(*) FROM {collection}"
    (before,) = stack.query(count)
    assert 0 < before[0] < NUM_ITEMS  # type: ignore[operator]
    with stack.client() as client:
        again = client.submit(docstrings(collection)[:10], model=MODEL)
        assert client.wait(again["id"], timeout_seconds=60)["num_done"] == 10
    assert list(stack.query(count)) == [before]


def test_a_second_up_on_the_same_directory_says_that_one_is_running(stack: Stack) -> None:
    second = stack.spawn()
    assert second.wait(timeout=30) != 0
    assert stack.process is not None
    assert f"(pid {stack.process.pid}) is running on" in stack.log.read_text()
    with stack.client() as client:
        assert client.models()


def test_search_and_sql_find_the_nearest_texts(stack: Stack, collection: str) -> None:
    items: list[ItemJson] = [
        {"key": "cat", "text": "A cat sleeps on the warm windowsill."},
        {"key": "bond", "text": "The central bank raised interest rates again."},
        {"key": "port", "text": "Bind the server to a free TCP port."},
    ]
    with stack.client() as client:
        job = client.submit(items, model=MODEL, collection=collection)
        client.wait(job["id"], timeout_seconds=60)
        matches = client.search(collection, "a kitten is napping", limit=3)
    assert matches[0]["key"] == "cat"
    nearest = stack.query(
        f"SELECT key FROM {collection}"
        f" ORDER BY embedding <=> (SELECT embedding FROM {collection} WHERE key = 'cat') LIMIT 1"
    )
    assert list(nearest) == [("cat",)]


def test_a_search_is_answered_while_a_bulk_job_fills_every_slot(stack: Stack, collection: str) -> None:
    with stack.client() as client:
        job = client.submit([{"key": "cat", "text": "A cat sleeps."}], model=MODEL, collection=collection)
        client.wait(job["id"], timeout_seconds=60)
        bulk = submit_and_wait_for_the_middle(stack, f"bulk_{collection}")
        matches = client.search(collection, "a kitten is napping", limit=1)
        assert [match["key"] for match in matches] == ["cat"]
        assert client.job(bulk)["state"] == "running", "the search waited for the bulk job"
        client.cancel(bulk)
        client.wait(bulk, timeout_seconds=30)
