"""Our own processes as systems to measure: a whole stack, the API alone, and a line-up with the peers."""

import http.client
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.children.serving import WARM_UP_SHARE, ChildOrder, Pass
from benchmarks.harness import HOME, ROOT, BenchmarkFailed
from benchmarks.peers import Peer, find_obstacle, prepare_environment, runs_in_ours
from benchmarks.processes import CELERY_WORKER, MODEL_PROCESS, find_named, list_tree
from benchmarks.turns import Child, MissingRows, Processes, System
from vectormill.cli.stack import COMMAND, END, Stack
from vectormill.client import Client
from vectormill.db.migrations import upgrade
from vectormill.embedded.data_dir import RunningStack, find_running
from vectormill.embedded.postgres import EmbeddedPostgres
from vectormill.files.ndjson import ItemJson
from vectormill.jobs.job import COMPLETED
from vectormill.processes.lifetimes import end_child, free_port, spawn
from vectormill.processes.logs import open_log, tail_of
from vectormill.settings import process_environment
from vectormill.up import Endpoint
from worker.devices.device import CPU, Device, device_environment

SERVICE: Final = "service"
ENGINE: Final = "engine"
OURS: Final = (SERVICE, ENGINE)
MODEL: Final = "benchmark"
ENGINE_MODULE: Final = "benchmarks.children.engine_alone"
# Polling every 0.1 s cost the API 3 % of two cores, which the encoding then lacked.
POLL_SECONDS: Final = 0.5
START_SECONDS: Final = 60.0
ANSWER_SECONDS: Final = 600.0
# Libraries must neither download anything nor send telemetry while they are measured.
QUIET: Final = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0",
}  # fmt: skip


class OwnStack:
    """A whole `vectormill up` on the processor, isolated from the user's settings and servers."""

    def __init__(
        self, directory: Path, settings: Mapping[str, str] | None = None, model: str | None = None
    ) -> None:
        self._directory = directory
        own = {
            "VECTORMILL_CACHE_DIR": str(directory / "cache"),
            "VECTORMILL_WORKER_DEVICES": "cpu",
            "VECTORMILL_WORKER_REUSE_BYTES": "0",  # every pass has the same texts and must compute them again
            **(settings or {}),
        }
        unset = [part for name in ("DATABASE_URL", "REDIS_URL") for part in ("-u", f"VECTORMILL_{name}")]
        variables = [f"{name}={value}" for name, value in own.items()]
        # Celery looks for its application in the current folder first, and would find this checkout's there.
        self._stack = Stack(directory, model, ("env", f"--chdir={directory}", *unset, *variables, *COMMAND))

    def __enter__(self) -> Self:
        """Start the stack and wait until it is ready."""
        self._stack.__enter__()
        try:
            self.url = self._stack.wait_until_ready()
        except BaseException:
            self._stack.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.__exit__(None, None, None)

    @property
    def running(self) -> RunningStack:
        """Return the running stack with its processes and servers.

        Raise BenchmarkFailed when it is not running.
        """
        running = find_running(self._directory)
        if running is None:
            raise BenchmarkFailed("The stack is not running.")
        return running

    @property
    def pid(self) -> int:
        """Return the pid of `up`, the parent of all processes of the stack."""
        return self.running.pid


class OwnApi:
    """`vectormill api` on an embedded Postgres, without workers and Redis; `process` is the API's."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._log = home / "logs" / "api.log"
        self._exits = ExitStack()
        self._endpoint = Endpoint("127.0.0.1", free_port())

    def __enter__(self) -> Self:
        with ExitStack() as exits:
            postgres = EmbeddedPostgres(self._home)
            exits.callback(postgres.stop)
            self.database_url = postgres.start()
            upgrade(self.database_url)
            environment = process_environment() | {"VECTORMILL_DATABASE_URL": self.database_url}
            # Without Redis the API reports "degraded" but accepts jobs all the same.
            environment.pop("VECTORMILL_REDIS_URL", None)
            address = ("--host", "127.0.0.1", "--port", str(self._endpoint.port))
            with open_log(self._log) as log:
                command = (sys.executable, "-m", "vectormill.cli", "api", *address)
                child = spawn(command, env=environment, output=log)
            exits.callback(end_child, child, END)
            self.process = psutil.Process(child.pid)
            deadline = time.monotonic() + START_SECONDS
            while self._endpoint.answer("/readyz") is None:
                if child.poll() is not None or time.monotonic() > deadline:
                    raise BenchmarkFailed(f"The API did not become ready:{tail_of(self._log)}")
                time.sleep(0.05)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    @property
    def url(self) -> str:
        return self._endpoint.url

    def submit(self, parts: Sequence[bytes]) -> float:
        """Send a prepared NDJSON body as a job; return the seconds from the first byte to the answer 202."""
        head = {"Content-Type": "application/x-ndjson"}
        seconds, body = self._ask("POST", "/v1/jobs", http.client.ACCEPTED, parts, head)
        num_items = sum(part.count(b"\n") for part in parts)
        if json.loads(body)["num_items"] != num_items:
            raise BenchmarkFailed(f"The API did not count {num_items:,} items: {body.decode()}")
        return seconds

    def export(self, job_id: str, format: str, target: Path) -> float:
        """Write a job's vectors to a file; return the seconds from the request to the last byte."""
        return self._ask("GET", f"/v1/jobs/{job_id}/vectors?format={format}", http.client.OK, target=target)[
            0
        ]

    def _ask(
        self,
        method: str,
        path: str,
        expected: int,
        parts: Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        target: Path | None = None,
    ) -> tuple[float, bytes]:
        """Send a request over an open connection; return its seconds and its answer.

        Proxies of the environment are not used.
        """
        address = urlsplit(self.url)
        assert address.hostname is not None
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=ANSWER_SECONDS)
        connection.connect()
        try:
            started = time.perf_counter()
            connection.request(method, path, None if parts is None else iter(parts), dict(headers or {}))
            answer = connection.getresponse()
            if answer.status != expected:
                raise BenchmarkFailed(f"The API answered {answer.status} to {path}: {answer.read().decode()}")
            if target is not None:
                with target.open("wb") as file:
                    shutil.copyfileobj(answer, file, 1 << 20)
            seconds = time.perf_counter() - started
            return seconds, answer.read()
        finally:
            connection.close()


