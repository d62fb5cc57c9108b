"""Progress: a job that is watched, as a live bar on a terminal and as a plain line now and then elsewhere.

Writes to stderr, so that stdout holds results only. Knows the API's job object and nothing of how it is fetched.
"""

import sys
import time
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from vectormill.domain.jobs.job import PAUSED

PLAIN_PAUSE_SECONDS: Final = 5.0


class JobProgress:
    """Shows one job after another; call it with each answer of the API."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._state: str | None = None
        self._reason: str | None = None
        self._said_at = -PLAIN_PAUSE_SECONDS

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
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

    def __call__(self, job: dict[str, Any]) -> None:
        # Told once until it is another: a job that gets its turn now and then waits for the same as before.
        reason = job.get("waiting_because")
        is_new = reason is not None and reason != self._reason
        if is_new:
            self._reason = reason
        if self._bar is not None and self._task is not None:
            if is_new:
                self._bar.console.print(Text(reason or ""))  # Text: it may quote an error with brackets
            self._bar.update(
                self._task,
                description=job["state"],
                counts=describe_counts(job),
                total=job["num_items"] or None,
                completed=count_ended(job),
            )
        elif is_new or job["state"] != self._state or time.monotonic() - self._said_at >= PLAIN_PAUSE_SECONDS:
            self._said_at = time.monotonic()
            sys.stderr.write(f"{job['state']}: {describe_counts(job)}\n" + (f"{reason}\n" if is_new else ""))
            sys.stderr.flush()
        self._state = job["state"]


def count_ended(job: dict[str, Any]) -> int:
    """Items that have a vector or an error."""
    return int(job["num_done"]) + int(job["num_failed"])


def describe_counts(job: dict[str, Any]) -> str:
    """Items, failures, rate and remaining time in one line."""
    parts = [f"{count_ended(job):,} of {job['num_items']:,} items"]
    if job["num_failed"]:
        parts.append(f"{job['num_failed']:,} failed")
    if job.get("num_retried_chunks"):
        parts.append(f"{job['num_retried_chunks']:,} chunks retried")
    if job.get("items_per_second") and job["state"] != PAUSED:  # a rate would look as if it went on
        parts.append(f"{job['items_per_second']:,.0f}/s")
    if job.get("eta_seconds"):
        parts.append(f"{describe_seconds(job['eta_seconds'])} left")
    return " · ".join(parts)


def describe_seconds(seconds: float) -> str:
    """12 s, 3:25 min, 4:05 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"
