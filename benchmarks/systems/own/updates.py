"""What keeps the index of a table in step, each seen as something that can be told to do so now."""

import json
import os
import select
import subprocess
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

from benchmarks.order import BenchmarkFailed
from benchmarks.peers.environment import ROOT, prepare_environment
from benchmarks.systems.own.articles import TABLE, Articles
from benchmarks.systems.own.own_indexer import COLLECTION, OPTIONS
from benchmarks.systems.own.own_stack import OwnStack
from vectormill.client import Client
from vectormill.embedded.running import find_running
from vectormill.processes.logfile import open_log, tail_of

COCOINDEX: Final = "cocoindex"
STOP_SECONDS: Final = 15.0
ANSWER_SECONDS: Final = 3600.0
POLL_SECONDS: Final = 0.02


class Updates(Protocol):
    """`update` brings the index in step with its table and answers the seconds that it took."""

    name: str

    def update(self) -> float: ...


class CocoIndexUpdates:
    """CocoIndex from its package, in an environment and a process of its own, its model loaded from `model`."""

    name = "CocoIndex"

    def __init__(self, database_url: str, model: Path, directory: Path) -> None:
        self._order = {"database_url": database_url, "model": str(model), "table": TABLE}
        self._state = directory / "cocoindex.db"
        self._log = directory / "cocoindex.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        python = prepare_environment(COCOINDEX)
        environment = {
            **os.environ,
            "COCOINDEX_DB": str(self._state),
            "COCOINDEX_DISABLE_USAGE_TRACKING": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
        }
        command = [str(python), "-m", "benchmarks.systems.peers.cocoindex_flow", json.dumps(self._order)]
        with open_log(self._log) as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def update(self) -> float:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"update\n")
        process.stdin.flush()
        is_there, _, _ = select.select([process.stdout], [], [], ANSWER_SECONDS)
        line = process.stdout.readline() if is_there else b""
        if not line:
            raise BenchmarkFailed(f"CocoIndex gave no answer:{tail_of(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return float(answer["seconds"])


class OwnUpdates:
    """A whole stack of ours, told by its API."""

    name = "ours"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = OwnStack(directory)

    def __enter__(self) -> Self:
        self._stack.__enter__()
        self.url = self._stack.wait_until_ready()
        self.client = Client(self.url, timeout=ANSWER_SECONDS)
        running = find_running(self._directory)
        if running is None:
            raise BenchmarkFailed("The stack is not running.")
        self.database_url = running.database_url
        self.dsn = Articles(self.database_url).dsn
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    @property
    def pid(self) -> int:
        """The process of `up`, above all others."""
        return self._stack.pid

    def follow(self, **options: Any) -> None:
        """Makes the collection that follows the table."""
        self.client.create_collection(COLLECTION, **options)
        self.client.set_source(COLLECTION, "sql", OPTIONS)

    def update(self, **spec: Any) -> float:
        run = self.client.reindex(COLLECTION, confirm=True, **spec)
        run = self.client.wait_run(run["id"], poll_seconds=POLL_SECONDS)
        if run["state"] != "completed":
            raise BenchmarkFailed(f"The run ended {run['state']}: {run['error']}")
        finished, created = (
            datetime.fromisoformat(run[name] or "") for name in ("finished_at", "created_at")
        )
        return (finished - created).total_seconds()

    def count_rows(self) -> int:
        return self.client.collection(COLLECTION, exact=True)["exact_rows"] or 0
