"""Job views: what the pages of jobs show, computed before a template sees it. Reads nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from api.console.jobs.history import BUSY_STAGES, Stretch
from vectormill.domain.tasks.task import RESULT_ROUTES, VECTOR
from vectormill.files.formats import OUTPUT_FORMATS
from vectormill.jobs.bottleneck import (
    COLLATE,
    COLLECT,
    LOAD,
    PERSIST,
    QUEUE,
    RUN,
    STAGES,
    TOKENIZE,
    WAIT,
)
from vectormill.jobs.job import (
    COMPLETED_WITH_ERRORS,
    FAILED,
    PAUSED,
    STEERABLE_JOB_STATES,
    UPLOADING,
    Job,
)
from vectormill.jobs.jobs import ItemError

# The work of each stage, for a reader who has not seen its code.
STAGE_WORDS: Final = {
    LOAD: "texts are read from Postgres",
    TOKENIZE: "texts become tokens",
    WAIT: "chunks wait for the device, nothing is busy with them",
    COLLATE: "batches are laid out",
    RUN: "the model computes",
    COLLECT: "vectors are taken from the device",
    PERSIST: "vectors are committed to Postgres",
    QUEUE: "no chunk is at a worker",
}


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage of a job: its seconds, and its share of the busy ones of all; None of the one that is no work."""

    name: str
    words: str
    seconds: float
    share: float | None


@dataclass(frozen=True, slots=True)
class StageStretch:
    """Neighbouring stretches that one stage bounded; place and width are shares of the whole time."""

    stage: str
    seconds: float
    width: float


@dataclass(frozen=True, slots=True)
class Action:
    """A button: what it does, and the question that is asked before."""

    name: str
    title: str
    question: str | None = None


PAUSE: Final = Action("pause", "Pause")
RESUME: Final = Action("resume", "Resume")
RETRY: Final = Action("retry", "Retry failed texts")
CANCEL: Final = Action(
    "cancel", "Cancel", "Cancel this job? Vectors that are committed stay; the rest is not encoded."
)


@dataclass(frozen=True, slots=True)
class JobView:
    """A job with what it waits for, its errors so far (the first page) and how it went while somebody looked."""

    job: Job
    waiting_because: str | None
    errors: Sequence[ItemError]
    has_more_errors: bool
    stretches: Sequence[Stretch]

    @property
    def done_share(self) -> float:
        return share_of(self.job.num_done, self.job.num_items)

    @property
    def failed_share(self) -> float:
        return share_of(self.job.num_failed, self.job.num_items)

    @property
    def wishes(self) -> list[Action]:
        return list_wishes(self.job)

    @property
    def stages(self) -> list[StageRow]:
        spent = self.job.stage_seconds
        total = sum(spent.get(stage, 0.0) for stage in BUSY_STAGES)
        return [
            StageRow(
                stage,
                STAGE_WORDS[stage],
                spent[stage],
                share_of(spent[stage], total) if stage in BUSY_STAGES else None,
            )
            for stage in STAGES
            if stage in spent
        ]

    @property
    def runs(self) -> list[StageStretch]:
        return find_runs(self.stretches)

    @property
    def rate_chart(self) -> dict[str, Any] | None:
        return chart_rate(self.stretches)

    @property
    def stage_chart(self) -> dict[str, Any] | None:
        return chart_stages(self.stretches)

    @property
    def options(self) -> dict[str, Any]:
        """The options that were given or follow from the model, without empty ones."""
        return {
            name: value for name, value in self.job.spec.describe().items() if value not in (None, "", [], {})
        }

    @property
    def exports(self) -> list[str]:
        """The formats in which its results can be read now."""
        if self.job.state == UPLOADING or not (self.job.is_terminal or self.job.num_done):
            return []
        return [
            name for name, row in OUTPUT_FORMATS.items() if self.job.spec.result == VECTOR or row.has_keys
        ]

    @property
    def results(self) -> str:
        return RESULT_ROUTES[self.job.spec.result]


def share_of(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def list_wishes(job: Job) -> list[Action]:
    """List the actions that the job allows now; docs/STATES.md has the table."""
    wishes = []
    if job.state == PAUSED:
        wishes.append(RESUME)
    elif job.state in STEERABLE_JOB_STATES:
        wishes.append(PAUSE)
    if job.state in (COMPLETED_WITH_ERRORS, FAILED) or (job.state == PAUSED and job.num_failed):
        wishes.append(RETRY)
    if job.state in STEERABLE_JOB_STATES:
        wishes.append(CANCEL)
    return wishes


def find_runs(stretches: Sequence[Stretch]) -> list[StageStretch]:
    """Return what bounded the job and when, in order; a stretch without measurements counts as the one before."""
    if not stretches:
        return []
    whole = stretches[-1].end - stretches[0].begin
    stages: list[str] = []
    for stretch in stretches:
        stages.append(stretch.bound_by or (stages[-1] if stages else QUEUE))
    runs = []
    for stage, group in groupby(zip(stages, stretches, strict=True), key=lambda pair: pair[0]):
        seconds = sum(stretch.end - stretch.begin for _, stretch in group)
        runs.append(StageStretch(stage, seconds, share_of(seconds, whole)))
    return runs


def chart_rate(stretches: Sequence[Stretch]) -> dict[str, Any] | None:
    """Return texts a second; None while a line would have no shape."""
    if len(stretches) < 2:
        return None
    x, values = [round(stretches[0].begin, 1)], [round(stretches[0].items_per_second, 1)]
    for stretch in stretches:
        x.append(round(stretch.end, 1))
        values.append(round(stretch.items_per_second, 1))
    return {"x": x, "series": [{"label": "texts/s", "values": values, "colour": "--pico-primary"}]}


def chart_stages(stretches: Sequence[Stretch]) -> dict[str, Any] | None:
    """Return the stages' shares of the busy time, on top of one another, in percent."""
    measured = [stretch for stretch in stretches if any(stretch.shares.values())]
    if len(measured) < 2:
        return None
    used = [stage for stage in BUSY_STAGES if any(stretch.shares[stage] > 0.001 for stretch in measured)]
    series = [
        {
            "label": stage,
            "values": [round(100 * stretch.shares[stage], 1) for stretch in (measured[0], *measured)],
            "colour": f"--s-{stage}",
        }
        for stage in used
    ]
    x = [round(measured[0].begin, 1), *(round(stretch.end, 1) for stretch in measured)]
    return {"x": x, "series": series, "stacked": True, "unit": "%", "most": 100, "legend": False}
