"""Every process is killed and stopped at random under several jobs of a thousand texts; nothing may be lost by it."""

import random
import time
from contextlib import ExitStack

import psutil
import pytest

from tests.acceptance import tiny
from tests.acceptance.chaos import Nemesis, plan_faults
from tests.acceptance.producer import Ledger, find_broken_promises, load
from tests.acceptance.stack import Stack, running_stack
from tests.clusters import new_directory
from tests.waiting import wait_for
from vectormill.jobs.job import TERMINAL_JOB_STATES

NUM_PRODUCERS = 3  # each has two jobs open, one of them for a collection that two of the producers share
JOB_ITEMS = 1000
# After the last fault. Back-off pauses of a minute, restarts that wait 30 s, and a machine that is busy otherwise.
SETTLING_SECONDS = 300.0

OPEN_CHUNKS = """
    SELECT id, job_id, state, num_items, attempt, lost, error FROM vectormill.chunks
     WHERE state IN ('pending', 'queued', 'leased')
"""
LOWERED_BUDGETS = (
    "SELECT name, report -> 'budgets' FROM vectormill.workers WHERE report ->> 'num_out_of_memory' <> '0'"
)

pytestmark = pytest.mark.slow


def test_no_item_is_lost_or_blamed_whatever_is_killed_or_stopped(request: pytest.FixtureRequest) -> None:
    seconds = float(request.config.getoption("--soak-seconds"))
    seed = request.config.getoption("--chaos-seed") or random.SystemRandom().randrange(1, 10**6)
    print(f"again with: pytest tests/acceptance/test_chaos.py --chaos-seed {seed} --soak-seconds {seconds:g}")
    with new_directory() as directory, ExitStack() as cleanup:
        # Chunks of the size that users have, not the small ones of other tests.
        environment = tiny.write_tiny(directory) | {"VECTORMILL_CHUNK_MAX_ITEMS": "512"}
        tiny.expected(directory)
        stack = cleanup.enter_context(running_stack(directory, environment, tiny.MODEL))
        nemesis = Nemesis(stack, plan_faults(seed, seconds), time.monotonic)
        try:
            with load(stack, seed, NUM_PRODUCERS, JOB_ITEMS) as ledger:
                nemesis.run()
            wait_until_all_ended(stack, ledger)
            broken = find_broken_promises(stack, ledger.promises, directory)
            assert not broken
            assert not ledger.surprises
            assert ledger.promises
            # Whoever killed a model process, it was not short of memory.
            assert stack.sql(LOWERED_BUDGETS) == []
        except BaseException:
            print("\n".join(nemesis.done))
            print(stack.log_tails())
            raise
        processes = stack.processes()
        stack.stop()
        _, alive = psutil.wait_procs(processes, timeout=5)
        assert not alive, "a process outlived the stack"


def wait_until_all_ended(stack: Stack, ledger: Ledger) -> None:
    wait_for(stack.is_ready, 120, "the stack is whole again")

    def open_jobs() -> list[object]:
        with stack.client() as client:
            jobs = [client.job(promise.job_id) for promise in ledger.promises]
        return [
            (job["id"], job["state"], job["waiting_because"])
            for job in jobs
            if job["state"] not in TERMINAL_JOB_STATES
        ]

    try:
        wait_for(lambda: not open_jobs(), SETTLING_SECONDS, "every job has ended")
    except AssertionError:
        chunks = stack.sql(OPEN_CHUNKS)
        raise AssertionError(f"open jobs: {open_jobs()}; their chunks: {chunks}") from None
