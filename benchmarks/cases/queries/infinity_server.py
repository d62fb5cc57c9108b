"""InfinityServer: the peer's own HTTP server, with its torch engine and its defaults, in its pinned environment."""

import http.client
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.cases.queries.load import Target
from benchmarks.order import BenchmarkFailed
from benchmarks.peers.environment import prepare_environment
from vectormill.processes.lifetimes import free_port
from vectormill.processes.logfile import open_log, tail_of
from vectormill.settings import process_environment

ENVIRONMENT: Final = "infinity-server"
NAME: Final = "model"
START_SECONDS: Final = 300.0
STOP_SECONDS: Final = 20.0
POLL_SECONDS: Final = 0.2


class InfinityServer:
    """Embeds what it is sent; it searches nothing."""

    def __init__(self, model: Path, log: Path) -> None:
        self._model = model
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Returns when it answers. Raises BenchmarkFailed."""
        python = prepare_environment(ENVIRONMENT)
        self._port = free_port()
        options = {
            "--model-id": str(self._model),
            "--served-model-name": NAME,
            "--engine": "torch",
            "--device": "cpu",
            "--host": "127.0.0.1",
            "--port": str(self._port),
        }
        environment = process_environment() | {
            "DO_NOT_TRACK": "1",
            "INFINITY_ANONYMOUS_USAGE_STATS": "0",
            "HF_HUB_OFFLINE": "1",
        }
        environment.pop("PYTHONPATH", None)
        command = [
            str(python.parent / "infinity_emb"),
            "v2",
            *(part for pair in options.items() for part in pair),
        ]
        with open_log(self._log) as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        """Of the server, once it answers."""
        assert self._process is not None
        return self._process.pid

    @property
    def target(self) -> Target:
        return Target(f"http://127.0.0.1:{self._port}/embeddings", _body)

    def _wait_until_ready(self, process: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkFailed(f"infinity's server did not start:{tail_of(self._log)}")
            time.sleep(POLL_SECONDS)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _body(text: str) -> dict[str, Any]:
    return {"model": NAME, "input": [text]}
