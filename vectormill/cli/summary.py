"""Summary: what a finished job came to, from the API's own answers. Prints nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

CHOICES: Final = ("device", "backend", "precision")


@dataclass(frozen=True, slots=True)
class Line:
    """One fact; `reason` says why it is so, when somebody chose it."""

    name: str
    value: str
    reason: str = ""


def job_seconds(job: Mapping[str, Any]) -> float:
    """Seconds from the submission to the last commit, on the database's clock."""
    created, finished = (datetime.fromisoformat(job[name]) for name in ("created_at", "finished_at"))
    return max((finished - created).total_seconds(), 1e-6)


def summarize_job(
    job: Mapping[str, Any], workers: Sequence[Mapping[str, Any]], model_reason: str = ""
) -> list[Line]:
    """The lines of the table that ends a run; the choices are those of the workers that serve the job's model."""
    seconds = job_seconds(job)
    lines = [
        Line("items", f"{job['num_items']:,}"),
        Line("failed", f"{job['num_failed']:,}"),
        Line("truncated", f"{job['truncated_items']:,}", "longer than the model reads"),
        Line("tokens", f"{job['num_tokens']:,}"),
        Line("seconds", f"{seconds:,.1f}", "from the submission to the last commit"),
        Line("texts/s", f"{job['num_done'] / seconds:,.0f}"),
        Line("tokens/s", f"{job['num_tokens'] / seconds:,.0f}"),
        Line(
            "padding waste", f"{job['padding_waste']:.1%}", "share of the computed tokens that were padding"
        ),
        *describe_stages(job),
        Line("model", job["model"], model_reason),
    ]
    reports = [worker["report"] for worker in workers if worker["model"] == job["model"]]
    return lines + [line for name in CHOICES for line in _choices(name, reports)]


def describe_stages(record: Mapping[str, Any]) -> list[Line]:
    """What bounded a job, and how busy its stages were; nothing while nothing is known of them."""
    lines = []
    bound_by = record.get("bound_by")
    if bound_by:
        lines.append(Line("bound by", bound_by["value"], bound_by["reason"]))
    stages: Mapping[str, Mapping[str, float]] = record.get("stages") or {}
    if stages:
        shares = " · ".join(f"{stage} {figures['share']:.0%}" for stage, figures in stages.items())
        lines.append(
            Line("stages", shares, "of the time with a chunk in hand: of one device, or of one thread")
        )
    return lines


def _choices(name: str, reports: Sequence[Mapping[str, Any]]) -> list[Line]:
    """What the workers report under a name, each different answer once."""
    found = {describe_choice(report, name) for report in reports}
    return [Line(name, value, reason) for value, reason in sorted(found)]


def describe_choice(report: Mapping[str, Any], name: str) -> tuple[str, str]:
    """A choice of a worker's report and its reason. While its model loads, a worker has not chosen yet."""
    choice = report.get(name) or {}
    return str(choice.get("value", "not known yet")), str(choice.get("reason", ""))
