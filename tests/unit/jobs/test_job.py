"""A job as its figures tell it: times, the state that each wish leads to, and the stage that bounded it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.jobs import JOB, START
from vectormill.domain.errors import WrongJobState
from vectormill.jobs.bottleneck import find_bottleneck, share_stages
from vectormill.jobs.job import (
    JOB_STATES,
    state_after_cancel,
    state_after_delete,
    state_after_pause,
    state_after_resume,
    state_after_retry,
)


def after(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("changes", "elapsed", "eta"),
    [
        ({}, 100, 400),
        ({"started_at": None}, 0, None),
        # An hour passed before the first commit; since then 100 items ended in ten seconds.
        ({"idle_seconds": -3600.0, "pace": [3690.0, 100.0, 3690.0, 100.0]}, 3700, 80),
        ({"pace": [10.0, 20.0, 60.0, 150.0]}, 100, 400),  # 180 items in the last 90 seconds
        ({"pace": [99.0, 150.0, 99.0, 150.0]}, 100, 400),  # a second tells no rate
        ({"pace": [60.0, 200.0, 60.0, 200.0]}, 100, 400),  # nor does a time in which none ended
        ({"idle_seconds": 60.0}, 40, 160),  # a pause that is over neither counts nor slows the rate
        ({"state": "paused", "paused_at": after(20)}, 20, None),  # nobody knows when it goes on
        ({"state": "paused", "started_at": None, "paused_at": after(20)}, 0, None),
        ({"state": "completed", "finished_at": after(50)}, 50, 0),
        # Its last chunks were at a worker when it was paused, and were finished.
        ({"state": "completed", "paused_at": after(20), "finished_at": after(25)}, 25, 0),
    ],
)
def test_pauses_are_no_part_of_the_time_a_job_took(
    changes: dict[str, Any], elapsed: float, eta: float | None
) -> None:
    job = replace(JOB, **changes)
    assert job.elapsed_seconds == pytest.approx(elapsed)
    assert job.eta_seconds == (None if eta is None else pytest.approx(eta))


Transition = Callable[[str], str]

# What each wish makes of each state; a state that is missing refuses it.
TRANSITIONS: dict[str, tuple[Transition, dict[str, str]]] = {
    "pause": (state_after_pause, {"queued": "paused", "running": "paused", "paused": "paused"}),
    "resume": (
        lambda state: state_after_resume(state, has_started=True),
        {"queued": "queued", "running": "running", "paused": "running"},
    ),
    "resume before the first dispatch": (
        lambda state: state_after_resume(state, has_started=False),
        {"queued": "queued", "running": "running", "paused": "queued"},
    ),
    "cancel": (
        state_after_cancel,
        {
            "queued": "cancelling",
            "running": "cancelling",
            "paused": "cancelling",
            "cancelling": "cancelling",
            "cancelled": "cancelled",
        },
    ),
    "delete": (
        state_after_delete,
        dict.fromkeys(("completed", "completed_with_errors", "failed", "cancelled"), "deleting"),
    ),
    "retry": (
        lambda state: state_after_retry(state, 1),
        {"completed_with_errors": "queued", "failed": "queued", "paused": "paused"},
    ),
    "retry of nothing": (
        # Such a job has failed because its objects could not be read.
        lambda state: state_after_retry(state, 0),
        {},
    ),
}


def test_every_wish_leads_every_state_to_another_or_is_refused_with_the_state_named() -> None:
    for wish, (decide, table) in TRANSITIONS.items():
        for state in JOB_STATES:
            if state in table:
                assert decide(state) == table[state]
                continue
            is_received = state == "uploading" and wish in ("pause", "delete")
            said = "still uploading" if is_received else f"The job is {state}"
            with pytest.raises(WrongJobState, match=said):
                decide(state)


LARGE_JOB = {"load": 1.0, "tokenize": 12.0, "wait": 400.0, "run": 94.0, "collect": 1.0, "persist": 30.0}


@pytest.mark.parametrize(
    ("stage_seconds", "elapsed", "expected", "reason"),
    [
        # The device is busy: that threads spent more time in another stage does not matter.
        (LARGE_JOB | {"persist": 300.0, "held": 100.0, "device": 94.0}, 100.0, "run", "computing for 94% of the time"),
        # Two workers held chunks all the time.
        (LARGE_JOB | {"run": 188.0, "held": 200.0, "device": 188.0}, 100.0, "run", "computing for 94% of the time"),
        # Another program computes on the same cores.
        (LARGE_JOB | {"held": 100.0, "device": 94.0, "starved": 45.0}, 100.0, "run",
         "94% of the time (in 45% its threads waited for cores that other processes held)"),
        (LARGE_JOB | {"held": 100.0, "device": 94.0, "starved": 9.0}, 100.0, "run", "computing for 94% of the time"),
        # Its own share is small, because the worker has other jobs.
        (
            LARGE_JOB | {"run": 40.0, "held": 100.0, "device": 95.0},
            100.0,
            "run",
            "95% of the time, 40% for its own texts and 55% for others",
        ),
        # A slow database: the device waits for chunks that are being written.
        (LARGE_JOB | {"persist": 400.0, "held": 100.0, "device": 94.0, "run": 40.0} | {"device": 40.0}, 100.0,
         "persist", "the database: the device was computing for 40% of the time"),
        (LARGE_JOB | {"tokenize": 400.0, "run": 40.0, "held": 100.0, "device": 40.0}, 100.0,
         "tokenize", "each chunk's own time went into tokenizing"),
        # One chunk, one stage after another.
        ({"load": 0.01, "tokenize": 0.01, "run": 0.05, "persist": 0.02, "held": 0.1, "device": 0.05}, 0.1,
         "run", "the forward pass"),
        # Nobody worked on it for most of the time: no worker, or others' jobs went first.
        (LARGE_JOB | {"held": 100.0, "device": 94.0}, 1000.0, "queue", "workers held no chunk for 90% of the time"),
        # A worker of an older release notes neither `held` nor `device`.
        ({"run": 90.0, "tokenize": 3.0}, 100.0, "run", "computing for 90% of the time"),
    ],
)  # fmt: skip
def test_the_stage_that_bounded_a_job_is_named_with_the_figure_that_shows_it(
    stage_seconds: Mapping[str, float], elapsed: float, expected: str, reason: str
) -> None:
    bottleneck = find_bottleneck(stage_seconds, elapsed)
    assert bottleneck is not None
    assert bottleneck.value == expected
    assert reason in bottleneck.reason


@pytest.mark.parametrize("stage_seconds", [{}, {"held": 3.0}, {"wait": 3.0}])
def test_nothing_is_said_while_nothing_was_measured(stage_seconds: Mapping[str, float]) -> None:
    assert find_bottleneck(stage_seconds, 3.0) is None


def test_shares_are_of_the_time_in_which_chunks_were_held_in_the_order_of_a_text_s_way() -> None:
    shares = share_stages({"persist": 50.0, "run": 180.0, "held": 200.0, "device": 190.0, "load": 0.0}, 100.0)
    assert list(shares.items()) == [("load", 0.0), ("run", 0.9), ("persist", 0.25)]
    assert share_stages({"run": 1.0}, 0.0) == {"run": 0.0}
