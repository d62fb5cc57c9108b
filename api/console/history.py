"""Histories: samples of jobs that this process took while somebody viewed them, and charts of them.

Postgres keeps a job's counters but not their course. The first sample is known without a view: all counters
are zero when the job starts. The number of jobs and of samples is bounded.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Final
from uuid import UUID

import numpy as np

from api.console.formats import STAGE_WORDS
from vectormill.jobs.bottleneck import QUEUE, STAGES, WAIT, find_bottleneck
from vectormill.jobs.job import Job

MAX_JOBS: Final = 256
MAX_SAMPLES: Final = 120
# A chunk is counted when it is committed, so a rate is a mean over at least this time or this share of the chart.
SMOOTHED_SECONDS: Final = 10.0
SMOOTHED_SHARE: Final = 0.05
# While a chunk waits, nothing works on it.
BUSY_STAGES: Final = tuple(stage for stage in STAGES if stage != WAIT)


@dataclass(frozen=True, slots=True)
class JobSample:
    """The counters of a job at one moment, in seconds since 1970."""

    at: float
    num_ended: int
    stage_seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Interval:
    """The time of a job between two samples.

    `shares` are the stages' shares of the busy time and add up to one. `bound_by` is the bottleneck: a stage,
    `queue`, or None where nothing was measured.
    """

    begin: float
    end: float
    items_per_second: float
    shares: dict[str, float]
    bound_by: str | None


@dataclass(frozen=True, slots=True)
class StageInterval:
    """Adjacent stretches with the same bottleneck; `width` is their share of the whole time."""

    stage: str
    seconds: float
    width: float


class Histories:
    """The samples of the most recently viewed jobs. It may be used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: OrderedDict[UUID, list[JobSample]] = OrderedDict()

    def note(self, job: Job) -> None:
        """Add a sample of the job if its counters have changed. A job that has not started has no history."""
        if job.started_at is None:
            return
        with self._lock:
            samples = self._samples.setdefault(job.id, [JobSample(job.started_at.timestamp(), 0, {})])
            self._samples.move_to_end(job.id)
            if len(self._samples) > MAX_JOBS:
                self._samples.popitem(last=False)
            at = (job.finished_at or job.now).timestamp()
            add_sample(samples, JobSample(at, job.num_done + job.num_failed, dict(job.stage_seconds)))

    def find(self, job_id: UUID) -> list[Interval]:
        with self._lock:
            samples = list(self._samples.get(job_id, ()))
        return [measure(before, after) for before, after in pairwise(samples)]


def add_sample(samples: list[JobSample], sample: JobSample) -> None:
    """Add a sample unless nothing has changed.

    When the history is too long, every second sample is dropped, but never the first or the last.
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


def measure(before: JobSample, after: JobSample) -> Interval:
    seconds = after.at - before.at
    spent = {
        name: max(total - before.stage_seconds.get(name, 0.0), 0.0)
        for name, total in after.stage_seconds.items()
    }
    busy = sum(spent.get(stage, 0.0) for stage in BUSY_STAGES)
    bottleneck = find_bottleneck(spent, seconds)
    return Interval(
        before.at,
        after.at,
        max(after.num_ended - before.num_ended, 0) / seconds,  # a retry lowers the number of ended items
        {stage: spent.get(stage, 0.0) / busy if busy else 0.0 for stage in BUSY_STAGES},
        bottleneck.value if bottleneck else None,
    )


def share_of(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def find_runs(stretches: Sequence[Interval]) -> list[StageInterval]:
    """Return the stage that limited a job over time, with consecutive stretches of one stage merged.

    A stretch without measurements counts as the one before.
    """
    if not stretches:
        return []
    whole = stretches[-1].end - stretches[0].begin
    stages: list[str] = []
    for stretch in stretches:
        stages.append(stretch.bound_by or (stages[-1] if stages else QUEUE))
    runs = []
    for stage, group in groupby(zip(stages, stretches, strict=True), key=lambda pair: pair[0]):
        seconds = sum(stretch.end - stretch.begin for _, stretch in group)
        runs.append(StageInterval(stage, seconds, share_of(seconds, whole)))
    return runs


def chart_rate(stretches: Sequence[Interval]) -> dict[str, Any] | None:
    """Return the chart of texts per second, or None when there are fewer than two stretches.

    Each value is the mean of the time before it, since the start if that is shorter.
    """
    if len(stretches) < 2:
        return None
    x = np.array([stretches[0].begin, *(stretch.end for stretch in stretches)])
    ended = np.cumsum(
        [0.0, *(stretch.items_per_second * (stretch.end - stretch.begin) for stretch in stretches)]
    )
    window = max(SMOOTHED_SECONDS, SMOOTHED_SHARE * (x[-1] - x[0]))
    begins = np.maximum(x - window, x[0])
    begins[0] = x[0] - (x[1] - x[0])  # nothing is known before the first stretch, so its own mean is drawn
    values = (ended - np.interp(begins, x, ended)) / (x - begins)
    values[0] = values[1]
    series = {"label": "texts/s", "values": values.round(1).tolist(), "colour": "--pico-primary"}
    return {"x": x.round(1).tolist(), "series": [series]}


def chart_stages(stretches: Sequence[Interval]) -> dict[str, Any] | None:
    """Return the stacked chart of the stages' shares of the busy time in percent; None with few data."""
    measured = [stretch for stretch in stretches if any(stretch.shares.values())]
    if len(measured) < 2:
        return None
    used = [stage for stage in BUSY_STAGES if any(stretch.shares[stage] > 0.001 for stretch in measured)]
    series = [
        {
            "label": STAGE_WORDS[stage],
            "values": [round(100 * stretch.shares[stage], 1) for stretch in (measured[0], *measured)],
            "colour": f"--s-{stage}",
        }
        for stage in used
    ]
    x = [round(measured[0].begin, 1), *(round(stretch.end, 1) for stretch in measured)]
    return {"x": x, "series": series, "stacked": True, "unit": "%", "most": 100, "legend": False}
