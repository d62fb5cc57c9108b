"""What is shown of a run that is watched, and how it came out. Knows the API's run object alone."""

from typing import Any

from vectormill.cli.views.job_progress import count_ended, describe_counts
from vectormill.cli.views.progress import Look
from vectormill.domain.jobs.job import RUNNING


def look_at_run(run: dict[str, Any]) -> Look:
    """Its phase, and how far the job is while one encodes for it, else what was seen."""
    encoding = run.get("encoding")
    if encoding is None:
        return Look(describe_stage(run), describe_run_counts(run))
    share = count_ended(encoding) / encoding["num_items"] if encoding["num_items"] else None
    return Look(describe_stage(run), describe_counts(encoding | {"state": RUNNING}), share)


def describe_stage(run: dict[str, Any]) -> str:
    """The phase while it is at work, else the state."""
    return str(run["phase"]) if run["state"] == "running" and run["phase"] else str(run["state"])


def describe_run_counts(run: dict[str, Any]) -> str:
    """What was seen and how it differs, in one line; what is zero is left out."""
    counts = {name.removeprefix("num_").replace("_", " "): number for name, number in run["counts"].items()}
    return " · ".join(f"{number:,} {name}" for name, number in counts.items() if number) or "nothing read yet"
