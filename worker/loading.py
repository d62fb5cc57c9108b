"""LoadingDisplay shows how far a model is loaded: as a live bar on a terminal, otherwise as lines in the log.

It knows nothing about runners or frameworks.
"""

import logging
import time
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from worker.encoder.encoder import Loading

logger = logging.getLogger(__name__)

LOG_PAUSE_SECONDS: Final = 5.0


class LoadingDisplay:
    """Shows the progress of one load after another, as a bar on `console` if one is given.

    Not thread-safe.
    """

    def __init__(self, name: str, console: Console | None = None) -> None:
        self._name = name
        self._console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._since: float | None = None
        self._said_at = 0.0

    def show(self, num_bytes_read: int, num_bytes: int) -> None:
        """Show how many bytes of the weights have been read."""
        now = time.monotonic()
        if self._since is None:
            self._since = self._said_at = now
        if self._console is not None:
            self._draw(self._console, num_bytes_read, num_bytes)
        elif now - self._said_at >= LOG_PAUSE_SECONDS:
            self._said_at = now
            logger.info(
                "Loading %s: %.1f of %.1f GB read in %.0f s",
                self._name,
                num_bytes_read / 1e9,
                num_bytes / 1e9,
                now - self._since,
            )

    def close(self, loadings: Sequence[Loading] = ()) -> None:
        """End the display, because loading has ended, and log the loads that succeeded."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = self._since = None
        for loading in loadings:
            logger.info(
                "Loaded %s on %s: %.2f GB in %.1f s",
                self._name,
                loading.device,
                loading.num_bytes / 1e9,
                loading.seconds,
            )

    def _draw(self, console: Console, num_bytes_read: int, num_bytes: int) -> None:
        if self._bar is None or self._task is None:
            columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
            self._bar = Progress(*columns, console=console, transient=True, refresh_per_second=4)
            self._bar.start()
            self._task = self._bar.add_task(f"loading {self._name}", total=num_bytes)
        self._bar.update(self._task, completed=num_bytes_read)
