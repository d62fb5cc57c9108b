"""Alongside: what goes on, on a thread of its own, while something else is measured. Knows not what."""

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Alongside(ABC):
    """Runs from the beginning of a block to its end, when `is_over` is set: `run` waits for it wherever it pauses."""

    def __init__(self, name: str) -> None:
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self.run, name=name, daemon=True)

    @abstractmethod
    def run(self) -> None:
        """Returns when it is over."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.is_over.set()
        self._thread.join()
