"""Crash points: the named steps of a process, and the one at which it ends as by SIGKILL.

The names come from the SQL constants, the COMMITs and the messages (tests.statements), so a new statement is a new
point by itself. A process tells every point that it reaches through a pipe before it goes on, or goes no further.
"""

import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from typing import Any

from tests.statements import COMMIT, Driver


class CrashPoints:
    """Watches an engine; with `last` given, the process dies at the point of that number, counted from 0."""

    def __init__(self, pipe: Pipe, last: int | None) -> None:
        self._pipe = pipe
        self._last = last
        self._num_points = 0
        self._lock = threading.Lock()

    def before(self, driver: Driver, step: str) -> None:
        self.reach(f"before {step}")

    def after_commit(self, driver: Driver) -> None:
        self.reach(f"after {COMMIT}")

    def reach(self, name: str) -> None:
        with self._lock:
            self._pipe.send(name)
            if self._num_points == self._last:
                os.kill(os.getpid(), signal.SIGKILL)
            self._num_points += 1

    def surround(self, owner: Any, method: str, name: str) -> None:
        """Makes what a library's method does a step with a point before and a point after it."""
        original: Callable[..., Any] = getattr(owner, method)

        def step(*arguments: Any, **options: Any) -> Any:
            self.reach(f"before {name}")
            answer = original(*arguments, **options)
            self.reach(f"after {name}")
            return answer

        setattr(owner, method, step)