def run_job(client: Client, items: Sequence[ItemJson], **options: Any) -> Mapping[str, Any]:
    """Submit a job and return it when it has ended. Raise BenchmarkFailed when it is not complete."""
    job = client.wait(client.submit(items, **options)["id"], poll_seconds=POLL_SECONDS)
    if job["state"] != COMPLETED:
        raise BenchmarkFailed(f"A job ended {job['state']}, with {job['num_failed']:,} items failed.")
    return job


def read_vectors(client: Client, job_id: str) -> list[tuple[str, Any]]:
    """Return the vectors of a job with their keys, read over HTTP."""
    return [(each["key"], each["embedding"]) for each in client.vectors(job_id)]


# The items of a job, and the options that it is submitted with.
JobTexts = tuple[Sequence[ItemJson], Mapping[str, Any]]


class Service:
    """Our service from end to end: from the submission over HTTP to the commit of the last result.

    A mix is one job, or several that are submitted at once. Each pass writes to a new collection, so that
    rows are always new. Keys are numbers, in the order of the texts.
    """

    name = "ours, end to end"

    def __init__(
        self,
        directory: Path,
        mixes: Mapping[str, Sequence[JobTexts]],
        settings: Mapping[str, str],
        read: Callable[[Client, str], list[tuple[str, Any]]] = read_vectors,
        collect: Callable[[list[Any]], NDArray[np.float32]] = lambda rows: np.array(rows, dtype=np.float32),
    ) -> None:
        self._mixes = mixes
        self._read = read
        self._collect = collect
        self._stack = OwnStack(directory, settings, MODEL)
        self._exits = ExitStack()
        self._num_passes = 0
        self._jobs: list[Mapping[str, Any]] = []

    def __enter__(self) -> Self:
        with ExitStack() as exits:
            exits.enter_context(self._stack)
            self.client = exits.enter_context(Client(self._stack.url))
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    def warm_up(self, mix: str) -> None:
        self._run([(items[::WARM_UP_SHARE], options) for items, options in self._mixes[mix]])

    def encode(self, mix: str) -> Pass:
        started = datetime.now(UTC)
        self._jobs = self._run(self._mixes[mix])
        # `finished_at` is when the transaction that committed the last results began, some 20 ms before its
        # end. Start and end are read from the same machine's clock.
        finished = max(datetime.fromisoformat(job["finished_at"]) for job in self._jobs)
        num_tokens = sum(job["num_tokens"] for job in self._jobs)
        computed = sum(round(job["num_tokens"] / (1 - job["padding_waste"])) for job in self._jobs)
        return Pass((finished - started).total_seconds(), num_tokens, computed)

    def _run(self, jobs: Sequence[JobTexts]) -> list[Mapping[str, Any]]:
        self._num_passes += 1
        submitted = []
        for items, options in jobs:
            name = {"collection": f"mix_{self._num_passes}"} if "collection" in options else {}
            submitted.append(self.client.submit(items, model=MODEL, **{**options, **name})["id"])
        ended: list[Mapping[str, Any]] = [
            self.client.wait(job_id, poll_seconds=POLL_SECONDS) for job_id in submitted
        ]
        for job in ended:
            if job["state"] != COMPLETED:
                raise BenchmarkFailed(f"A job ended {job['state']}, with {job['num_failed']:,} items failed.")
        return ended

    def vectors(self) -> NDArray[np.float32]:
        """Return the last pass's vectors [n, dimension] from the database.

        Raise BenchmarkFailed when an item has no result.
        """
        found = {int(key): row for job in self._jobs for key, row in self._read(self.client, job["id"])}
        num_items = sum(job["num_items"] for job in self._jobs)
        if sorted(found) != list(range(num_items)):
            raise BenchmarkFailed(f"{num_items - len(found):,} items have no result.")
        return self._collect([found[number] for number in range(num_items)])

    def report(self) -> dict[str, Any]:
        """Return the report of the only worker; empty before its first heartbeat."""
        workers = self.client.workers()
        report: dict[str, Any] = workers[0].get("report") or {} if workers else {}
        return report

    def find_processes(self) -> Processes:
        tree = list_tree(self._stack.pid)
        model = find_named(tree, MODEL_PROCESS)
        return model, [*model, *find_named(tree, CELERY_WORKER)]


