"""RunProgress: how a run stands while somebody watches it, and how it ended. Reads the API's run object only."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from vectormill.client.views import Look, count_ended, describe_counts
from vectormill.jobs.job import RUNNING

# Shown of a run that has ended: its source was empty, or it had none to read.
READ_NOTHING: Final = "no rows read"


def look_at_run(run: Mapping[str, Any]) -> Look:
    """Return the phase of a run, and how far its job is, or else what it has read."""
    encoding = run.get("encoding")
    if encoding is None:
        return Look(describe_stage(run), describe_run_counts(run))
    share = count_ended(encoding) / encoding["num_items"] if encoding["num_items"] else None
    return Look(describe_stage(run), describe_counts(encoding | {"state": RUNNING}), share)


def describe_stage(run: Mapping[str, Any]) -> str:
    """Return the phase of a run at work, or else its state."""
    return str(run["phase"]) if run["state"] == "running" and run["phase"] else str(run["state"])


def describe_run_counts(run: Mapping[str, Any]) -> str:
    """Format what a run has read and changed in one line, without zeros."""
    counts = {name.removeprefix("num_").replace("_", " "): number for name, number in run["counts"].items()}
    told = " · ".join(f"{number:,} {name}" for name, number in counts.items() if number)
    return told or (READ_NOTHING if run.get("finished_at") else "nothing read yet")


def describe_report(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a name and a line for each phase's findings, without those that are empty, unknown, false or zero."""
    for phase, found in report.items():
        if told := describe_findings(found):
            yield f"{phase} found", told


def describe_findings(found: Mapping[str, Any]) -> str:
    """Return names and values in one line."""
    return " · ".join(_findings(found))


def _findings(found: Mapping[str, Any]) -> Iterator[str]:
    for name, value in found.items():
        words = name.removeprefix("num_").replace("_", " ")
        if value in (None, False, "", [], {}):
            continue
        if value is True:
            yield words
        elif isinstance(value, dict):
            yield f"{words}: {', '.join(_findings(value))}"
        elif isinstance(value, list):
            yield f"{words}: {'; '.join(_describe_one(each) for each in value)}"
        elif name.startswith("num_"):
            yield f"{value:,} {words}"
        else:
            yield f"{words} {_describe_one(value)}"


def _describe_one(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(_findings(value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def look_at_indexing(run: Mapping[str, Any]) -> Look:
    """Return the build that is going on, its phase and its share done."""
    share = find_share(run)
    return Look(describe_build_stage(run), "" if share is None else f"{share:.0%}", share)


def find_share(run: Mapping[str, Any]) -> float | None:
    """Return the share done of the current phase of the build, 0 to 1; None when there is none or it is unknown."""
    share = (run["report"].get("indexing", {}).get("progress") or {}).get("share")
    return None if share is None else float(share)


def describe_build_stage(run: Mapping[str, Any]) -> str:
    """Return the current build and its phase, or else the run's state."""
    progress = run["report"].get("indexing", {}).get("progress")
    if run["state"] != "running" or not progress:
        return str(run["state"])
    return f"{progress['index']}: {progress['phase']}"


def describe_outcome(run: Mapping[str, Any]) -> list[str]:
    """List what a run of indexes did, one line for each build or removal with its reason."""
    found = run["report"].get("indexing", {})
    lines = [
        f"Built {made['name']} in {made['seconds']:,.1f} s, {made['num_bytes'] / (1 << 20):,.1f} MiB."
        for made in found.get("built", ())
    ]
    lines += [f"Dropped {gone['name']}: {gone['because']}" for gone in found.get("dropped", ())]
    lines += [f"Kept {name}." for name in found.get("kept", ())]
    lines += found.get("plan", {}).get("reasons", ())
    lines += [str(notice) for notice in found.get("notices", ())]
    return lines + ([run["error"]] if run["error"] else [])
