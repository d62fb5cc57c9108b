"""Summary: what a finished job came to, from the API's own answers. Prints nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from vectormill.domain.tasks.task import EMBED, TASKS, VECTOR
from vectormill.jobs.bottleneck import WAIT

SWITCHES: Final = "switches"
CHOICES: Final = ("device", "backend", "precision", SWITCHES)


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact; `reason` says why it is so, when somebody chose it."""

    name: str
    value: str
    reason: str = ""


def job_seconds(job: Mapping[str, Any]) -> float:
    """Return seconds from the submission to the last commit, on the database's clock."""
    created, finished = (datetime.fromisoformat(job[name]) for name in ("created_at", "finished_at"))
    return max((finished - created).total_seconds(), 1e-6)


def summarize_job(
    job: Mapping[str, Any], workers: Sequence[Mapping[str, Any]], model_reason: str = ""
) -> list[Fact]:
    """Return the lines of the table that ends a run; the choices are those of the workers that serve the job's
    model.
    """
    seconds = job_seconds(job)
    lines = [
        Fact("items", f"{job['num_items']:,}"),
        Fact("failed", f"{job['num_failed']:,}"),
        *_long_text_lines(job),
        *_reuse_lines(job),
        Fact("tokens", f"{job['num_tokens']:,}"),
        Fact("seconds", f"{seconds:,.1f}", "from the submission to the last commit"),
        Fact("texts/s", f"{job['num_done'] / seconds:,.0f}"),
        Fact("tokens/s", f"{job['num_tokens'] / seconds:,.0f}"),
        Fact(
            "padding waste", f"{job['padding_waste']:.1%}", "share of the computed tokens that were padding"
        ),
        *describe_stages(job),
        Fact("model", job["model"], model_reason),
    ]
    reports = [worker["report"] for worker in workers if worker["model"] == job["model"]]
    told = [name for name in CHOICES if name != SWITCHES or any(report.get(SWITCHES) for report in reports)]
    return lines + [line for name in told for line in _choices(name, reports)]


def _long_text_lines(job: Mapping[str, Any]) -> list[Fact]:
    lines = [Fact("truncated", f"{job['truncated_items']:,}", f"longer than {_limit(job)}, and cut there")]
    if job.get("num_passages"):
        lines.append(
            Fact("passages", f"{job['num_passages']:,}", f"that texts longer than {_limit(job)} were read in")
        )
    return lines


def _reuse_lines(job: Mapping[str, Any]) -> list[Fact]:
    if not job.get("num_reused"):
        return []
    return [
        Fact("reused", f"{job['num_reused']:,}", "that got the vector of an equal text, and were not encoded")
    ]


def describe_long_texts(job: Mapping[str, Any]) -> list[str]:
    """Sentences that say what became of texts longer than the model reads; none when there was none."""
    sentences = []
    num_cut, num_passages = job["truncated_items"], job.get("num_passages", 0)
    if num_cut:
        subject = "1 text was" if num_cut == 1 else f"{num_cut:,} texts were"
        # Vectors of passages can be joined, scores and records cannot.
        other = ", or submit with --long-texts passages" if _has_vectors(job) else ""
        sentences.append(
            f"{subject} longer than {_limit(job)} and cut there; list them with `vectormill truncated {job['id']}`"
            f"{other}."
        )
    if num_passages:
        sentences.append(f"Texts longer than {_limit(job)} were read in {num_passages:,} passages.")
    return sentences


