"""MissingSystem: takes the place of a system that cannot be had here, so that its row says why."""

from typing import Any, NoReturn

from benchmarks.order import BenchmarkFailed


class MissingSystem:
    """Raises its reason when it is entered; nothing else is ever asked of it."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self._reason = reason

    def __enter__(self) -> NoReturn:
        raise BenchmarkFailed(self._reason)

    def __exit__(self, *exception: object) -> None:
        """Nothing was started."""

    def warm_up(self, mix: str) -> NoReturn:
        raise BenchmarkFailed(self._reason)

    def encode(self, mix: str) -> NoReturn:
        raise BenchmarkFailed(self._reason)

    def vectors(self) -> NoReturn:
        raise BenchmarkFailed(self._reason)

    def report(self) -> dict[str, Any]:
        return {}

    def find_processes(self) -> NoReturn:
        raise BenchmarkFailed(self._reason)
