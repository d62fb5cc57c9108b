"""A Vectormill of its own in child processes, seen as its users see it: commands, HTTP, SQL and signals.

Nothing here imports the product, so the same files test any release: the checkout, or a wheel named by `--vectormill`.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import psycopg

from tests.clusters import read_admin_url

MODEL = "all-MiniLM-L6-v2"
DIMENSIONS = 384
T = TypeVar("T")
Json = dict[str, Any]
Popen = subprocess.Popen[bytes]
# Leases of seconds, so that the loss of a process is noticed in seconds; webhooks may lead to this machine.
SETTINGS = {
    "VECTORMILL_LEASE_SECONDS": "5",
    "VECTORMILL_HEARTBEAT_SECONDS": "1",
    "VECTORMILL_REAP_SECONDS": "1",
    "VECTORMILL_CHUNK_MAX_ITEMS": "64",
    "VECTORMILL_WEBHOOK_PRIVATE_TARGETS": "true",
    "VECTORMILL_OUTPUT_GRACE_SECONDS": "3",
}


def wait_for(look: Callable[[], T | None], what: str, seconds: float = 120.0) -> T:
    """Return the first true answer of `look`; fail with `what` after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        answer = look()
        if answer:
            return answer
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds:g} s: {what}")


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def new_service(program: Path) -> Iterator["Service"]:
    """Yield a service in a folder of its own, not started yet; stop it at the end, or kill it after a failure."""
    folder = Path(tempfile.mkdtemp(prefix="vm-", dir="/tmp"))  # a socket's path may have 107 bytes
    service = Service(program, folder)
    try:
        yield service
        service.stop()
    finally:
        if service.process is not None:
            service.kill()
        service.http.close()
        shutil.rmtree(folder, ignore_errors=True)