def describe_missing_prompt(job: Mapping[str, Any], models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence where the authors of the job's model want a prompt and the job has none."""
    if job["options"].get("prompt") or not _has_vectors(job):
        return []
    told = [model.get("unprompted") for model in models if model["name"] == job["model"]]
    return [f"The texts were encoded without a prompt. {sentence}" for sentence in told if sentence]


def _has_vectors(job: Mapping[str, Any]) -> bool:
    return TASKS[job["options"].get("task", EMBED)].result == VECTOR


def _limit(job: Mapping[str, Any]) -> str:
    max_tokens = job["options"].get("max_tokens")
    return f"{max_tokens:,} tokens" if max_tokens else "the model reads"


def describe_stages(record: Mapping[str, Any]) -> list[Fact]:
    """Describe what bounded a job and how busy its stages were; return no lines while that is unknown."""
    lines = []
    bound_by = record.get("bound_by")
    if bound_by:
        lines.append(Fact("bound by", bound_by["value"], bound_by["reason"]))
    stages: Mapping[str, Mapping[str, float]] = record.get("stages") or {}
    if stages:
        # Waiting is no work, and with several chunks in hand most of them wait: several hundred per cent say nothing.
        busy = {stage: figures["share"] for stage, figures in stages.items() if stage != WAIT}
        shares = " · ".join(f"{stage} {share:.0%}" for stage, share in busy.items())
        lines.append(
            Fact("stages", shares, "of the time with a chunk in hand: of one device, or of one thread")
        )
    return lines


WORKER_COLUMNS: Final = (
    "name",
    "model",
    "state",
    "device",
    "plan",
    "loaded",
    "tokens/s",
    "padding",
    "memory",
    "in use",
    "bound by",
)


def summarize_worker(worker: Mapping[str, Any]) -> dict[str, str]:
    """Return one row of figures by WORKER_COLUMNS; a dash for what the worker does not tell."""
    report: Mapping[str, Any] = worker["report"]
    bound_by = report.get("bound_by") or {}
    return {
        "name": worker["name"],
        "model": worker["model"],
        "state": str(report.get("state", "-")),
        "device": describe_choice(report, "device")[0],
        "plan": describe_plan(report),
        "loaded": _describe_loading(report),
        "tokens/s": _figure(report.get("tokens_per_second"), "{:,.0f}"),
        "padding": _figure(report.get("padding_waste"), "{:.1%}"),
        "memory": _describe_memory(report),
        "in use": _figure(report.get("device_utilisation"), "{:.0%}"),
        "bound by": str(bound_by.get("value", "-")),
    }


def describe_plan(report: Mapping[str, Any]) -> str:
    """Strategy and layers, those of one stage after another; a worker that loads does not tell them all."""
    placement = report.get("placement")
    if not placement:
        return "-"
    stages = " | ".join(
        f"{stage['first_layer']}-{stage['first_layer'] + stage['num_layers'] - 1}"
        for stage in placement["stages"]
    )
    num_shards = max(len(stage["shards"]) for stage in placement["stages"])
    cut = f", each over {num_shards} devices" if num_shards > 1 else ""
    return f"{placement['strategy'].replace('_', ' ')}: layers {stages}{cut}"


def _describe_loading(report: Mapping[str, Any]) -> str:
    """Describe what all processes of the replica have read, and how long the slowest took."""
    loadings = report.get("loadings")
    if not loadings:
        return "-"
    num_bytes = sum(loading["num_bytes"] for loading in loadings)
    return f"{num_bytes / 1e9:.2f} GB in {max(loading['seconds'] for loading in loadings):.1f} s"


def _describe_memory(report: Mapping[str, Any]) -> str:
    used, total = (report.get(f"device_memory_{name}_bytes") for name in ("used", "total"))
    if used is None or total is None:
        return "-"
    return f"{used / (1 << 30):.1f} of {total / (1 << 30):.0f} GiB"


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _choices(name: str, reports: Sequence[Mapping[str, Any]]) -> list[Fact]:
    """List what the workers report under a name, each different answer once."""
    found = {describe_choice(report, name) for report in reports}
    return [Fact(name, value, reason) for value, reason in sorted(found)]


def describe_choice(report: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Return a choice in a worker's report and its reason; a worker that is loading its model has not chosen yet."""
    choice = report.get(name) or {}
    if name == SWITCHES and name in report:
        return ", ".join(report[name]) or "none", ""
    if not isinstance(choice, Mapping):
        return str(choice), ""
    return str(choice.get("value", "not known yet")), str(choice.get("reason", ""))
