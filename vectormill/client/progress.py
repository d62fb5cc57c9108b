"""Show the progress of a job or run: in a notebook, on a terminal, or line by line."""

import html
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from vectormill.jobs.job import PAUSED

if TYPE_CHECKING:
    from rich.console import Console


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


PLAIN_PAUSE_SECONDS: Final = 5.0


class Progress:
    """A display of progress on stderr; call it with each answer of the API. `look_at` returns what to show of it.

    It is a live bar on a terminal, and a plain line every few seconds elsewhere.
    """

    def __init__(
        self, look_at: Callable[[Mapping[str, Any]], ProgressView], console: "Console | None" = None
    ) -> None:
        from rich.console import Console  # imported here, because rich takes 0.05 s
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self._look_at = look_at
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[counts]}"),
            console=console or Console(stderr=True),
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("starting", counts="", total=None)
        self._stage: str | None = None
        self._reason: str | None = None
        self._said_at = -PLAIN_PAUSE_SECONDS

    def __enter__(self) -> Self:
        if self._bar.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar.console.is_terminal:
            self._bar.stop()

    def __call__(self, answer: Mapping[str, Any]) -> None:
        look = self._look_at(answer)
        # A job that is served in turns alternates between no reason and the same one: print that reason once.
        news = look.reason if look.reason != self._reason else None
        self._reason = news or self._reason
        if self._bar.console.is_terminal:
            self._draw(look, news)
        elif news or look.stage != self._stage or time.monotonic() - self._said_at >= PLAIN_PAUSE_SECONDS:
            self._said_at = time.monotonic()
            sys.stderr.write("".join(f"{line}\n" for line in (look.line, news) if line))
            sys.stderr.flush()
        self._stage = look.stage

    def _draw(self, look: ProgressView, news: str | None) -> None:
        if news:
            # Rich would read brackets in a quoted error as markup.
            self._bar.console.print(news, markup=False, emoji=False, highlight=False)
        total = None if look.share is None else 1.0
        self._bar.update(
            self._task, description=look.stage, counts=look.counts, total=total, completed=look.share or 0.0
        )


Show = Callable[[Mapping[str, Any]], None]


@contextmanager
def showing() -> Iterator[Show]:
    """Yield a function that shows the progress of a job; call it with each answer of the API."""
    if is_notebook():
        yield NotebookBar()
    elif sys.stderr.isatty():
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
