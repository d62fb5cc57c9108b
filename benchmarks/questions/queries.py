"""queries: rate and latency of searches by text, idle and beside a bulk job; infinity's server too.

`--against` compares this checkout with another one instead, in turns.
"""

import itertools
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from benchmarks.children.null_device import python_environment
from benchmarks.clients import (
    MANY,
    NUM_CLIENTS,
    PEER,
    PEER_MODEL,
    ROUND_SECONDS,
    InfinityServer,
    Rounds,
    Target,
)
from benchmarks.harness import ROOT, BenchmarkFailed, Harness
from benchmarks.ours import OwnStack, run_job
from benchmarks.processes import Alongside
from benchmarks.questions.embeddings import OURS, ask
from benchmarks.questions.host import BEFORE, NOW
from benchmarks.tables import RATIO, Report, Spread, at_least, at_most, tabulate
from benchmarks.texts import list_docstrings, list_queries
from vectormill.cli.stack import workplace
from vectormill.client import Client
from vectormill.files.ndjson import ItemJson
from vectormill.jobs.job import RUNNING, TERMINAL_JOB_STATES

NUM_ROWS: Final = 2_000
COLLECTION: Final = "searched"
LOADED: Final = "ours, beside a bulk job"
START_SECONDS: Final = 300.0
LEAST_RATIO: Final = 0.97


def run(harness: Harness) -> Report:
    if harness.against is not None:
        return compare(harness, harness.against)
    texts = itertools.cycle(list_queries(1000))
    items = list_docstrings()
    rounds = Rounds()
    with workplace(None) as directory:
        body = {"model": PEER_MODEL}
        with InfinityServer(directory / "infinity.log", lambda text: {**body, "input": [text]}) as peer:
            ask(harness, rounds, PEER, peer.target, texts)
        with OwnStack(directory) as stack, Client(stack.url) as client:
            harness.say(f"filling a collection of {NUM_ROWS:,} rows")
            run_job(client, items[:NUM_ROWS], collection=COLLECTION)
            url = f"{stack.url}/v1/collections/{COLLECTION}/search"
            target = Target(url, lambda text: {"text": text}, stack.pid)
            Rounds().ask(OURS, target, texts)
            for number in range(harness.repeat):
                harness.say(f"ours, round {number + 1} of {harness.repeat}, idle and beside a bulk job")
                rounds.ask(OURS, target, texts)
                with BulkLoad(client, items):
                    rounds.ask(LOADED, target, texts)
    pair = [[each.percentile(99) for each in rounds[system, MANY]] for system in (LOADED, OURS)]
    beside = at_most(
        f"p99 with {MANY} clients beside a bulk job, to p99 without", Spread.of_ratios(*pair), 3.0, RATIO
    )
    return Report(
        f"One short text per request, {NUM_ROWS:,} rows, {harness.repeat} rounds of {ROUND_SECONDS:g} s.",
        (tabulate([*rounds.judge(OURS), beside]), rounds.tabulate(), rounds.tabulate_costs(OURS)),
        (
            "Ours encodes the text and searches; infinity's server (torch, its own defaults) returns the embedding. "
            "The clients share the cores with the servers.",
        ),
    )


def compare(harness: Harness, other: Path) -> Report:
    """Return the rates and latencies of this checkout and another one, whose rounds take turns."""
    texts, items, rounds = itertools.cycle(list_queries(1000)), list_docstrings(), Rounds()
    with workplace(None) as directory, ExitStack() as exits:
        targets: dict[str, Target] = {}
        for name, tree in ((NOW, ROOT), (BEFORE, other)):
            harness.say(f"starting the stack of {name}, and filling a collection of {NUM_ROWS:,} rows")
            (directory / name).mkdir(mode=0o711)
            stack = exits.enter_context(OwnStack(directory / name, python_environment(tree.resolve())))
            with Client(stack.url) as client:
                run_job(client, items[:NUM_ROWS], collection=COLLECTION)
            url = f"{stack.url}/v1/collections/{COLLECTION}/search"
            targets[name] = Target(url, lambda text: {"text": text}, stack.pid)
            Rounds().ask(name, targets[name], texts)
        for number in range(harness.repeat):
            for name in sorted(targets, reverse=bool(number % 2)):
                harness.say(f"turn {number + 1} of {harness.repeat}, {name}")
                rounds.ask(name, targets[name], texts)
    judged = []
    for num_clients in NUM_CLIENTS:
        now, before = rounds[NOW, num_clients], rounds[BEFORE, num_clients]
        rates = Spread.of_ratios([each.rate for each in now], [each.rate for each in before])
        p99 = Spread.of_ratios(
            [each.percentile(99) for each in before], [each.percentile(99) for each in now]
        )
        told = f"with {num_clients} client{'s' * (num_clients > 1)}"
        judged += [
            at_least(f"searches/s {told}, to before", rates, LEAST_RATIO, RATIO),
            at_least(f"p99 {told}, of before to now", p99, LEAST_RATIO, RATIO),
        ]
    return Report(
        f"One short text per request, {NUM_ROWS:,} rows, {harness.repeat} turns of {ROUND_SECONDS:g} s of each.",
        (tabulate(judged), rounds.tabulate(), rounds.tabulate_costs(NOW, BEFORE)),
        ("The clients share the cores with both stacks, one of which is idle.",),
    )


class BulkLoad(Alongside):
    """A thread that keeps a bulk job running during a block, submitting the next job when one has ended."""

    def __init__(self, client: Client, items: Sequence[ItemJson]) -> None:
        super().__init__()
        self._client = client
        self._items = items
        self._failure: Exception | None = None
        self._submit()

    def _submit(self) -> None:
        """Submit a job and return once its texts are being encoded."""
        job = self._client.submit(self._items, collection=f"bulk_{time.monotonic_ns()}")
        deadline = time.monotonic() + START_SECONDS
        while not (job["state"] == RUNNING and job["num_done"]):
            if job["state"] in TERMINAL_JOB_STATES or time.monotonic() > deadline:
                raise BenchmarkFailed(f"The bulk job is {job['state']}; it is too small to load the stack.")
            time.sleep(0.02)
            job = self._client.job(job["id"])
        self._job_id = job["id"]

    def run(self) -> None:
        try:
            while not self.is_over.wait(1.0):
                if self._client.job(self._job_id)["state"] in TERMINAL_JOB_STATES:
                    self._submit()
        except Exception as error:  # noqa: BLE001 - raised by whoever ends the block
            self._failure = error

    def __exit__(self, *exception: object) -> None:
        """Cancel the job and wait for its last batch. Raise BenchmarkFailed when the load was interrupted."""
        super().__exit__()
        if self._failure is not None:
            raise BenchmarkFailed(f"The bulk job could not be kept up: {self._failure}") from self._failure
        if self._client.job(self._job_id)["state"] not in TERMINAL_JOB_STATES:
            self._client.cancel(self._job_id)
            self._client.wait(self._job_id)
