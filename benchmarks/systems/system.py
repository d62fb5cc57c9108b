"""System: whatever encodes the texts of the main job, so that it can be timed. The seam for further peers."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np
import psutil
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Pass:
    """All texts encoded once. Tokens are real ones; computed tokens have the padding with them."""

    seconds: float
    num_tokens: int
    num_computed_tokens: int

    @property
    def padding_waste(self) -> float:
        """Share of the computed tokens that were padding."""
        return 1 - self.num_tokens / self.num_computed_tokens if self.num_computed_tokens else 0.0


@dataclass(frozen=True, slots=True)
class EncodingProcesses:
    """Where to look for memory: what holds the model, and that with all that feeds it and stores what comes out."""

    model: Sequence[psutil.Process]
    whole: Sequence[psutil.Process]


class System(Protocol):
    """Made with the texts it will encode, and entered; encodes them all whenever it is asked."""

    name: str

    def __enter__(self) -> object:
        """Starts its processes and loads the model."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends all that it started."""
        ...

    def warm_up(self) -> None:
        """Encodes a tenth of the texts, so that nothing is done for the first time when it is timed."""
        ...

    def encode(self) -> Pass:
        """Encodes all texts."""
        ...

    def vectors(self) -> NDArray[np.float32]:
        """Those of the last pass [n, dimension], in the order of the texts."""
        ...

    def find_processes(self) -> EncodingProcesses:
        """The processes that encode."""
        ...
