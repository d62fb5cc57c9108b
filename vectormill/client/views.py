"""Describe the progress of a job or run for display, and show a progress bar in a notebook."""

import html
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from vectormill.jobs.job import PAUSED


@dataclass(frozen=True, slots=True)
class ProgressView:
    """The progress of a job or run, as it is displayed.

    `share` is the part of `stage` that is done, from 0 to 1; None if unknown. `reason` says why the job
    waits; it is shown once, until it changes.
    """

    stage: str
    counts: str = ""
    share: float | None = None
    reason: str | None = None

    @property
    def line(self) -> str:
        return f"{self.stage}: {self.counts}" if self.counts else self.stage


def look_at_job(job: Mapping[str, Any]) -> ProgressView:
    """Return a job's state, its counts and the reason why it waits, or why its objects could not be read."""
    num_items, reading = job["num_items"], job.get("input")
    if reading is not None and not num_items:
        reason = job.get("waiting_because") or reading["error"]
        if num_compared := reading["num_compared"]:
            counts = f"{num_compared:,} of {reading['num_items']:,} keys compared"
            return ProgressView(job["state"], counts, num_compared / reading["num_items"], reason)
        return ProgressView(job["state"], f"{reading['num_items']:,} rows found", None, reason)
    share = count_ended(job) / num_items if num_items else None
    return ProgressView(job["state"], describe_counts(job), share, job.get("waiting_because"))


def count_ended(job: Mapping[str, Any]) -> int:
    """Return the number of items that have a result or an error."""
    return int(job["num_done"]) + int(job["num_failed"])


def describe_counts(job: Mapping[str, Any]) -> str:
    """Format a job's items, failures, rate and remaining time as one line."""
    parts = [f"{count_ended(job):,} of {job['num_items']:,} items"]
    if job["num_failed"]:
        parts.append(f"{job['num_failed']:,} failed")
    if job.get("num_retried_chunks"):
        parts.append(f"{job['num_retried_chunks']:,} chunks retried")
    seconds_left = job.get("eta_seconds")
    rate = (
        (job["num_items"] - count_ended(job)) / seconds_left if seconds_left else job.get("items_per_second")
    )
    # A rate would suggest that a paused job is running.
    if rate and job["state"] != PAUSED:
        parts.append(f"{rate:,.0f}/s")
    if seconds_left:
        parts.append(f"{describe_seconds(seconds_left)} left")
    return " · ".join(parts)


def describe_seconds(seconds: float) -> str:
    """Format a duration, such as 12 s, 3:25 min or 4:05 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


Show = Callable[[Mapping[str, Any]], None]


@contextmanager
def showing() -> Iterator[Show]:
    """Yield a function that shows the progress of a job; call it with each answer of the API."""
    if is_notebook():
        yield NotebookBar()
    elif sys.stderr.isatty():
        from vectormill.client.progress import Progress  # importing rich takes 0.05 s

        with Progress(look_at_job) as progress:
            yield progress
    else:
        yield lambda job: None


def is_notebook() -> bool:
    """Return whether a Jupyter kernel runs this code, which shows HTML but no terminal control codes."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class Handle(Protocol):
    """The handle that IPython returns for something displayed, through which it is updated."""

    def update(self, shown: Any, *, raw: bool) -> None: ...


class NotebookBar:
    """A line and a bar below a notebook cell, redrawn with each answer.

    It is plain HTML and no widget, so that it is saved with the notebook.
    """

    def __init__(self) -> None:
        self._handle: Handle | None = None

    def __call__(self, job: Mapping[str, Any]) -> None:
        shown = describe_look(look_at_job(job))
        if self._handle is not None:
            self._handle.update(shown, raw=True)
            return
        from IPython.display import display

        self._handle = display(shown, raw=True, display_id=True)  # type: ignore[no-untyped-call]


def describe_look(look: ProgressView) -> dict[str, str]:
    """Return the progress by media type: a bar in HTML, and a line of plain text."""
    reason = f"<br><small>{html.escape(look.reason)}</small>" if look.reason else ""
    share = "" if look.share is None else f' value="{look.share:.4f}"'
    return {
        "text/plain": look.line,
        "text/html": f'<progress max="1"{share} style="width: 20em"></progress> '
        f"{html.escape(look.stage)} {html.escape(look.counts)}{reason}",
    }
