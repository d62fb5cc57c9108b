"""OwnApi: `vectormill api` on an embedded Postgres and nothing else, as a child whose memory can be watched."""

import http.client
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import psutil

from benchmarks.order import BenchmarkFailed
from vectormill.cli.stack import stop
from vectormill.db.migrations import upgrade
from vectormill.embedded.postgres import EmbeddedPostgres
from vectormill.processes.lifetimes import free_port, spawn
from vectormill.processes.logfile import open_log, tail_of
from vectormill.settings import process_environment
from vectormill.up import Endpoint

HOST: Final = "127.0.0.1"
START_SECONDS: Final = 60.0
ANSWER_SECONDS: Final = 600.0
POLL_SECONDS: Final = 0.05
READ_BYTES: Final = 1 << 20


class OwnApi:
    """A context manager; `process` is the API's and `database_url` leads to what it serves."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._log = home / "logs" / "api.log"
        self._exits = ExitStack()
        self._endpoint = Endpoint(HOST, free_port())

    def __enter__(self) -> Self:
        with ExitStack() as exits:
            postgres = EmbeddedPostgres(self._home)
            exits.callback(postgres.stop)
            self.database_url = postgres.start()
            upgrade(self.database_url)
            environment = process_environment() | {"VECTORMILL_DATABASE_URL": self.database_url}
            # Without Redis it says "degraded" and takes jobs all the same.
            environment.pop("VECTORMILL_REDIS_URL", None)
            arguments = ("api", "--host", HOST, "--port", str(self._endpoint.port))
            with open_log(self._log) as log:
                child = spawn(
                    (sys.executable, "-m", "vectormill.cli", *arguments), env=environment, output=log
                )
            exits.callback(stop, child)
            self.process = psutil.Process(child.pid)
            self._wait_until_ready(child)
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exits.__exit__(kind, error, traceback)

    @property
    def url(self) -> str:
        return self._endpoint.url

    def _wait_until_ready(self, child: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + START_SECONDS
        while self._endpoint.answer("/readyz") is None:
            if child.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkFailed(f"The API did not get ready:{tail_of(self._log)}")
            time.sleep(POLL_SECONDS)

    def submit(self, parts: Sequence[bytes]) -> float:
        """Sends NDJSON that is ready to be sent; seconds from the first byte to the answer 202."""
        connection = self._connect()
        try:
            started = time.perf_counter()
            headers = {"Content-Type": "application/x-ndjson"}
            connection.request("POST", "/v1/jobs", body=iter(parts), headers=headers)
            answer = connection.getresponse()
            seconds = time.perf_counter() - started
            body = answer.read()
        finally:
            connection.close()
        if answer.status != http.client.ACCEPTED:
            raise BenchmarkFailed(f"The API answered {answer.status} to a submission: {body.decode()}")
        job: dict[str, Any] = json.loads(body)
        num_items = sum(part.count(b"\n") for part in parts)
        if job["num_items"] != num_items:
            raise BenchmarkFailed(f"The API counted {job['num_items']:,} of {num_items:,} items.")
        return seconds

    def export(self, job_id: str, format: str, target: Path) -> float:
        """Writes a job's vectors into a file; seconds from the request to the last byte."""
        connection = self._connect()
        try:
            started = time.perf_counter()
            connection.request("GET", f"/v1/jobs/{job_id}/vectors?format={format}")
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise BenchmarkFailed(
                    f"The API answered {answer.status} to an export: {answer.read().decode()}"
                )
            with target.open("wb") as file:
                shutil.copyfileobj(answer, file, READ_BYTES)
            return time.perf_counter() - started
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        """A connection that stands: only the request itself is timed. No proxy of the environment is asked."""
        address = urlsplit(self._endpoint.url)
        assert address.hostname is not None
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=ANSWER_SECONDS)
        connection.connect()
        return connection
