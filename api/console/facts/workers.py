"""Workers for a page: what each runs on and why, how it did in the last minutes, and its part of the plan.

Whatever an older worker does not report is None, or left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from vectormill.workers.plan_picture import (
    describe_layers,
    describe_replica,
    draw_plan,
    format_gib,
    join_parts,
)
from vectormill.workers.samples import MIB, Sample, read_samples
from vectormill.workers.workers import Worker

SPARK_WIDTH: Final = 100
SPARK_HEIGHT: Final = 24
CHOICES: Final = ("device", "backend", "precision", "attention", "batching")


@dataclass(frozen=True, slots=True)
class ShownChoice:
    """A worker's choice and its reason."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """A worker in a list. `rate` is of the last ten seconds; None while no sample is there."""

    name: str
    model: str
    state: str
    state_reason: str
    device: str
    backend: str
    precision: str
    rate: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    busy: float | None
    bound_by: str
    samples: list[Sample]
    heartbeat_at: datetime

    @property
    def memory_share(self) -> float | None:
        if self.memory_used_bytes is None or not self.memory_total_bytes:
            return None
        return min(1.0, self.memory_used_bytes / self.memory_total_bytes)

    @property
    def memory(self) -> str:
        if self.memory_used_bytes is None or not self.memory_total_bytes:
            return "–"
        return f"{format_gib(self.memory_used_bytes)} of {format_gib(self.memory_total_bytes)}"

    @property
    def top_rate(self) -> float:
        return max((sample.tokens_per_second for sample in self.samples), default=0.0)

    @property
    def spark(self) -> str:
        """Tokens a second as the points of a polyline; empty of fewer than two samples."""
        return draw_spark([sample.tokens_per_second for sample in self.samples])


def read_line(worker: Worker) -> WorkerLine:
    report = worker.report
    samples = read_samples(report)
    bound_by = report.get("bound_by") or {}
    return WorkerLine(
        name=worker.name,
        model=worker.model,
        state=str(report.get("state") or "starting"),
        state_reason=str(report.get("state_reason") or ""),
        device=_read_choice(report, "device")[0],
        backend=_read_choice(report, "backend")[0],
        precision=_read_choice(report, "precision")[0],
        rate=samples[-1].tokens_per_second if samples else None,
        memory_used_bytes=report.get("device_memory_used_bytes"),
        memory_total_bytes=report.get("device_memory_total_bytes"),
        busy=report.get("device_utilisation"),
        bound_by=str(bound_by.get("value", "–")),
        samples=samples,
        heartbeat_at=worker.heartbeat_at,
    )


def draw_spark(values: Sequence[float]) -> str:
    """`0,24 50,12 100,0`: SVG's points, the largest value at the top."""
    if len(values) < 2:
        return ""
    top = max(*values, 1.0)
    step = SPARK_WIDTH / (len(values) - 1)
    return " ".join(
        f"{step * place:.1f},{SPARK_HEIGHT - value / top * SPARK_HEIGHT:.1f}"
        for place, value in enumerate(values)
    )


@dataclass(frozen=True, slots=True)
class ShardRow:
    """The contents of one device; shares are of the memory that the plan may use."""

    device: str
    layers: str
    weights: str
    activations: str
    capacity: str
    weight_share: float
    activation_share: float


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """This worker's part, and the picture of all parts that live workers report."""

    summary: str
    num_replicas: int
    shards: list[ShardRow]
    reasons: list[str]
    picture: str


@dataclass(frozen=True, slots=True)
class WorkerDetail:
    """A worker whole. Charts are what the macro of that name draws; None without samples."""

    line: WorkerLine
    started_at: datetime
    slots: int
    choices: list[ShownChoice]
    notes: list[str]
    bound_reason: str
    padding: float | None
    num_restarts: int
    rates: dict[str, Any] | None
    memory: dict[str, Any] | None
    busy: dict[str, Any] | None
    plan: WorkerPlan | None


def read_detail(worker: Worker, parts: Mapping[str, Mapping[str, Any]]) -> WorkerDetail:
    """`parts` are what its mates and it report of their plan, by worker."""
    report, line = worker.report, read_line(worker)
    samples, at = line.samples, worker.heartbeat_at
    return WorkerDetail(
        line=line,
        started_at=worker.started_at,
        slots=worker.slots,
        choices=[ShownChoice(name, *_read_choice(report, name)) for name in CHOICES if report.get(name)],
        notes=[
            str(note) for note in [*(report.get("notes") or ()), *(report.get("changes_at_restart") or ())]
        ],
        bound_reason=str((report.get("bound_by") or {}).get("reason", "")),
        padding=report.get("padding_waste"),
        num_restarts=int(report.get("num_restarts") or 0),
        rates=_chart(samples, at, "", [sample.tokens_per_second for sample in samples]),
        memory=_chart(
            samples,
            at,
            "GiB",
            [
                None if sample.memory_used_mib is None else round(sample.memory_used_mib * MIB / (1 << 30), 2)
                for sample in samples
            ],
        ),
        busy=_chart(samples, at, "%", [sample.busy_percent for sample in samples]),
        plan=_read_plan(worker.name, parts),
    )


def _chart(
    samples: Sequence[Sample], at: datetime, unit: str, values: Sequence[float | None]
) -> dict[str, Any] | None:
    """Return the data of a chart; None where nothing is known, rather than an empty picture."""
    if all(value is None for value in values):
        return None
    moments = [(at - timedelta(seconds=sample.seconds_ago)).timestamp() for sample in samples]
    return {
        "x": [round(moment) for moment in moments],
        "series": [{"label": unit or "tokens/s", "values": list(values)}],
        "unit": unit,
    }


def _read_plan(name: str, parts: Mapping[str, Mapping[str, Any]]) -> WorkerPlan | None:
    """Return the plan of a worker; None when its report has no plan that can be drawn."""
    try:
        own = parts[name]
        plan = own["plan"]
        return WorkerPlan(
            summary=f"{str(plan['strategy']).replace('_', ' ')} in {plan['precision']}; {describe_replica(own)}",
            num_replicas=plan["num_replicas"],
            shards=[_read_shard(shard, stage) for stage in own["stages"] for shard in stage["shards"]],
            reasons=[
                *plan.get("reasons", ()),
                *(f"Not {each['alternative']}: {each['reason']}." for each in plan.get("rejected", ())),
                *plan.get("proposals", ()),
            ],
            picture=draw_plan(join_parts([own, *(part for mate, part in parts.items() if mate != name)])),
        )
    except (KeyError, TypeError):  # of a release that tells it otherwise
        return None


def _read_shard(shard: Mapping[str, Any], stage: Mapping[str, Any]) -> ShardRow:
    capacity = max(1, shard["capacity_bytes"])
    weights = min(1.0, shard["weight_bytes"] / capacity)
    return ShardRow(
        device=shard["device"],
        layers=describe_layers(stage),
        weights=format_gib(shard["weight_bytes"]),
        activations=format_gib(shard["activation_bytes"]),
        capacity=format_gib(shard["capacity_bytes"]),
        weight_share=weights,
        activation_share=min(1.0 - weights, shard["activation_bytes"] / capacity),
    )


def _read_choice(report: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Return a choice and its reason; while the model loads, nothing is chosen yet."""
    choice = report.get(name)
    if isinstance(choice, Mapping):
        return str(choice.get("value", "–")), str(choice.get("reason", ""))
    return ("–" if choice is None else str(choice)), ""
