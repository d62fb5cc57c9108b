"""RunProgress: a run that is watched, as a live line on a terminal and as plain lines elsewhere. Writes to stderr."""

import sys
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn

from vectormill.cli.views.progress import PLAIN_PAUSE_SECONDS, describe_counts
from vectormill.domain.jobs.job import RUNNING


class RunProgress:
    """Shows one run; call it with each answer of the API."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._stage: tuple[str, str | None] | None = None
        self._said_at = -PLAIN_PAUSE_SECONDS

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                TextColumn("{task.fields[counts]}"),
                console=self._console,
                refresh_per_second=4,
            )
            self._bar.start()
            self._task = self._bar.add_task("starting", counts="", total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, run: dict[str, Any]) -> None:
        stage = (run["state"], run["phase"])
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=describe_stage(run), counts=describe_progress(run))
        elif stage != self._stage or time.monotonic() - self._said_at >= PLAIN_PAUSE_SECONDS:
            self._said_at = time.monotonic()
            sys.stderr.write(f"{describe_stage(run)}: {describe_progress(run)}\n")
            sys.stderr.flush()
        self._stage = stage


def describe_progress(run: dict[str, Any]) -> str:
    """How far the job is while one encodes for it, else what was seen."""
    encoding = run.get("encoding")
    return describe_run_counts(run) if encoding is None else describe_counts(encoding | {"state": RUNNING})


def describe_stage(run: dict[str, Any]) -> str:
    """The phase while it is at work, else the state."""
    return str(run["phase"]) if run["state"] == "running" and run["phase"] else str(run["state"])


def describe_run_counts(run: dict[str, Any]) -> str:
    """What was seen and how it differs, in one line; what is zero is left out."""
    counts = {name.removeprefix("num_").replace("_", " "): number for name, number in run["counts"].items()}
    return " · ".join(f"{number:,} {name}" for name, number in counts.items() if number) or "nothing read yet"
