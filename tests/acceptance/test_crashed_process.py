"""A worker's own process fails in the middle of a job: the next one is told, and hands back what it held."""

import signal

import pytest

from tests.acceptance.stack import Stack
from tests.waiting import wait_for
from vectormill.models.registry import DEFAULT_MODEL

HELD = "SELECT count(*) FROM vectormill.chunks WHERE state = 'leased'"
REASONS = "SELECT count(*) FROM vectormill.chunks WHERE lost > 0"


@pytest.mark.slow
def test_a_job_completes_though_its_worker_fails_by_a_fault_of_its_own(stack: Stack, collection: str) -> None:
    items = [{"key": f"k{number}", "text": f"some text {number} " * 20} for number in range(3000)]
    with stack.client() as client:
        job = client.submit(items, model=DEFAULT_MODEL, collection=collection)
        wait_for(lambda: next(stack.query(HELD))[0], 60, "a worker holds a chunk")
        worker = stack.find_process("worker.app")
        assert worker is not None
        worker.send_signal(signal.SIGSEGV)
        wait_for(lambda: next(stack.query(REASONS))[0], 60, "the next process has told what the former held")
        ended = client.wait(job["id"], timeout_seconds=300)
    assert (ended["state"], ended["num_failed"]) == ("completed", 0)
    assert ended["num_retried_chunks"] > 0
