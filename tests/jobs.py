"""A job as read from the database, for tests of functions that take a job."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import uuid4

from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.job import Job

START: Final = datetime(2026, 11, 21, 12, tzinfo=UTC)
# A fifth of the items was done in 100 seconds.
JOB: Final = Job(
    id=uuid4(), seq=1, state="running", spec=EncodingSpec("m", "1", "mean", True, 3, "", 64), collection=None,
    priority=5, metadata={}, num_items=1000, num_done=200, num_failed=0, num_chunks=10, num_open_chunks=8,
    num_retried_chunks=0, num_tokens=0, num_computed_tokens=0, num_truncated=0, num_passages=0, num_reused=0,
    stage_seconds={}, created_at=START, started_at=START, finished_at=None, paused_at=None, idle_seconds=0.0,
    pace=None, now=START + timedelta(seconds=100),
)  # fmt: skip


def make_completed_job(num_items: int, **changes: Any) -> Job:
    """Return a completed job in which every item has a vector of three dimensions."""
    ended: dict[str, Any] = {"state": "completed", "num_open_chunks": 0, "finished_at": START}
    return replace(JOB, num_items=num_items, num_done=num_items, **ended | changes)
