"""interactive: how long a search by text takes over HTTP, on an idle stack and while a bulk job fills it."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from benchmarks.mixes import list_queries
from benchmarks.order import BenchmarkFailed, Order
from benchmarks.results.report import Report
from benchmarks.results.spread import Spread, find_percentile
from benchmarks.results.table import Measure, tabulate
from benchmarks.results.writing import write_ratio, write_seconds
from benchmarks.systems.own.own_stack import OwnStack
from benchmarks.texts import list_docstrings
from vectormill.cli.stack import workplace
from vectormill.client import Client
from vectormill.domain.jobs.job import COMPLETED, RUNNING, TERMINAL_JOB_STATES
from vectormill.files.ndjson import ItemJson

NUM_SEARCHES: Final = 200
NUM_WARM_UP_SEARCHES: Final = 10
NUM_SEARCHED_ITEMS: Final = 2_000
COLLECTION: Final = "searched"
RATIO_TARGET: Final = 3.0
# Between two searches, so that they meet the bulk job's batches at every moment of them.
PAUSE_SECONDS: Final = 0.02
# A loaded machine may need minutes for the first chunk of a job.
START_SECONDS: Final = 300.0


class BulkLoad:
    """Keeps a bulk job running: submits another, with a collection of its own, when one has ended."""

    def __init__(self, client: Client, items: Sequence[ItemJson]) -> None:
        self._client = client
        self._items = items
        self._names = (f"bulk_{number}" for number in itertools.count())
        self._job_id = ""

    def ensure(self) -> None:
        """Returns once a job's texts are being encoded."""
        if self._job_id and self._client.job(self._job_id)["state"] not in TERMINAL_JOB_STATES:
            return
        job = self._client.submit(self._items, collection=next(self._names))
        self._job_id = job["id"]
        deadline = time.monotonic() + START_SECONDS
        while not (job["state"] == RUNNING and job["num_done"]):
            if job["state"] in TERMINAL_JOB_STATES or time.monotonic() > deadline:
                raise BenchmarkFailed(f"The bulk job is {job['state']}; it is too small to load the stack.")
            time.sleep(PAUSE_SECONDS)
            job = self._client.job(self._job_id)

    def end(self) -> None:
        if self._job_id and self._client.job(self._job_id)["state"] not in TERMINAL_JOB_STATES:
            self._client.cancel(self._job_id)


def measure(order: Order) -> Report:
    num_searches = order.items or NUM_SEARCHES
    order.steps.begin("interactive", 2 + 2 * order.repeat)
    items = list_docstrings()
    texts = itertools.cycle(list_queries(1000))
    idle, loaded = [], []
    with workplace(None) as directory, OwnStack(directory) as stack:
        order.steps.step("starting the stack")
        with Client(stack.wait_until_ready()) as client:
            order.steps.step(f"filling a collection of {NUM_SEARCHED_ITEMS:,} rows")
            fill(client, items[:NUM_SEARCHED_ITEMS])
            time_searches(client, texts, NUM_WARM_UP_SEARCHES)
            load = BulkLoad(client, items)
            for number in range(order.repeat):
                order.steps.step(f"searching an idle stack, round {number + 1} of {order.repeat}")
                idle.append(time_searches(client, texts, num_searches))
                order.steps.step(f"searching beside a bulk job, round {number + 1} of {order.repeat}")
                load.ensure()
                loaded.append(time_searches(client, texts, num_searches, load.ensure))
                load.end()
                wait_until_idle(client)
    return judge_latency(idle, loaded)


def fill(client: Client, items: Sequence[ItemJson]) -> None:
    job = client.wait(client.submit(items, collection=COLLECTION)["id"])
    if job["state"] != COMPLETED:
        raise BenchmarkFailed(f"The job that fills the collection ended {job['state']}.")


def time_searches(
    client: Client, texts: Iterator[str], num_searches: int, before_each: Callable[[], None] = lambda: None
) -> list[float]:
    """Seconds of each search, one after the other; what is done before each is not timed."""
    seconds = []
    for text in itertools.islice(texts, num_searches):
        before_each()
        time.sleep(PAUSE_SECONDS)
        started = time.perf_counter()
        matches = client.search(COLLECTION, text)
        seconds.append(time.perf_counter() - started)
        if not matches:
            raise BenchmarkFailed(f"The search for {text!r} found nothing.")
    return seconds


def wait_until_idle(client: Client) -> None:
    """Until every job has ended: what was asked to end is still encoding a batch."""
    deadline = time.monotonic() + START_SECONDS
    while any(job["state"] not in TERMINAL_JOB_STATES for job in client.jobs()):
        if time.monotonic() > deadline:
            raise BenchmarkFailed("The bulk job did not end after it was cancelled.")
        time.sleep(PAUSE_SECONDS)


def judge_latency(idle: Sequence[Sequence[float]], loaded: Sequence[Sequence[float]]) -> Report:
    """The report on seconds of searches, by round."""
    p99 = [Spread.of([find_percentile(each, 99) for each in rounds]) for rounds in (idle, loaded)]
    p50 = [Spread.of([find_percentile(each, 50) for each in rounds]) for rounds in (idle, loaded)]
    ratio = Spread.of(
        [
            find_percentile(busy, 99) / find_percentile(free, 99)
            for free, busy in zip(idle, loaded, strict=True)
        ]
    )
    measures = [
        Measure(
            "p99 beside a bulk job, to p99 without",
            ratio.describe(write_ratio),
            f"≤ {RATIO_TARGET:g}×",
            ratio.median <= RATIO_TARGET,
        ),
        Measure("p99, idle", p99[0].describe(write_seconds)),
        Measure("p99, beside a bulk job", p99[1].describe(write_seconds)),
        Measure("p50, idle", p50[0].describe(write_seconds)),
        Measure("p50, beside a bulk job", p50[1].describe(write_seconds)),
    ]
    return Report(
        "interactive",
        f"{len(idle[0])} searches by text in {NUM_SEARCHED_ITEMS:,} rows, {len(idle)} rounds of each kind.",
        (tabulate(measures),),
        (
            "From the request to the answer, one search after the other, 20 ms apart: tokenizing, encoding and looking "
            "up included. The bulk job has every docstring of the standard library; another follows when it ends.",
        ),
    )
