from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest

from tests.jobs import JOB
from vectormill.jobs.job import JOB_STATES
from vectormill.jobs.wait_reasons import ClusterState, DispatchedChunks, ServingWorker, explain_wait

WORKER = ServingWorker("m-cpu0@host", "m", 4, "1", "mean", "running")
OLD_WORKER = ServingWorker("old@host", "m", 4)  # of a release that reports nothing that is asked here
CALM = ClusterState(
    [WORKER], [], is_scheduler_alive=True, is_redis_away=False, is_redis_full=False, setbacks={}
)
MINE = DispatchedChunks(JOB.id, "m", 5, num_queued=0, num_leased=1, oldest_queued_seconds=0.0)
RECENT = replace(MINE, num_queued=1, num_leased=0, oldest_queued_seconds=0.2)


def other(priority: int, num_chunks: int = 4, model: str = "m") -> DispatchedChunks:
    return DispatchedChunks(
        uuid4(), model, priority, num_queued=1, num_leased=num_chunks - 1, oldest_queued_seconds=0.1
    )


@pytest.mark.parametrize(
    ("around", "said"),
    [
        ({}, None),  # just submitted: the dispatcher comes within a second
        ({"in_hand": [MINE]}, None),
        ({"in_hand": [RECENT]}, None),
        ({"workers": [OLD_WORKER]}, None),
        (
            {"workers": []},
            "No live worker serves m; start one with `vectormill worker --model m`.",
        ),
        (
            {"workers": [replace(WORKER, model=model) for model in "zxyx"]},
            "start one with `vectormill worker --model m`. Live workers serve x, y, z.",
        ),
        (
            {"workers": [replace(WORKER, model=f"x{n}") for n in range(9)]},
            "Live workers serve x0, x1, x2, x3, x4 and 4 more.",
        ),
        (
            {"workers": [replace(WORKER, revision="2")]},
            "No live worker serves m with revision 1 and pooling mean, as the job requires; live workers have "
            "revision 2 and pooling mean. Start one with that model (`vectormill worker --model m`), or cancel the job",
        ),
        # Its chunks go from hand to hand every 15 s, and a lease is seen now and then.
        (
            {"workers": [replace(WORKER, revision="2", pooling=None)], "in_hand": [MINE]},
            "live workers have revision 2. Start",
        ),
        ({"workers": [replace(WORKER, revision="2", aliases=["1"])]}, None),
        ({"workers": [replace(WORKER, pooling="cls"), WORKER]}, None),  # one of two is enough
        # A worker that loads its model may hold a chunk meanwhile, and does nothing with it.
        (
            {"workers": [replace(WORKER, state="loading")], "in_hand": [MINE]},
            "No worker for m is ready: m-cpu0@host is loading.",
        ),
        (
            {"workers": [replace(WORKER, state="restarting", state_reason="it died")]},
            "m-cpu0@host is restarting (it died).",
        ),
        ({"workers": [replace(WORKER, state="loading"), WORKER]}, None),
        ({"is_scheduler_alive": False}, "start one with `vectormill scheduler`"),
        ({"is_scheduler_alive": False, "in_hand": [MINE]}, None),  # what is in hand needs no scheduler
        ({"is_redis_away": True}, "The scheduler cannot reach Redis; the job continues automatically"),
        ({"is_redis_away": True, "in_hand": [MINE]}, None),
        (
            {"is_redis_full": True},
            "Redis responds but accepts no messages, most likely because its memory is full",
        ),
        ({"in_hand": [replace(RECENT, oldest_queued_seconds=16.0)]}, "no worker takes them"),
        ({"setbacks": {JOB.id: "RunnerDied: 9"}}, "waiting to be retried after an error: RunnerDied: 9"),
        ({"setbacks": {UUID(int=0): "of another job"}}, None),
        ({"in_hand": [other(4)]}, "All workers for m are busy with another job of higher priority."),
        ({"in_hand": [other(1, 2), other(4, 2)]}, "busy with 2 other jobs of higher priority."),
        (
            {"in_hand": [other(1, 2), other(5, 1), other(6, 1)]},
            "busy with 3 other jobs, 1 of them of higher priority; this job will get its turn.",
        ),
        ({"in_hand": [other(5)]}, "busy with another job; this job will get its turn."),
        ({"in_hand": [other(4, 3)]}, None),  # one slot is free
        ({"in_hand": [other(4, 4, "other")]}, None),  # another model's workers
        ({"in_hand": [other(0, 60)]}, None),  # interactive jobs take nobody's room
    ],
)
def test_a_job_that_waits_says_for_what(around: dict[str, Any], said: str | None) -> None:
    for state in ("queued", "running"):
        reason = explain_wait(replace(JOB, state=state), replace(CALM, **around))
        assert reason is None if said is None else said in (reason or "")


@pytest.mark.parametrize("state", JOB_STATES)
def test_only_an_open_job_waits(state: str) -> None:
    reason = explain_wait(replace(JOB, state=state), replace(CALM, workers=[]))
    assert (reason is not None) == (state in ("queued", "running", "paused"))
    if state == "paused":
        assert reason == f"The job is paused; resume it with `vectormill resume {JOB.id}`."


def test_an_urgent_job_does_not_wait_for_bulk() -> None:
    assert explain_wait(replace(JOB, priority=0), replace(CALM, in_hand=[other(5)])) is None
