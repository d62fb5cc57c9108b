"""IndexProgress: a run of indexes that is watched, as a bar on a terminal and as plain lines elsewhere, on stderr."""

import sys
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

from vectormill.cli.views.progress import PLAIN_PAUSE_SECONDS


class IndexProgress:
    """Shows one run; call it with each answer of the API."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._said: str | None = None
        self._said_at = -PLAIN_PAUSE_SECONDS

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TaskProgressColumn(),
                console=self._console,
                refresh_per_second=4,
            )
            self._bar.start()
            self._task = self._bar.add_task("starting", total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, run: dict[str, Any]) -> None:
        share, stage = find_share(run), describe_stage(run)
        if self._bar is not None and self._task is not None:
            total = None if share is None else 1.0
            self._bar.update(self._task, description=stage, total=total, completed=share or 0.0)
        elif stage != self._said or time.monotonic() - self._said_at >= PLAIN_PAUSE_SECONDS:
            self._said, self._said_at = stage, time.monotonic()
            sys.stderr.write(stage + ("" if share is None else f": {share:.0%}") + "\n")
            sys.stderr.flush()


def find_share(run: dict[str, Any]) -> float | None:
    """Of the phase of the build that goes on, 0 to 1; None when there is none, or it cannot be told."""
    share = (run["report"].get("indexing", {}).get("progress") or {}).get("share")
    return None if share is None else float(share)


def describe_stage(run: dict[str, Any]) -> str:
    """The build that goes on and its phase, else the run's state."""
    progress = run["report"].get("indexing", {}).get("progress")
    if run["state"] != "running" or not progress:
        return str(run["state"])
    return f"{progress['index']}: {progress['phase']}"


def describe_outcome(run: dict[str, Any]) -> list[str]:
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
