"""What is shown of a run of indexes that is watched, and what it came to. Knows the API's run object alone."""

from collections.abc import Mapping
from typing import Any

from vectormill.client.views.look import Look


def look_at_indexing(run: Mapping[str, Any]) -> Look:
    """The build that goes on, its phase and the share of it that is done."""
    share = find_share(run)
    return Look(describe_stage(run), "" if share is None else f"{share:.0%}", share)


def find_share(run: Mapping[str, Any]) -> float | None:
    """Of the phase of the build that goes on, 0 to 1; None when there is none, or it cannot be told."""
    share = (run["report"].get("indexing", {}).get("progress") or {}).get("share")
    return None if share is None else float(share)


def describe_stage(run: Mapping[str, Any]) -> str:
    """The build that goes on and its phase, else the run's state."""
    progress = run["report"].get("indexing", {}).get("progress")
    if run["state"] != "running" or not progress:
        return str(run["state"])
    return f"{progress['index']}: {progress['phase']}"


def describe_outcome(run: Mapping[str, Any]) -> list[str]:
    """What a run of indexes came to, a line for each thing it did, and why."""
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
