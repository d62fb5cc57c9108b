"""Show the progress of a job or run: a live bar on a terminal, and a plain line every few seconds elsewhere.

Writes to stderr, so that stdout holds results only.
"""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from vectormill.client.views import ProgressView

PLAIN_PAUSE_SECONDS: Final = 5.0


class Progress:
    """A progress display; call it with each answer of the API.

    `look_at` returns what to show of an answer.
    """

    def __init__(
        self, look_at: Callable[[Mapping[str, Any]], ProgressView], console: Console | None = None
    ) -> None:
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
            # Text, because Rich would read brackets in a quoted error as markup.
            self._bar.console.print(Text(news))
        total = None if look.share is None else 1.0
        self._bar.update(
            self._task, description=look.stage, counts=look.counts, total=total, completed=look.share or 0.0
        )
