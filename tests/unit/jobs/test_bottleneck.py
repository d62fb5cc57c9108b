"""What is said to have bounded a job, from the seconds that its workers noted."""

from collections.abc import Mapping

import pytest

from vectormill.jobs.bottleneck import find_bottleneck, share_stages

LARGE_JOB = {"load": 1.0, "tokenize": 12.0, "wait": 400.0, "run": 94.0, "collect": 1.0, "persist": 30.0}


@pytest.mark.parametrize(
    ("stage_seconds", "elapsed", "expected", "reason"),
    [
        # The device is busy: that threads spent more time in another stage does not matter.
        (LARGE_JOB | {"persist": 300.0, "held": 100.0, "device": 94.0}, 100.0, "run", "computing in 94% of the time"),
        # Two workers held chunks all the time.
        (LARGE_JOB | {"run": 188.0, "held": 200.0, "device": 188.0}, 100.0, "run", "computing in 94% of the time"),
        # Its own share is small, because the worker has other jobs.
        (LARGE_JOB | {"run": 40.0, "held": 100.0, "device": 95.0}, 100.0, "run", "95% of the time, 55% for other jobs"),
        # A slow database: the device waits for chunks that are being written.
        (LARGE_JOB | {"persist": 400.0, "held": 100.0, "device": 94.0, "run": 40.0} | {"device": 40.0}, 100.0,
         "persist", "the database: the device was computing in 40% of the time"),
        (LARGE_JOB | {"tokenize": 400.0, "run": 40.0, "held": 100.0, "device": 40.0}, 100.0,
         "tokenize", "a chunk's own time went into tokenizing"),
        # One chunk, one stage after another.
        ({"load": 0.01, "tokenize": 0.01, "run": 0.05, "persist": 0.02, "held": 0.1, "device": 0.05}, 0.1,
         "run", "the forward pass"),
        # Nobody worked on it for most of the time: no worker, or others' jobs went first.
        (LARGE_JOB | {"held": 100.0, "device": 94.0}, 1000.0, "queue", "no chunk was in hand in 90% of the time"),
        # A worker of an older release notes neither `held` nor `device`.
        ({"run": 90.0, "tokenize": 3.0}, 100.0, "run", "computing in 90% of the time"),
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
