"""Histories: how jobs stood while somebody looked, so that a page shows how they went. Of this process, and bounded.

Postgres keeps what a job came to and not the way there. A job's beginning is known all the same: then all was zero.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final
from uuid import UUID

from vectormill.jobs.bottleneck import STAGES, WAIT, find_bottleneck
from vectormill.jobs.job import Job

MAX_JOBS: Final = 256
MAX_SAMPLES: Final = 120
# While a chunk waits nobody is busy with it.
BUSY_STAGES: Final = tuple(stage for stage in STAGES if stage != WAIT)


@dataclass(frozen=True, slots=True)
class JobSample:
    """A job at one moment, in seconds since 1970; with whatever was counted since its start."""

    at: float
    num_ended: int
    num_tokens: int
    stage_seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Stretch:
    """The part of a job between two samples. `shares` of the busy time are by stage and add up to one; `bound_by`
    is a stage, `queue`, or None where nothing was measured.
    """

    begin: float
    end: float
    items_per_second: float
    tokens_per_second: float
    shares: dict[str, float]
    bound_by: str | None


class Histories:
    """The samples of the jobs that were looked at last. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: OrderedDict[UUID, list[JobSample]] = OrderedDict()

    def note(self, job: Job) -> None:
        """Keep how the job stands if it has moved. A job that has not started has no history."""
        if job.started_at is None:
            return
        with self._lock:
            samples = self._samples.setdefault(job.id, [JobSample(job.started_at.timestamp(), 0, 0, {})])
            self._samples.move_to_end(job.id)
            if len(self._samples) > MAX_JOBS:
                self._samples.popitem(last=False)
            add_sample(samples, take_sample(job))

    def find(self, job_id: UUID) -> list[Stretch]:
        with self._lock:
            samples = list(self._samples.get(job_id, ()))
        return find_stretches(samples)


def take_sample(job: Job) -> JobSample:
    at = (job.finished_at or job.now).timestamp()
    return JobSample(at, job.num_done + job.num_failed, job.num_tokens, dict(job.stage_seconds))


def add_sample(samples: list[JobSample], sample: JobSample) -> None:
    """Add a sample unless nothing has changed; a long history drops every second sample, but never the first or
    last.
    """
    last = samples[-1]
    if sample.num_ended == last.num_ended or sample.at <= last.at:
        return
    if len(samples) > 2 and sample.at - samples[-2].at < (sample.at - samples[0].at) / MAX_SAMPLES:
        samples[-1] = sample
        return
    samples.append(sample)
    if len(samples) > MAX_SAMPLES:
        samples[1:-1] = samples[1:-1:2]


def find_stretches(samples: Sequence[JobSample]) -> list[Stretch]:
    return [measure(before, after) for before, after in pairwise(samples)]


def measure(before: JobSample, after: JobSample) -> Stretch:
    seconds = after.at - before.at
    spent = {
        name: max(total - before.stage_seconds.get(name, 0.0), 0.0)
        for name, total in after.stage_seconds.items()
    }
    busy = sum(spent.get(stage, 0.0) for stage in BUSY_STAGES)
    bottleneck = find_bottleneck(spent, seconds)
    return Stretch(
        before.at,
        after.at,
        max(after.num_ended - before.num_ended, 0) / seconds,  # a retry takes errors back
        max(after.num_tokens - before.num_tokens, 0) / seconds,
        {stage: spent.get(stage, 0.0) / busy if busy else 0.0 for stage in BUSY_STAGES},
        bottleneck.value if bottleneck else None,
    )
