"""Our service from end to end: items go in over HTTP, and the time ends when the last vector is committed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.order import BenchmarkFailed
from benchmarks.probes.process_tree import CELERY_WORKER, MODEL_PROCESS, find_named, list_tree
from benchmarks.systems.own.own_stack import OwnStack
from benchmarks.systems.peers.serving import WARM_UP_SHARE
from benchmarks.systems.protocol import Pass
from benchmarks.systems.system import EncodingProcesses
from vectormill.client import Client
from vectormill.domain.jobs.job import COMPLETED
from vectormill.files.ndjson import ItemJson

# The client's own default: every 0.1 s, the questions took 3 % of two cores from the encoding. The end is not read off
# the clock of whoever asks.
POLL_SECONDS: Final = 0.5


class Service:
    """A stack of our own and a client. Each pass fills a collection of its own, so that rows are always new.

    `settings` are variables for the stack; `model` is a name that they register, else the packaged default.
    """

    name = "ours, end to end"

    def __init__(
        self,
        data_dir: Path,
        mixes: Mapping[str, Sequence[ItemJson]],
        settings: Mapping[str, str] | None = None,
        model: str | None = None,
    ) -> None:
        self._data_dir = data_dir
        self._mixes = mixes
        self._settings = settings or {}
        self.model = model
        self._exits = ExitStack()
        self._num_jobs = 0
        # The last pass: its job, and what went in.
        self._last: tuple[str, Sequence[ItemJson]] | None = None

    def __enter__(self) -> Self:
        with ExitStack() as exits:
            self._stack = exits.enter_context(OwnStack(self._data_dir, self._settings, self.model))
            self.client = exits.enter_context(Client(self._stack.wait_until_ready()))
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exits.__exit__(kind, error, traceback)

    def warm_up(self, mix: str) -> None:
        self._run(self._mixes[mix][::WARM_UP_SHARE])

    def encode(self, mix: str) -> Pass:
        items = self._mixes[mix]
        started_at = datetime.now(UTC)
        job = self._run(items)
        # When the transaction began that committed the last vectors, some 20 ms before its end: by the same clock.
        seconds = (datetime.fromisoformat(job["finished_at"]) - started_at).total_seconds()
        self._last = job["id"], items
        return Pass(seconds, job["num_tokens"], round(job["num_tokens"] / (1 - job["padding_waste"])))

    def _run(self, items: Sequence[ItemJson]) -> Mapping[str, Any]:
        self._num_jobs += 1
        job = self.client.wait(self.submit(items)["id"], poll_seconds=POLL_SECONDS)
        if job["state"] != COMPLETED:
            raise BenchmarkFailed(
                f"The job ended {job['state']}, with {job['num_failed']:,} of {job['num_items']:,} items failed."
            )
        return job

    def submit(self, items: Sequence[ItemJson]) -> Mapping[str, Any]:
        """A new job."""
        return self.client.submit(items, model=self.model, collection=f"mix_{self._num_jobs}")

    def read(self, job_id: str) -> Iterator[tuple[str, list[float]]]:
        """Its results by key, over HTTP."""
        for vector in self.client.vectors(job_id):
            yield vector["key"], vector["embedding"]

    def vectors(self) -> NDArray[np.float32]:
        """Read back from the database. Raises BenchmarkFailed when an item has none."""
        assert self._last is not None, "there are no vectors before the first pass"
        job_id, items = self._last
        found = {key: np.asarray(values, dtype=np.float32) for key, values in self.read(job_id)}
        missing = [item["key"] for item in items if item["key"] not in found]
        if missing:
            raise BenchmarkFailed(f"{len(missing):,} items have no result, {missing[0]!r} among them.")
        return np.stack([found[item["key"]] for item in items])

    def report(self) -> dict[str, Any]:
        """What its one worker says of its engine; empty before the worker's next sign of life."""
        workers = self.client.workers()
        report: dict[str, Any] = workers[0].get("report") or {} if workers else {}
        return report

    def find_processes(self) -> EncodingProcesses:
        tree = list_tree(self._stack.pid)
        model = find_named(tree, MODEL_PROCESS)
        return EncodingProcesses(model=model, whole=[*model, *find_named(tree, CELERY_WORKER)])
