"""embeddings: how many requests for some short texts are answered by /v1/embeddings and by infinity's server."""

import itertools
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.cases.queries.infinity_server import NAME, InfinityServer
from benchmarks.cases.queries.load import Target, ask_for
from benchmarks.cases.queries.queries import MANY, NUM_CLIENTS, SECONDS, WARM_UP_SECONDS, Round, Rounds
from benchmarks.mixes import list_queries
from benchmarks.order import BenchmarkFailed, Order
from benchmarks.probes.process_tree import count_cpu_seconds
from benchmarks.results.report import Report
from benchmarks.results.spread import Spread
from benchmarks.results.table import Measure, Table, tabulate
from benchmarks.results.writing import write_number, write_ratio, write_seconds
from benchmarks.systems.own.own_stack import OwnStack
from vectormill.cli.stack import workplace
from vectormill.client import Client
from vectormill.models.registry import DEFAULT_MODEL, find_packaged_model

OURS, PEER = "ours", "infinity's server"
MOST_TEXTS: Final = 8
NUM_BODIES: Final = 1000
RATE_TARGET: Final = 2.0
BASE64: Final = "base64"  # what the official client asks for


def measure(order: Order) -> Report:
    order.steps.begin("embeddings", 2 + 2 * order.repeat)
    bodies = itertools.cycle(list_inputs())
    rounds: Rounds = {}
    host: dict[str, float] = {}
    model = find_packaged_model()
    if model is None:
        raise BenchmarkFailed("The packaged model is not installed.")
    with workplace(None) as directory:
        order.steps.step("starting infinity's server")
        with InfinityServer(model, Path(directory) / "infinity.log") as peer:
            target = Target(peer.target.url, lambda texts: make_body(NAME, texts))
            ask_for(target, bodies, MANY, WARM_UP_SECONDS)
            for number in range(order.repeat):
                order.steps.step(f"infinity's server, round {number + 1} of {order.repeat}")
                ask_in_turn(rounds, host, PEER, target, bodies, peer.pid)
        with OwnStack(directory) as stack:
            order.steps.step("starting the stack")
            with Client(stack.wait_until_ready()) as client:
                target = Target(
                    f"{client.base_url}/v1/embeddings", lambda texts: make_body(DEFAULT_MODEL, texts)
                )
                ask_for(target, bodies, MANY, WARM_UP_SECONDS)
                for number in range(order.repeat):
                    order.steps.step(f"ours, round {number + 1} of {order.repeat}")
                    ask_in_turn(rounds, host, OURS, target, bodies, stack.pid)
    return judge(rounds, host)


def list_inputs() -> list[list[str]]:
    """One to eight short texts each, the same in every run."""
    choose = random.Random(16)
    texts = itertools.cycle(list_queries(NUM_BODIES))
    return [list(itertools.islice(texts, choose.randint(1, MOST_TEXTS))) for _ in range(NUM_BODIES)]


def make_body(model: str, texts: list[str]) -> dict[str, Any]:
    return {"model": model, "input": texts, "encoding_format": BASE64}


def ask_in_turn(
    rounds: Rounds, host: dict[str, float], system: str, target: Target, bodies: Iterator[list[str]], pid: int
) -> None:
    """Each number of clients, once; `host` gets the processor seconds of the most of them, by system and process."""
    for num_clients in NUM_CLIENTS:
        before = count_cpu_seconds(pid)
        taken = ask_for(target, bodies, num_clients, SECONDS)
        after = count_cpu_seconds(pid)
        rounds.setdefault((system, num_clients), []).append(Round(taken, SECONDS))
        if num_clients == MANY:
            for name in after:
                of = f"{system}: {name}"
                host[of] = host.get(of, 0.0) + after[name] - before.get(name, 0.0)


def judge(rounds: Rounds, host: Mapping[str, float]) -> Report:
    """The report on all rounds, and on the processor seconds of those with the most clients."""
    rows = []
    for (system, num_clients), each in rounds.items():
        rates, p50, p99 = (Spread.of([getattr(one, name) for one in each]) for name in ("rate", "p50", "p99"))
        cells = rates.describe(write_number), p50.describe(write_seconds), p99.describe(write_seconds)
        rows.append((f"{system}, {num_clients} client{'s' * (num_clients > 1)}", *cells))
    pairs = list(zip(rounds[OURS, MANY], rounds[PEER, MANY], strict=True))
    rate = Spread.of([ours.rate / peer.rate for ours, peer in pairs])
    p99 = Spread.of([ours.p99 / peer.p99 for ours, peer in pairs])
    measures = [
        Measure(
            f"requests/s with {MANY} clients, to infinity's server",
            rate.describe(write_ratio),
            f"≥ {RATE_TARGET:g}×",
            rate.median >= RATE_TARGET,
        ),
        Measure(f"p99 with {MANY} clients, to its", p99.describe(write_ratio), "≤ 1×", p99.median <= 1),
    ]
    num_requests = {system: sum(len(one.taken) for one in rounds[system, MANY]) for system in (OURS, PEER)}
    costs = [
        (name, f"{1000 * seconds / num_requests[name.partition(':')[0]]:.2f} ms")
        for name, seconds in sorted(host.items(), key=lambda item: -item[1])
        if seconds / num_requests[name.partition(":")[0]] >= 1e-5
    ]
    return Report(
        "embeddings",
        f"One to {MOST_TEXTS} short texts a request, base64, {len(pairs)} rounds of {SECONDS:g} s.",
        (
            tabulate(measures),
            Table(("system", "requests/s", "p50", "p99"), tuple(rows)),
            Table((f"process, {MANY} clients", "processor time a request"), tuple(costs)),
        ),
        (
            "The same bodies to both, with each one's own name of the model; infinity's server has torch and its own "
            "defaults. The clients share the cores with what they ask.",
            "What a request costs the host is all but our model process; infinity's server has the model in its own.",
        ),
    )