class LineUp:
    """A factory of systems that encode the same texts with the same model and threads. It starts none.

    `texts` maps the name of a mix to its texts or pairs. `settings` are environment variables for our engine
    alone.
    """

    def __init__(
        self,
        directory: Path,
        model: Path,
        texts: Mapping[str, Sequence[Any]],
        device: Device,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._directory = directory
        self._model = model
        self._device = device
        self._texts = texts
        # The whole processor is `cpu`, even where its only device has a name of its own.
        self._device_name = CPU if device.kind == CPU else device.name
        self._environment = process_environment() | device_environment(device)
        self._settings = dict(settings or {})
        (directory / "texts.json").write_text(json.dumps(texts), encoding="utf-8")

    def make_service(self, mixes: Mapping[str, Sequence[JobTexts]] | None = None, **options: Any) -> Service:
        """Return our service. Each mix is one job that fills a collection unless `mixes` says otherwise."""
        settings = {
            "VECTORMILL_MODELS": json.dumps({MODEL: {"path": str(self._model)}}),
            "VECTORMILL_WORKER_DEVICES": self._device_name,
        }
        jobs = mixes or {
            name: [(list_items(texts), {"collection": name})] for name, texts in self._texts.items()
        }
        return Service(self._directory, jobs, settings, **options)

    def make_engine(self, name: str = "our engine alone", **options: str) -> Child:
        """Return our engine alone. All such engines share a cache, so that a model is converted only once."""
        file = name.replace(" ", "-").replace(",", "")
        order = self._order(file, self._directory / "cache", options)
        return Child(name, ENGINE_MODULE, order, self._environment | self._settings)

    def make_peer(self, peer: Peer) -> System:
        """Return a peer in its environment, or a Missing with the reason why the peer cannot run."""
        obstacle = find_obstacle(peer, self._device)
        if obstacle is not None:
            return MissingRows(peer.title, obstacle)
        own = self._environment | QUIET
        if runs_in_ours(peer):
            return Child(
                peer.title,
                peer.module,
                self._order(peer.name, self._directory / "exports", peer.options),
                own,
            )
        assert peer.environment is not None
        try:
            python = prepare_environment(peer.environment)
        except BenchmarkFailed as error:
            return MissingRows(peer.title, str(error))
        # Converted models are kept in the peer's environment, so that they are removed when its pins change.
        order = self._order(peer.name, HOME / peer.environment / "models", peer.options)
        # The environment has other versions of our packages, so the child may import nothing of this checkout
        # but the benchmarks.
        return Child(peer.title, peer.module, order, own | {"PYTHONPATH": str(ROOT)}, python)

    def make_all(self, names: Sequence[str], peers: Sequence[Peer]) -> dict[str, System]:
        """Return the named systems, or ours and all peers when no name is given."""
        makers: dict[str, Callable[[], System]] = {SERVICE: self.make_service, ENGINE: self.make_engine}
        makers |= {peer.name: partial(self.make_peer, peer) for peer in peers}
        unknown = set(names) - makers.keys()
        if unknown:
            raise BenchmarkFailed(
                f"Unknown system {', '.join(unknown)}; expected one of: {', '.join(makers)}."
            )
        return {name: make() for name, make in makers.items() if not names or name in names}

    def _order(self, name: str, cache: Path, options: Mapping[str, str]) -> ChildOrder:
        texts, vectors = self._directory / "texts.json", self._directory / f"{name}.npy"
        return ChildOrder(str(self._model), str(texts), str(vectors), str(cache), self._device_name, options)


def list_items(texts: Sequence[Any]) -> list[ItemJson]:
    """Return texts or pairs as items whose keys are their positions."""
    items: list[ItemJson] = []
    for number, text in enumerate(texts):
        if isinstance(text, str):
            items.append({"key": f"{number}", "text": text})
        else:
            items.append({"key": f"{number}", "text": text[0], "text_pair": text[1]})
    return items
