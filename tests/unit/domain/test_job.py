from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.jobs.job import Job

START = datetime(2026, 11, 21, 12, tzinfo=UTC)
JOB = Job(
    id=uuid4(),
    seq=1,
    state="running",
    spec=EncodingSpec("m", "1", "mean", True, 3, "", 64),
    collection=None,
    priority=5,
    metadata={},
    num_items=1000,
    num_done=200,
    num_failed=0,
    num_chunks=10,
    num_open_chunks=8,
    num_retried_chunks=0,
    num_tokens=0,
    num_computed_tokens=0,
    num_truncated=0,
    num_passages=0,
    num_reused=0,
    stage_seconds={},
    created_at=START,
    started_at=START,
    finished_at=None,
    paused_at=None,
    idle_seconds=0.0,
    now=START + timedelta(seconds=100),
)


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
