"""Stack: one `vectormill up` in a child process, and functions that kill or inspect it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import psutil
import psycopg
from redis import Redis

from tests.clusters import new_directory
from tests.waiting import wait_for
from vectormill.client import Client
from vectormill.embedded.stack import EmbeddedStack
from vectormill.processes import lifetimes as processes
from vectormill.processes.lifetimes import free_port

# Short leases, so that a test of their expiry takes seconds. The proportions are those of the defaults.
QUICK_LEASES = {
    "VECTORMILL_LEASE_SECONDS": "5",
    "VECTORMILL_HEARTBEAT_SECONDS": "1",
    "VECTORMILL_REAP_SECONDS": "1",
    "VECTORMILL_CHUNK_MAX_ITEMS": "64",
}


class Stack:
    """One `vectormill up`: `start` starts it, `client` returns a client of its API, `destroy` removes it."""

    def __init__(
        self,
        data_dir: Path,
        environment: Mapping[str, str] = QUICK_LEASES,
        *,
        models: Sequence[str] = (),
        api_host: str | None = None,
    ) -> None:
        self.data_dir = data_dir
        self._models = models
        self._api_host = api_host
        self.api_port = free_port()
        self.flower_port = free_port()
        self._environment = {**os.environ, **environment}
        self.log = data_dir.parent / "up.log"
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        ports = ["--api-port", str(self.api_port), "--flower-port", str(self.flower_port)]
        models = [word for model in self._models for word in ("--model", model)]
        api_host = ["--host", self._api_host] if self._api_host else []
        return [
            sys.executable,
            "-m",
            "vectormill.cli",
            "up",
            "--data-dir",
            str(self.data_dir),
            *ports,
            *models,
            *api_host,
        ]

    def spawn(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as output:
            # The child process stops when the tests are killed, too.
            return processes.spawn(self.command(), env=self._environment, output=output)

    def start(self) -> None:
        """Start the stack and return when its log has the line `ready`."""
        before = self.log.read_text().count("ready") if self.log.exists() else 0
        self.process = self.spawn()

        def is_ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()
            return self.log.read_text().count("ready") > before

        wait_for(is_ready, 90, "the stack is ready")

    def stop(self, signal_number: int = signal.SIGTERM) -> None:
        """Send the signal and wait until the process has ended."""
        assert self.process is not None
        self.process.send_signal(signal_number)
        assert self.process.wait(timeout=200) == 0, self.log.read_text()
        self.process = None

    def kill_everything(self) -> None:
        """Send SIGKILL to every process of the stack, as a power cut would end them."""
        victims = self.processes()
        for victim in victims:
            with suppress(psutil.NoSuchProcess):  # ended with its parent a moment ago
                victim.kill()
        psutil.wait_procs(victims, timeout=60)
        assert self.process is not None
        self.process.wait(timeout=60)
        self.process = None

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the stack, `up` itself first."""
        assert self.process is not None
        up = psutil.Process(self.process.pid)
        return [up, *up.children(recursive=True)]

    def runners(self) -> list[psutil.Process]:
        """Return the model processes."""
        found = []
        for process in self.processes():
            with suppress(psutil.Error):
                if any("runner_process" in word for word in process.cmdline()):
                    found.append(process)
        return found

    def find_process(self, word: str) -> psutil.Process | None:
        """Return the first process with this name, or this word among its arguments; None without one."""
        for process in self.processes():
            try:
                if process.name() == word or word in process.cmdline():
                    return process
            except psutil.Error:
                continue
        return None

    def log_tails(self, num_lines: int = 60) -> str:
        """Return the last lines of every process's log, for the report of a failed test."""
        logs = [self.log, *sorted((self.data_dir / "logs").glob("*.log"))]
        return "\n".join(
            f"---- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
            for log in logs
        )

    def destroy(self) -> None:
        try:
            if self.process is not None and self.process.poll() is None:
                # Stop rather than kill: a killed Postgres leaves a megabyte in /dev/shm that only its next
                # start would remove.
                self.stop()
        except BaseException:
            self.kill_everything()
            raise
        finally:
            EmbeddedStack(self.data_dir).destroy()

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.api_port}"

    def client(self) -> Client:
        return Client(self.api_url)

    def is_ready(self) -> bool:
        """Return whether API, Postgres, Redis, scheduler and a worker all respond."""
        try:
            answer = httpx.get(f"{self.api_url}/readyz", timeout=5).json()
        except (httpx.HTTPError, ValueError):
            return False
        return bool(answer["status"] == "ok" and answer["workers"] and answer["scheduler"])

    def urls(self) -> dict[str, str]:
        values: dict[str, str] = json.loads((self.data_dir / "stack.json").read_text())
        return values

    def redis(self) -> Redis:
        return Redis.from_url(self.urls()["redis_url"])

    def query(self, statement: str) -> Iterator[tuple[object, ...]]:
        """Yield the rows of a plain SQL statement, as psql would return them."""
        url = self.urls()["database_url"].replace("postgresql+psycopg", "postgresql")
        with psycopg.connect(url) as connection:
            yield from connection.execute(statement)


class StackOnLoan:
    """One stack that tests use in turn, because a start takes 8 s.

    A broken or busy stack is replaced before it is lent again.
    """

    def __init__(self) -> None:
        self._stack: Stack | None = None
        self._cleanup = ExitStack()

    def lend(self) -> Stack:
        if self._stack is None or not self._is_whole_and_idle(self._stack):
            self.end()
            self._stack = Stack(self._cleanup.enter_context(new_directory()) / "data")
            self._cleanup.callback(self._stack.destroy)
            self._stack.start()
        return self._stack

    def end(self) -> None:
        self._stack = None
        self._cleanup.close()

    def _is_whole_and_idle(self, stack: Stack) -> bool:
        if stack.process is None or stack.process.poll() is not None or not stack.is_ready():
            return False
        return list(stack.query("SELECT count(*) FROM vectormill.jobs WHERE finished_at IS NULL")) == [(0,)]
