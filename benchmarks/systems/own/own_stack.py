"""OwnStack: a whole `vectormill up` that no setting of the user reaches. Knows nothing of what it is used for."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from benchmarks.order import BenchmarkFailed
from vectormill.cli.stack import COMMAND, Stack
from vectormill.embedded.running import find_running

# Servers of the user's own, which would be used instead of embedded ones.
FOREIGN_SERVERS: Final = ("VECTORMILL_DATABASE_URL", "VECTORMILL_REDIS_URL")


class OwnStack:
    """Embedded servers and all processes, with converted models kept in the data directory.

    `settings` are variables on top of those that put it on the processor alone; `model` is what its worker loads.
    """

    def __init__(
        self, data_dir: Path, settings: Mapping[str, str] | None = None, model: str | None = None
    ) -> None:
        self._data_dir = data_dir
        self._stack = Stack(data_dir, model, stack_command(data_dir / "cache", settings or {}))

    def __enter__(self) -> Self:
        self._stack.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def wait_until_ready(self) -> str:
        """The API's URL."""
        return self._stack.wait_until_ready()

    @property
    def pid(self) -> int:
        """The process of `up`, once it is ready."""
        running = find_running(self._data_dir)
        if running is None:
            raise BenchmarkFailed("The stack is not running.")
        return running.pid


def stack_command(cache_dir: Path, settings: Mapping[str, str]) -> tuple[str, ...]:
    """The command line of `vectormill`, through env, which replaces itself by it."""
    own = {
        "VECTORMILL_CACHE_DIR": str(cache_dir),
        "VECTORMILL_WORKER_DEVICES": "cpu",
        "VECTORMILL_WORKER_REUSE_BYTES": "0",  # every pass has the same texts: each is to be computed again
        **settings,
    }
    unset = [part for name in FOREIGN_SERVERS for part in ("-u", name)]
    return ("env", *unset, *(f"{name}={value}" for name, value in own.items()), *COMMAND)
