"""queries: how many searches by text are answered, and how soon, with 1, 8 and 64 clients; beside infinity's server."""

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.cases.interactive import COLLECTION, BulkLoad, fill, wait_until_idle
from benchmarks.cases.queries.infinity_server import InfinityServer
from benchmarks.cases.queries.load import Target, ask_for
from benchmarks.mixes import list_queries
from benchmarks.order import BenchmarkFailed, Order
from benchmarks.probes.process_tree import count_cpu_seconds
from benchmarks.results.report import Report
from benchmarks.results.spread import Spread, find_percentile
from benchmarks.results.table import Measure, Table, tabulate
from benchmarks.results.writing import write_number, write_ratio, write_seconds
from benchmarks.systems.own.own_stack import OwnStack
from benchmarks.texts import list_docstrings
from vectormill.cli.stack import workplace
from vectormill.client import Client
from vectormill.models.registry import find_packaged_model

NUM_ROWS: Final = 2_000
NUM_CLIENTS: Final = (1, 8, 64)
MANY: Final = NUM_CLIENTS[-1]
SECONDS: Final = 10.0
WARM_UP_SECONDS: Final = 3.0
OURS, LOADED, PEER = "ours", "ours, beside a bulk job", "infinity's server"
RATE_TARGET: Final = 2.0
LOADED_TARGET: Final = 3.0


@dataclass(frozen=True, slots=True)
class Round:
    """What so many clients had of a system in a round: seconds of every request."""

    taken: Sequence[float]
    seconds: float

    @property
    def rate(self) -> float:
        return len(self.taken) / self.seconds

    @property
    def p50(self) -> float:
        return find_percentile(self.taken, 50)

    @property
    def p99(self) -> float:
        return find_percentile(self.taken, 99)


Rounds = dict[tuple[str, int], list[Round]]


def measure(order: Order) -> Report:
    order.steps.begin("queries", 3 + 3 * order.repeat)
    texts = itertools.cycle(list_queries(1000))
    rounds: Rounds = {}
    spent: dict[str, float] = {}
    model = find_packaged_model()
    if model is None:
        raise BenchmarkFailed("The packaged model is not installed.")
    with workplace(None) as directory:
        order.steps.step("starting infinity's server")
        with InfinityServer(model, Path(directory) / "infinity.log") as peer:
            ask_for(peer.target, texts, MANY, WARM_UP_SECONDS)
            for number in range(order.repeat):
                order.steps.step(f"infinity's server, round {number + 1} of {order.repeat}")
                ask_in_turn(rounds, PEER, peer.target, texts)
        with OwnStack(directory) as stack:
            order.steps.step("starting the stack")
            with Client(stack.wait_until_ready()) as client:
                order.steps.step(f"filling a collection of {NUM_ROWS:,} rows")
                items = list_docstrings()
                fill(client, items[:NUM_ROWS])
                target = Target(
                    f"{client.base_url}/v1/collections/{COLLECTION}/search", lambda text: {"text": text}
                )
                load = BulkLoad(client, items)
                ask_for(target, texts, MANY, WARM_UP_SECONDS)
                for number in range(order.repeat):
                    order.steps.step(f"ours, round {number + 1} of {order.repeat}")
                    before = count_cpu_seconds(stack.pid)
                    ask_in_turn(rounds, OURS, target, texts)
                    after = count_cpu_seconds(stack.pid)
                    for name in after:
                        spent[name] = spent.get(name, 0.0) + after[name] - before.get(name, 0.0)
                    order.steps.step(f"ours beside a bulk job, round {number + 1} of {order.repeat}")
                    load.ensure()
                    with kept_up(load):
                        ask_in_turn(rounds, LOADED, target, texts)
                    load.end()
                    wait_until_idle(client)
    return judge(rounds, spent)


def ask_in_turn(rounds: Rounds, system: str, target: Target, texts: Iterator[str]) -> None:
    """Each number of clients, once."""
    for num_clients in NUM_CLIENTS:
        taken = ask_for(target, texts, num_clients, SECONDS)
        rounds.setdefault((system, num_clients), []).append(Round(taken, SECONDS))


@contextmanager
def kept_up(load: BulkLoad) -> Iterator[None]:
    """Another bulk job follows when one has ended, as long as the block runs."""
    is_over = threading.Event()
    failures: list[Exception] = []

    def watch() -> None:
        try:
            while not is_over.wait(1.0):
                load.ensure()
        except Exception as error:  # noqa: BLE001 - told by whoever ends the block
            failures.append(error)

    thread = threading.Thread(target=watch, name="bulk")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    if failures:
        raise BenchmarkFailed(f"The bulk job could not be kept up: {failures[0]}") from failures[0]


def judge(rounds: Rounds, spent: Mapping[str, float]) -> Report:
    """The report on all rounds, and on the processor seconds that ours spent on those of an idle stack."""
    rows = []
    for (system, num_clients), each in rounds.items():
        rates, p50, p99 = (Spread.of([getattr(one, name) for one in each]) for name in ("rate", "p50", "p99"))
        cells = rates.describe(write_number), p50.describe(write_seconds), p99.describe(write_seconds)
        rows.append((f"{system}, {num_clients} client{'s' * (num_clients > 1)}", *cells))
    pairs = list(zip(rounds[OURS, MANY], rounds[PEER, MANY], strict=True))
    rate = Spread.of([ours.rate / peer.rate for ours, peer in pairs])
    p99 = Spread.of([ours.p99 / peer.p99 for ours, peer in pairs])
    beside = Spread.of(
        [loaded.p99 / idle.p99 for loaded, idle in zip(rounds[LOADED, MANY], rounds[OURS, MANY], strict=True)]
    )
    measures = [
        Measure(
            f"requests/s with {MANY} clients, to infinity's server",
            rate.describe(write_ratio),
            f"≥ {RATE_TARGET:g}×",
            rate.median >= RATE_TARGET,
        ),
        Measure(f"p99 with {MANY} clients, to its", p99.describe(write_ratio), "≤ 1×", p99.median <= 1),
        Measure(
            f"p99 with {MANY} clients beside a bulk job, to p99 without",
            beside.describe(write_ratio),
            f"≤ {LOADED_TARGET:g}×",
            beside.median <= LOADED_TARGET,
        ),
    ]
    num_queries = sum(
        len(one.taken) for (system, _), each in rounds.items() if system == OURS for one in each
    )
    costs = [
        (name, f"{1000 * seconds / num_queries:.2f} ms")
        for name, seconds in sorted(spent.items(), key=lambda item: -item[1])
        if seconds / num_queries >= 1e-5
    ]
    return Report(
        "queries",
        f"One short text a request, {NUM_ROWS:,} rows, {len(pairs)} rounds of {SECONDS:g} s.",
        (
            tabulate(measures),
            Table(("system", "requests/s", "p50", "p99"), tuple(rows)),
            Table(("process", "processor time a query"), tuple(costs)),
        ),
        (
            "Ours encodes the text and searches; infinity's server (torch, its own defaults) answers the embedding. "
            "The clients share the cores with what they ask.",
            "Processor time is that of all rounds on an idle stack, whatever the number of clients.",
        ),
    )
