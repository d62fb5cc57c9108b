"""Steps: what the benchmarks do now, live on a terminal and as lines elsewhere. Knows nothing of what is measured."""

import time
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

# A drawing thread takes time from what is measured: four times a second is too little to be seen in a result.
REFRESH_PER_SECOND: Final = 4


class Steps:
    """One bar per benchmark; finished benchmarks stay on the screen. Writes to stderr."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.fields[benchmark]:<12}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            refresh_per_second=REFRESH_PER_SECOND,
            disable=not self._console.is_terminal,
        )
        self._name = ""
        self._num_steps = 0
        self._num_begun = 0
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, name: str, num_steps: int) -> None:
        """A benchmark starts that will take so many steps."""
        self._name, self._num_steps, self._num_begun = name, num_steps, 0
        self._began = time.monotonic()
        self._task = self._bar.add_task("", total=num_steps, benchmark=name)

    def step(self, sentence: str) -> None:
        """The next step starts, which ends the one before."""
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self._num_begun, description=sentence)
        self._num_begun += 1
        if not self._console.is_terminal:
            seconds = time.monotonic() - self._began
            line = f"{self._name} {self._num_begun}/{self._num_steps} after {seconds:.0f} s: {sentence}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def end(self) -> None:
        """The benchmark is finished. Raises AssertionError when it announced another number of steps."""
        assert self._num_begun == self._num_steps, f"{self._name} took {self._num_begun} steps"
        self._bar.update(self._task, completed=self._num_steps, description="")
