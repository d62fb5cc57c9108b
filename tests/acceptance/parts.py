"""Parts: servers, API, scheduler and workers started one by one, so that tests can kill or replace each.

No part is restarted by itself, as `up` would do, except the workers, which their launcher restarts.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
from redis import Redis

from tests.acceptance import tiny
from tests.acceptance.stack import OPEN_JOBS, read_tails
from tests.blackbox.service import SETTINGS
from tests.clusters import new_directory
from tests.waiting import wait_for
from vectormill.client import Client
from vectormill.db.migrations import upgrade
from vectormill.embedded.postgres import EmbeddedPostgres
from vectormill.embedded.valkey import EmbeddedValkey
from vectormill.processes import lifetimes as processes
from vectormill.processes.lifetimes import free_port
from vectormill.settings import process_environment

NUM_WORKERS = 2
# A lost message is found after this many seconds at the latest.
QUEUED_TIMEOUT = {"VECTORMILL_QUEUED_TIMEOUT_SECONDS": "5"}
END_SECONDS = 240.0


class Parts:
    """The processes of a deployment.

    `start_all` starts all of them; `end` stops them and leaves none behind.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.postgres = EmbeddedPostgres(directory)
        self.valkey = EmbeddedValkey(directory)
        self.api_port = free_port()
        self.api_url = f"http://127.0.0.1:{self.api_port}"
        self._environment = process_environment() | SETTINGS | QUEUED_TIMEOUT | tiny.write_tiny(directory)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start_all(self) -> None:
        (self.directory / "logs").mkdir(exist_ok=True)
        self.database_url = self.postgres.start()
        self.redis_url = self.valkey.start()
        upgrade(self.database_url)
        self.start("api", "api", "--port", str(self.api_port))
        self.start("scheduler", "scheduler")
        self.start("launcher", "worker", "--model", tiny.MODEL)
        self.wait_until_ready()

    def start(
        self,
        name: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        tree: Path | None = None,
    ) -> None:
        """Start a process of ours under this name, from another release's code if `tree` is given."""
        urls = {"VECTORMILL_DATABASE_URL": self.database_url, "VECTORMILL_REDIS_URL": self.redis_url}
        own = self._environment | urls | dict(environment or {})
        if tree is not None:
            own["PYTHONPATH"] = str(tree)
        command = [sys.executable, "-m", "vectormill.cli", *arguments]
        with self.log(name).open("ab") as output:
            # The child process stops when the tests are killed, too.
            self.processes[name] = processes.spawn(command, env=own, output=output, cwd=tree)

    def log(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def end_part(self, name: str, signal_number: int = signal.SIGTERM) -> None:
        """Send the signal, and wait until the process and all its children are gone."""
        process = self.processes.pop(name)
        family: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
        for each in family:
            with suppress(psutil.Error):
                each.send_signal(signal.SIGCONT)
        process.send_signal(signal_number)
        process.wait(END_SECONDS)
        _, alive = psutil.wait_procs(family, timeout=END_SECONDS)
        assert not alive, f"processes outlived {name}: {alive}"

    def end(self) -> None:
        try:
            for name in reversed(list(self.processes)):
                self.end_part(name)
        finally:
            for process in self.processes.values():
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
            self.valkey.stop()
            self.postgres.destroy()

    # ---- inspection

    def client(self) -> Client:
        return Client(self.api_url)

    def is_ready(self) -> bool:
        try:
            answer = httpx.get(f"{self.api_url}/readyz", timeout=5, trust_env=False).json()
        except (httpx.HTTPError, ValueError):
            return False
        return bool(answer["status"] == "ok" and answer["scheduler"] and answer["workers"] >= NUM_WORKERS)

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            ended = [name for name, process in self.processes.items() if process.poll() is not None]
            assert not ended, f"{ended} ended by themselves"
            return self.is_ready()

        try:
            wait_for(is_ready, 120, "API, scheduler and both workers are there")
        except AssertionError:
            print(self.log_tails())
            raise

    def is_whole_and_idle(self) -> bool:
        if any(process.poll() is not None for process in self.processes.values()) or not self.is_ready():
            return False
        return not self.sql(OPEN_JOBS)

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        """Return the rows of an SQL statement, executed in a session of its own that may always write."""
        url = self.database_url.replace("postgresql+psycopg", "postgresql")
        options = "-c default_transaction_read_only=off -c default_tablespace="
        with psycopg.connect(url, autocommit=True, options=options) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def redis(self) -> Redis:
        return Redis.from_url(self.redis_url)

    def workers(self) -> list[psutil.Process]:
        return self._of_launcher("worker.app")

    def runners(self) -> list[psutil.Process]:
        return self._of_launcher("runner_process")

    def _of_launcher(self, word: str) -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self.processes["launcher"].pid).children(recursive=True):
            with suppress(psutil.Error):
                if word in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def log_tails(self) -> str:
        return read_tails((self.directory / "logs").glob("*.log"))


@contextmanager
def frozen(victims: list[psutil.Process]) -> Iterator[None]:
    """Stop these processes while the block runs."""
    for process in victims:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in victims:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


@contextmanager
def running_parts() -> Iterator[Parts]:
    with new_directory() as directory:
        parts = Parts(directory)
        try:
            parts.start_all()
            yield parts
        finally:
            parts.end()
