"""What a user is promised: nothing is lost, whatever dies in the middle. Real processes, real model, real text."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import psutil
import pytest

from tests.acceptance.parts import frozen
from tests.acceptance.stack import Stack
from tests.waiting import wait_for
from vectormill.client import Client
from vectormill.corpus import read_docstrings
from vectormill.files.ndjson import ItemJson

MODEL = "all-MiniLM-L6-v2"
# Two seconds of work on two cores; twice as many where that is too little to be caught in the middle.
NUM_ITEMS = 400
MOST_DOUBLINGS = 4
# Of these one search costs next to nothing; nobody waits for them.
NUM_BULK_ITEMS = 4800


@dataclass(frozen=True, slots=True)
class Caught:
    """A job that has some of its vectors, but not all."""

    stack: Stack
    job_id: str
    collection: str
    items: list[ItemJson]

    def assert_every_key_has_exactly_one_vector(self) -> None:
        with self.stack.client() as client:
            job = client.wait(self.job_id, timeout_seconds=300)
            assert (job["state"], job["num_done"], job["num_failed"]) == ("completed", len(self.items), 0)
            exported = [vector["key"] for vector in client.vectors(self.job_id)]
        keys = [item["key"] for item in self.items]
        assert exported == keys
        stored = self.stack.query(f"SELECT key FROM {self.collection}")
        assert sorted(str(key) for (key,) in stored) == sorted(keys)


def docstrings(name: str, num_items: int) -> list[ItemJson]:
    """Texts that begin with a name: the worker takes over no vector that an earlier job has made it compute."""
    return [
        {"key": text.key, "text": f"{name} {text.text[:200]}"}
        for text in islice(read_docstrings(), num_items)
    ]


@contextmanager
def caught_in_the_middle(stack: Stack, collection: str, num_items: int = NUM_ITEMS) -> Iterator[Caught]:
    """While the block runs the model's process stands still, however fast it is, and the worker holds chunks."""
    with stack.client() as client:
        for doubling in range(MOST_DOUBLINGS + 1):
            items = docstrings(f"{collection} {doubling}", num_items << doubling)
            job_id = client.submit(items, model=MODEL, collection=collection)["id"]
            wait_for(lambda job_id=job_id: client.job(job_id)["num_done"] > 0, 60, "some vectors are there")  # type: ignore[misc]
            with frozen(stack.runners()):
                # What it had computed is still committed.
                if wait_until_still(client, job_id) <= len(items) // 2:
                    yield Caught(stack, str(job_id), collection, items)
                    return
            client.wait(job_id, timeout_seconds=300)
    raise AssertionError("no job was caught in the middle")


def wait_until_still(client: Client, job_id: str) -> int:
    """How many items are done when for a while no further one was."""
    num_done, before = client.job(job_id)["num_done"], -1
    while num_done != before:
        time.sleep(0.5)  # what the worker still commits sends no event
        num_done, before = client.job(job_id)["num_done"], num_done
    return num_done


# A fault of its own is told by the next process, which hands back what the former held.
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.slow)], ids=["killed", "faulty"]
)
def test_a_worker_that_ends_in_the_middle_costs_time_but_no_item(
    stack: Stack, collection: str, number: signal.Signals
) -> None:
    with caught_in_the_middle(stack, collection) as job:
        worker = wait_for(lambda: stack.find_process("worker.app"), because="a worker runs")
        runners = worker.children(recursive=True)
        worker.send_signal(number)
    _, alive = psutil.wait_procs([worker, *runners], timeout=60)
    assert not alive, "the model process outlived its worker"
    job.assert_every_key_has_exactly_one_vector()
    with stack.client() as client:
        assert client.job(job.job_id)["num_retried_chunks"] > 0


@pytest.mark.tail
def test_a_stack_stopped_in_the_middle_goes_on_when_it_is_started_again(
    stack: Stack, collection: str
) -> None:
    with caught_in_the_middle(stack, collection) as job:
        processes = stack.processes()
    stack.stop(signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive, "a process outlived the stack"
    stack.start()
    job.assert_every_key_has_exactly_one_vector()


@pytest.mark.tail
def test_a_cancelled_job_stops_and_adds_nothing_afterwards(stack: Stack, collection: str) -> None:
    # More than a worker holds at once: chunks in its hands are still committed.
    with caught_in_the_middle(stack, collection, 10 * NUM_ITEMS) as job, stack.client() as client:
        client.cancel(job.job_id)
    with stack.client() as client:
        assert client.wait(job.job_id, timeout_seconds=120)["state"] == "cancelled"
    count = f"SELECT count(*) FROM {collection}"
    (before,) = stack.query(count)
    assert 0 < before[0] < len(job.items)  # type: ignore[operator]
    with stack.client() as client:
        again = client.submit(docstrings(f"{collection} again", 10), model=MODEL)
        assert client.wait(again["id"], timeout_seconds=240)["num_done"] == 10
    assert list(stack.query(count)) == [before]


def test_a_second_up_on_the_same_directory_says_that_one_is_running(stack: Stack) -> None:
    second = stack.spawn()
    assert second.wait(timeout=120) != 0
    assert stack.process is not None
    assert f"(pid {stack.process.pid}) is running on" in stack.log.read_text()
    with stack.client() as client:
        assert client.models()


def test_a_search_is_answered_while_a_bulk_job_fills_every_slot(stack: Stack, collection: str) -> None:
    with stack.client() as client:
        job = client.submit([{"key": "cat", "text": "A cat sleeps."}], model=MODEL, collection=collection)
        client.wait(job["id"], timeout_seconds=240)
        with caught_in_the_middle(stack, f"bulk_{collection}", NUM_BULK_ITEMS) as bulk:
            pass
        matches = client.search(collection, "a kitten is napping", limit=1)
        assert [match["key"] for match in matches] == ["cat"]
        assert client.job(bulk.job_id)["state"] == "running", "the search waited for the bulk job"
        client.cancel(bulk.job_id)
        client.wait(bulk.job_id, timeout_seconds=120)
