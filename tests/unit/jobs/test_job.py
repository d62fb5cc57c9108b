from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.jobs import JOB, START


def after(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("changes", "elapsed", "eta"),
    [
        ({}, 100, 400),
        ({"started_at": None}, 0, None),
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
