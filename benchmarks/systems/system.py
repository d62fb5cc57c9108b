"""System: whatever encodes mixes of texts, so that it can be timed. The seam for further peers."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.systems.protocol import Pass


@dataclass(frozen=True, slots=True)
class EncodingProcesses:
    """Where to look for memory: what holds the model, and that with all that feeds it and stores what comes out."""

    model: Sequence[psutil.Process]
    whole: Sequence[psutil.Process]


class System(Protocol):
    """Made with mixes of texts, and entered; encodes a whole mix whenever it is asked. Raises BenchmarkFailed."""

    name: str

    def __enter__(self) -> object:
        """Starts its processes and loads the model."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends all that it started."""
        ...

    def warm_up(self, mix: str) -> None:
        """Encodes a tenth of the mix, so that nothing is done for the first time when it is timed."""
        ...

    def encode(self, mix: str) -> Pass:
        """Encodes all texts of the mix."""
        ...

    def vectors(self) -> NDArray[np.float32]:
        """Those of the last pass [n, dimension], in the order of its texts."""
        ...

    def report(self) -> dict[str, Any]:
        """What it says of its backend, precision and stages; empty when it says nothing."""
        ...

    def find_processes(self) -> EncodingProcesses:
        """The processes that encode."""
        ...