class Service:
    """One `vectormill up` on a data directory of its own."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.program = program
        self.folder = folder
        self.data_dir = folder / "data"
        self.log = folder / "up.log"
        self.api_port, self.flower_port = find_free_port(), find_free_port()
        self.api_url = f"http://127.0.0.1:{self.api_port}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("VECTORMILL_")}
        self.environment = clean | SETTINGS
        self.environment |= {"VECTORMILL_SOURCE_ROOT": "/", "VECTORMILL_OUTPUT_ROOT": str(folder / "out")}
        self.process: Popen | None = None
        self.http = httpx.Client(base_url=self.api_url, timeout=60, trust_env=False, http2=False)

    def command(self) -> list[str]:
        ports = ("--api-port", str(self.api_port), "--flower-port", str(self.flower_port))
        return [str(self.program), "up", "--data-dir", str(self.data_dir), *ports]

    def spawn(self) -> Popen:
        with self.log.open("ab") as output:
            return subprocess.Popen(
                self.command(), cwd=self.folder, env=self.environment, stdout=output, stderr=output
            )

    def start(self) -> None:
        """Start every process and return when all answer."""
        self.process = self.spawn()
        wait_for(self.is_ready, f"the service is ready; its log is {self.log}", 180)

    def is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        try:
            answer = self.http.get("/readyz", timeout=5).json()
        except (httpx.HTTPError, ValueError):
            return False
        return bool(
            answer["status"] == "ok" and answer["workers"] and answer["scheduler"] and answer["indexer"]
        )

    def stop(self) -> None:
        """Ask every process to end, and wait until they have."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(200) == 0, self.log.read_text()
            self.process = None

    def kill(self) -> None:
        """End every process at once, as a power cut does."""
        assert self.process is not None
        victims = self.processes()
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        psutil.wait_procs(victims, timeout=60)
        self.process.wait(60)
        self.process = None

    def processes(self, word: str = "") -> list[psutil.Process]:
        """The living processes with `word` in their command line, `up` first."""
        assert self.process is not None
        up = psutil.Process(self.process.pid)
        found = []
        for process in [up, *up.children(recursive=True)]:
            with suppress(psutil.Error):
                if word in " ".join(process.cmdline()) or word == process.name():
                    found.append(process)
        return found

    @contextmanager
    def frozen(self, word: str = "runner_process") -> Iterator[None]:
        """Hold the processes with this word in their command line; by default those that compute vectors."""
        held = self.processes(word)
        assert held, word
        for process in held:
            process.suspend()
        try:
            yield
        finally:
            for process in held:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    def run(
        self,
        *arguments: str,
        check: bool = True,
        given: str | None = None,
        environment: Mapping[str, str] = {},
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the command line against this service."""
        done = subprocess.run(
            [self.program, *arguments],
            cwd=self.folder,
            env=self.environment | {"VECTORMILL_DATA_DIR": str(self.data_dir)} | dict(environment),
            capture_output=True,
            text=True,
            timeout=300,
            input=given,
        )
        assert not check or done.returncode == 0, (
            f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    @property
    def database_url(self) -> str:
        """The address of the embedded Postgres for its administrator."""
        url: str = json.loads((self.data_dir / "stack.json").read_text())["database_url"]
        return read_admin_url(self.data_dir, url)

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        """Return the rows of a statement, asked as a user of the database asks it."""
        with psycopg.connect(self.database_url) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def ask(self, method: str, path: str, status: int = 200, **arguments: Any) -> Any:
        """Send a request, assert its status, and return the JSON of its answer; None where it has none."""
        answer = self.http.request(method, path, **arguments)
        assert answer.status_code == status, f"{method} {path}: {answer.status_code} {answer.text[:1000]}"
        return answer.json() if "json" in answer.headers.get("content-type", "") and answer.content else None

    def remove(self, path: str, headers: Mapping[str, str] = {}) -> None:
        """Delete what the path names, which the request names once more."""
        named = {"Vectormill-Confirm": path.rpartition("/")[2]}
        self.ask("DELETE", path, 204, headers=named | dict(headers))

    def submit(self, texts: Mapping[str, str] | Iterable[tuple[str, str]], **body: Any) -> str:
        """Submit a job of texts by key and return its id."""
        pairs = texts.items() if isinstance(texts, Mapping) else texts
        items = [{"key": key, "text": text} for key, text in pairs]
        job: str = self.ask("POST", "/v1/jobs", 202, json={"model": MODEL, "items": items} | body)["id"]
        return job

    def wait(self, job: str, seconds: float = 240) -> Json:
        """Wait until a job has ended, and return it."""

        def look() -> Json | None:
            found: Json = self.ask("GET", f"/v1/jobs/{job}")
            return found if found["finished_at"] else None

        return wait_for(look, f"job {job} ends", seconds)

    def wait_for_run(self, run: str, seconds: float = 240) -> Json:
        """Wait until a run has ended, and return it."""

        def look() -> Json | None:
            found: Json = self.ask("GET", f"/v1/runs/{run}")
            return found if found["finished_at"] or found["state"] == "held" else None

        return wait_for(look, f"run {run} ends", seconds)

    def read_lines(self, path: str, **parameters: str) -> list[Json]:
        """Return the lines of an answer of NDJSON."""
        answer = self.http.get(path, params=parameters)
        assert answer.status_code == 200, answer.text[:1000]
        return [json.loads(line) for line in answer.text.splitlines()]

    def embed(self, texts: Sequence[str], **body: Any) -> list[list[float]]:
        """Return the vectors of some texts, asked for at once."""
        request = {"model": MODEL, "input": list(texts), "encoding_format": "float"} | body
        return [each["embedding"] for each in self.ask("POST", "/v1/embeddings", json=request)["data"]]

    def make_collection(self, name: str, **body: Any) -> None:
        self.ask("POST", "/v1/collections", 201, json={"name": name, "model": MODEL} | body)

    def rows(self, collection: str) -> dict[str, list[float]]:
        """Return the vectors of a collection by key, as its SQL view has them."""
        return {
            key: json.loads(vector)
            for key, vector in self.sql(f"SELECT key, embedding::text FROM {collection}")
        }


def assert_close(found: Sequence[float], expected: Sequence[float], least: float = 0.999) -> None:
    """Assert that two vectors point the same way: their cosine is at least `least`."""
    assert len(found) == len(expected)
    product = sum(a * b for a, b in zip(found, expected, strict=True))
    norm = sum(a * a for a in found) ** 0.5 * sum(b * b for b in expected) ** 0.5
    assert product / norm >= least, product / norm
