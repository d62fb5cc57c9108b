"""HostStack: a whole `vectormill up` of some commit whose device is made up, and what a job costs its processes."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.order import BenchmarkFailed
from benchmarks.probes.process_tree import count_cpu_seconds, subtract_readings
from benchmarks.systems.host.device_clock import DeviceClock
from benchmarks.systems.host.made_up import MadeUpDevice
from benchmarks.systems.host.tree import python_environment
from benchmarks.systems.own.own_stack import OwnStack
from vectormill.client import Client
from vectormill.domain.jobs.job import COMPLETED
from vectormill.files.ndjson import ItemJson

POLL_SECONDS: Final = 0.25
START_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class JobCost:
    """`seconds` from the first chunk's claim to the last commit; processor seconds by process from the submission on,
    and `busy_seconds`, of all of them together, since it was submitted. Stages are those that the job tells.
    """

    seconds: float
    num_texts: int
    cpu_seconds: Mapping[str, float]
    busy_seconds: float
    stage_seconds: Mapping[str, float]
    device_seconds: float
    num_batches: int


class HostStack:
    """A context manager. `settings` are further variables, such as the size of batches."""

    def __init__(
        self,
        name: str,
        linked: Path,
        data_dir: Path,
        device: MadeUpDevice,
        settings: Mapping[str, str],
        model: str | None = None,
    ) -> None:
        self.name = name
        variables = {**python_environment(linked), **device.to_environment(), **settings}
        self._stack = OwnStack(data_dir, variables, model)
        self._model = model
        self._clock = DeviceClock(Path(device.clock))
        self._exits = ExitStack()
        self._num_jobs = 0

    def __enter__(self) -> Self:
        with ExitStack() as exits:
            exits.callback(self._clock.close)
            exits.enter_context(self._stack)
            self._client = exits.enter_context(Client(self._stack.wait_until_ready()))
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exits.__exit__(kind, error, traceback)

    @property
    def pid(self) -> int:
        return self._stack.pid

    def wait_for_batches(self) -> None:
        """Until the device gets something to do. Raises BenchmarkFailed when nothing comes."""
        num_batches = self._clock.read().num_batches
        deadline = time.monotonic() + START_SECONDS
        while self._clock.read().num_batches == num_batches:
            if time.monotonic() > deadline:
                raise BenchmarkFailed(f"{self.name}: no batch came within {START_SECONDS:.0f} s.")
            time.sleep(POLL_SECONDS)

    def encode(self, items: Sequence[ItemJson]) -> JobCost:
        """What a job of these items costs. Raises BenchmarkFailed when one of them has no vector."""
        self._num_jobs += 1
        before = count_cpu_seconds(self.pid)
        device_before = self._clock.read()
        job = self._client.submit(items, model=self._model, collection=f"host_{self._num_jobs}")
        submitted = count_cpu_seconds(self.pid)
        job = self._client.wait(job["id"], poll_seconds=POLL_SECONDS)
        after = count_cpu_seconds(self.pid)
        device_after = self._clock.read()
        if job["state"] != COMPLETED:
            raise BenchmarkFailed(f"{self.name}: the job ended {job['state']}, not completed.")
        return JobCost(
            seconds=count_seconds(job),
            num_texts=len(items),
            cpu_seconds=subtract_readings(after, before),
            busy_seconds=sum(subtract_readings(after, submitted).values()),
            stage_seconds=job["stage_seconds"],
            device_seconds=device_after.busy_seconds - device_before.busy_seconds,
            num_batches=device_after.num_batches - device_before.num_batches,
        )


def count_seconds(job: Mapping[str, Any]) -> float:
    """From the first claim to the transaction that committed the last vectors, by Postgres's clock."""
    started, finished = (datetime.fromisoformat(job[name]) for name in ("started_at", "finished_at"))
    return (finished - started).total_seconds()
