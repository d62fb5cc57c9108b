"""Clients that send a request as soon as the last is answered, and infinity's server for comparison.

The clients are written directly on asyncio's streams because they share the machine's cores with the servers:
a client library would take a millisecond of processor time per request.
"""

import asyncio
import http.client
import json
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.harness import BenchmarkFailed
from benchmarks.models import find_packaged
from benchmarks.peers import prepare_environment
from benchmarks.processes import count_cpu_seconds
from benchmarks.tables import (
    NUMBER,
    RATIO,
    SECONDS,
    Measure,
    Spread,
    Table,
    at_least,
    at_most,
    find_percentile,
)
from vectormill.processes.lifetimes import free_port
from vectormill.processes.logs import open_log, tail_of
from vectormill.settings import process_environment

NUM_CLIENTS: Final = (1, 8, 64)
MANY: Final = NUM_CLIENTS[-1]
ROUND_SECONDS: Final = 10.0
PEER: Final = "infinity's server"
PEER_MODEL: Final = "model"
START_SECONDS: Final = 300.0
STOP_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True)
class Target:
    """The address and body of a request with one or several texts, and the pid of the server's parent."""

    url: str
    body: Callable[[Any], dict[str, Any]]
    pid: int


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one load test: the seconds of each request, and the processor seconds of each process."""

    taken: Sequence[float]
    cpu_seconds: Mapping[str, float]

    @property
    def rate(self) -> float:
        return len(self.taken) / ROUND_SECONDS

    def percentile(self, percent: float) -> float:
        return find_percentile(self.taken, percent)


class Rounds(dict[tuple[str, int], list[Round]]):
    """The results of all load tests, by system and number of clients."""

    def ask(self, system: str, target: Target, texts: Iterator[Any]) -> None:
        """Run one load test per number of clients.

        Raise BenchmarkFailed when a request is not answered with 200.
        """
        for num_clients in NUM_CLIENTS:
            before = count_cpu_seconds(target.pid)
            taken = asyncio.run(_ask(target, texts, num_clients))
            after = count_cpu_seconds(target.pid)
            spent = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
            self.setdefault((system, num_clients), []).append(Round(taken, spent))

    def judge(self, ours: str) -> list[Measure]:
        """Compare request rate and p99 latency of `ours` with infinity's server, at the most clients."""
        pair = [self[system, MANY] for system in (ours, PEER)]
        rates = Spread.of_ratios(*([each.rate for each in rounds] for rounds in pair))
        p99 = Spread.of_ratios(*([each.percentile(99) for each in rounds] for rounds in pair))
        return [
            at_least(f"requests/s with {MANY} clients, to {PEER}", rates, 2.0, RATIO),
            at_most(f"p99 with {MANY} clients, to its", p99, 1.0, RATIO),
        ]

    def tabulate(self) -> Table:
        rows = []
        for (system, num_clients), rounds in self.items():
            rates = Spread.of([each.rate for each in rounds])
            p50, p99 = (Spread.of([each.percentile(percent) for each in rounds]) for percent in (50, 99))
            name = f"{system}, {num_clients} client{'s' * (num_clients > 1)}"
            rows.append((name, NUMBER(rates), SECONDS(p50), SECONDS(p99)))
        return Table(("system", "requests/s", "p50", "p99"), tuple(rows))

    def tabulate_costs(self, *systems: str) -> Table:
        """Return the processor time per request of each process of these systems, at the most clients."""
        costs: dict[str, float] = {}
        for system in systems:
            rounds = self[system, MANY]
            num_requests = sum(len(each.taken) for each in rounds)
            for name in rounds[-1].cpu_seconds:
                spent = sum(each.cpu_seconds.get(name, 0.0) for each in rounds)
                costs[f"{system}: {name}"] = spent / num_requests
        rows = sorted(((name, cost) for name, cost in costs.items() if cost >= 1e-5), key=lambda row: -row[1])
        header = (f"process, {MANY} clients", "processor time per request")
        return Table(header, tuple((name, f"{1000 * cost:.2f} ms") for name, cost in rows))


async def _ask(target: Target, texts: Iterator[Any], num_clients: int) -> list[float]:
    end = time.perf_counter() + ROUND_SECONDS
    clients = (_ask_again_and_again(target, texts, end) for _ in range(num_clients))
    return [taken for each in await asyncio.gather(*clients) for taken in each]


async def _ask_again_and_again(target: Target, texts: Iterator[Any], end: float) -> list[float]:
    url = urllib.parse.urlsplit(target.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    taken = []
    try:
        while (began := time.perf_counter()) < end:
            body = json.dumps(target.body(next(texts))).encode()
            head = (
                f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            answered = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(answered.partition(b"content-length:")[2].partition(b"\r\n")[0])
            answer = await reader.readexactly(length)
            if answered.split(b" ", 2)[1] != b"200":
                words = (answered[:40] + answer[:300]).decode(errors="replace")
                raise BenchmarkFailed(f"{url.netloc} answered {words}")
            taken.append(time.perf_counter() - began)
    finally:
        writer.close()
    return taken


class InfinityServer:
    """The HTTP server of infinity, with its torch engine and its defaults, in its pinned environment."""

    def __init__(self, log: Path, body: Callable[[Any], dict[str, Any]]) -> None:
        self._log = log
        self._body = body

    def __enter__(self) -> Self:
        """Start the server and wait until it answers. Raise BenchmarkFailed when it does not."""
        python = prepare_environment("infinity-server")
        self._port = free_port()
        options = {
            "--model-id": str(find_packaged().path), "--served-model-name": PEER_MODEL, "--engine": "torch",
            "--device": "cpu", "--host": "127.0.0.1", "--port": str(self._port),
        }  # fmt: skip
        quiet = {"DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0", "HF_HUB_OFFLINE": "1"}
        environment = process_environment() | quiet
        environment.pop("PYTHONPATH", None)
        command = [
            str(python.parent / "infinity_emb"),
            "v2",
            *(part for pair in options.items() for part in pair),
        ]
        with open_log(self._log) as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise BenchmarkFailed(f"{PEER} did not start:{tail_of(self._log)}")
            time.sleep(0.2)
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def target(self) -> Target:
        return Target(f"http://127.0.0.1:{self._port}/embeddings", self._body, self._process.pid)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
