"""Pages of workers: what each runs on and why, its recent speed, and its part of the placement plan.

A worker that is still loading its model reports less; what is missing is None or left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, Final

from sqlalchemy import Connection

from api.console.console import Console, Page
from vectormill.domain.errors import NotFound
from vectormill.workers.plan_picture import (
    describe_layers,
    describe_replica,
    draw_plan,
    format_gib,
    join_parts,
)
from vectormill.workers.samples import MIB, Sample, list_device_uses, read_samples
from vectormill.workers.workers import ALIVE_SECONDS, Worker, find_worker, list_plan_parts, list_workers

# A line has about a kilobyte, and all lines are sent again when one has changed.
MOST_LINES: Final = 200
MOST_NAME_CHARS: Final = 500
MOST_CHARTED: Final = 4
SPARK_WIDTH: Final = 100
SPARK_HEIGHT: Final = 24
CHOICES: Final = ("device", "backend", "precision", "attention", "way")
UNKNOWN: Final = "–"


@dataclass(frozen=True, slots=True)
class ShownChoice:
    """A choice that a worker made, such as its backend, and the reason for it."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class WorkerView:
    """A worker as its last report describes it.

    `parts` maps the name of this and other workers to their reported parts of the plan.
    """

    worker: Worker
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def report(self) -> Mapping[str, Any]:
        return self.worker.report

    @property
    def state(self) -> str:
        return str(self.report.get("state") or "starting")

    @property
    def state_reason(self) -> str:
        return str(self.report.get("state_reason") or "")

    @cached_property
    def samples(self) -> list[Sample]:
        return read_samples(self.report)

    @property
    def rate(self) -> float | None:
        """Return the tokens per second in the last ten seconds; None without a sample."""
        return self.samples[-1].tokens_per_second if self.samples else None

    @property
    def top_rate(self) -> float:
        return max((sample.tokens_per_second for sample in self.samples), default=0.0)

    @property
    def spark(self) -> str:
        """Return tokens/s as the points of an SVG polyline, `0,24 50,12 100,0`; empty below two samples."""
        if len(self.samples) < 2:
            return ""
        top, step = max(self.top_rate, 1.0), SPARK_WIDTH / (len(self.samples) - 1)
        heights = (SPARK_HEIGHT * (1 - sample.tokens_per_second / top) for sample in self.samples)
        return " ".join(f"{step * place:.1f},{height:.1f}" for place, height in enumerate(heights))

    @property
    def memory_share(self) -> float | None:
        used, total = (
            self.report.get("device_memory_used_bytes"),
            self.report.get("device_memory_total_bytes"),
        )
        return None if used is None or not total else min(1.0, used / total)

    @property
    def memory(self) -> str:
        if self.memory_share is None:
            return UNKNOWN
        used, total = self.report["device_memory_used_bytes"], self.report["device_memory_total_bytes"]
        return f"{format_gib(used)} of {format_gib(total)}"

    @property
    def devices(self) -> str:
        """Return the memory and utilisation of each device that shares the model; empty if it has one."""
        uses = list_device_uses(self.report)
        told = [
            f"{use['name']} {format_gib(use['memory_used_bytes'] or 0)}, busy {100 * (use['utilisation'] or 0):.0f} %"
            for use in uses
        ]
        return "; ".join(told) if len(uses) > 1 else ""

    @property
    def notes(self) -> list[str]:
        return [*(self.report.get("notes") or ()), *(self.report.get("changes_at_restart") or ())]

    @property
    def choices(self) -> list[ShownChoice]:
        return [self.choice(name) for name in CHOICES if self.report.get(name)]

    def choice(self, name: str) -> ShownChoice:
        """Return a choice and its reason; the value is unknown while the model loads."""
        chosen = self.report.get(name)
        if isinstance(chosen, Mapping):
            return ShownChoice(name, str(chosen.get("value", UNKNOWN)), str(chosen.get("reason", "")))
        return ShownChoice(name, UNKNOWN if chosen is None else str(chosen), "")

    @property
    def charts(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield the id, title and data of each chart that has data."""
        moments = [
            round((self.worker.heartbeat_at - timedelta(seconds=sample.seconds_ago)).timestamp())
            for sample in self.samples
        ]
        used = [sample.memory_used_mib for sample in self.samples]
        gib = [None if mib is None else round(mib * MIB / (1 << 30), 2) for mib in used]
        for name, title, unit, values in (
            ("rates", "Tokens per second", "", [sample.tokens_per_second for sample in self.samples]),
            ("memory", "Memory in use, GiB", "GiB", gib),
            ("busy", "Device busy, %", "%", [sample.busy_percent for sample in self.samples]),
        ):
            if any(value is not None for value in values):
                series = [{"label": unit or "tokens/s", "values": values}]
                yield name, title, {"x": moments, "series": series, "unit": unit}

    @property
    def plan(self) -> "WorkerPlan | None":
        """Return the plan that this worker has a part in; None when its report has none that can be drawn."""
        own = self.parts.get(self.worker.name)
        if not own or not own.get("plan") or not own.get("stages"):
            return None
        plan = own["plan"]
        mates = [part for mate, part in self.parts.items() if mate != self.worker.name]
        return WorkerPlan(
            summary=f"{str(plan['strategy']).replace('_', ' ')} in {plan['precision']}; {describe_replica(own)}",
            num_replicas=plan["num_replicas"],
            shards=[ShownShard(shard, stage) for stage in own["stages"] for shard in stage["shards"]],
            reasons=[
                *plan.get("reasons", ()),
                *(f"Not {each['alternative']}: {each['reason']}." for each in plan.get("rejected", ())),
                *plan.get("proposals", ()),
            ],
            picture=draw_plan(join_parts([own, *mates])),
        )


@dataclass(frozen=True, slots=True)
class ShownShard:
    """The contents of one device according to the plan; shares are of the memory that the plan may use."""

    shard: Mapping[str, Any]
    stage: Mapping[str, Any]

    @property
    def layers(self) -> str:
        return describe_layers(self.stage)

    @property
    def weight_share(self) -> float:
        return float(min(1.0, self.shard["weight_bytes"] / max(1, self.shard["capacity_bytes"])))

    @property
    def activation_share(self) -> float:
        share = self.shard["activation_bytes"] / max(1, self.shard["capacity_bytes"])
        return float(min(1.0 - self.weight_share, share))


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """A worker's part of a plan, and a picture of all parts that live workers report."""

    summary: str
    num_replicas: int
    shards: list[ShownShard]
    reasons: list[str]
    picture: str


@dataclass(frozen=True, slots=True)
class WorkersView:
    """All live workers by name.

    `rate` is their total in tokens per second, or None while no worker has reported one.
    """

    workers: list[WorkerView]

    @property
    def lines(self) -> list[WorkerView]:
        return self.workers[:MOST_LINES]

    @property
    def is_small(self) -> bool:
        """Return whether there are so few workers that their charts fit on the page."""
        return len(self.workers) <= MOST_CHARTED

    @property
    def num_models(self) -> int:
        return len({view.worker.model for view in self.workers})

    @property
    def rate(self) -> float | None:
        rates = [view.rate for view in self.workers if view.rate is not None]
        return sum(rates) if rates else None


def read_workers(connection: Connection, console: Console) -> WorkersView:
    return WorkersView([WorkerView(worker) for worker in list_workers(connection)])


def read_worker(connection: Connection, console: Console, name: str) -> WorkerView:
    """Return a worker with its plan. Raise NotFound for a silent worker, or a name that no worker can have.

    A silent worker is never shown again: its next process may run on another device.
    """
    is_possible = len(name) <= MOST_NAME_CHARS and name.isprintable()  # Postgres stores no NUL
    worker = find_worker(connection, name) if is_possible else None
    if worker is None:
        raise NotFound(f"There is no live worker {name[:MOST_NAME_CHARS]!r}; see /console/workers.")
    return WorkerView(worker, list_plan_parts(connection, name))


PAGES: Final = (
    Page(
        path="/console/workers",
        title="Workers",
        lead="The live workers: what each runs on, how fast it is, and what limits it. "
        f"A worker that has been silent for {ALIVE_SECONDS:.0f} s is not listed.",
        template="workers.html",
        read=read_workers,
    ),
    Page(
        path="/console/workers/{name:path}",
        title="Worker {name}",
        template="worker.html",
        read=read_worker,
    ),
)
