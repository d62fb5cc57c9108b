"""The measured processes: their roles, the processor time they used, and the memory they take."""

import re
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Final, Self

import psutil

MODEL_PROCESS: Final = "model process"
CELERY_WORKER: Final = "Celery worker"


def name_process(arguments: Sequence[str]) -> str:
    """Return the role of one of our processes, read from its command line."""
    # The folder of this module has moved, and other commits are measured too.
    if any("runner_process import main" in argument for argument in arguments):
        return MODEL_PROCESS
    if "worker.app" in arguments:
        return CELERY_WORKER
    if "vectormill.cli" in arguments[:-1]:
        command = arguments[list(arguments).index("vectormill.cli") + 1]
        return "worker's launcher" if command == "worker" else command
    if "flower" in arguments:
        return "flower"
    if not arguments:
        return "ended"
    # Servers overwrite their command line: "postgres: checkpointer", "valkey-server 127.0.0.1:6379".
    return PurePath(re.split(r"[:\s]", arguments[0])[0]).name.removesuffix("-server")


def list_tree(pid: int) -> list[psutil.Process]:
    """Return a process, first, and all its descendants."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def find_named(processes: Sequence[psutil.Process], name: str) -> list[psutil.Process]:
    """Return the processes that `name_process` gives this name."""
    return [process for process in processes if name_process(_arguments(process)) == name]


def count_cpu_seconds(pid: int) -> dict[str, float]:
    """Return the user and system seconds of a process and its descendants so far, by process name.

    The time of children that ended and were waited for counts as their parent's. So Postgres's short-lived
    processes are not lost, and the difference between two readings is exact even if processes ended in
    between.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for process in list_tree(pid):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        # macOS does not count the time of ended children.
        ended = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
        seconds[name_process(_arguments(process))] += times.user + times.system + ended
    return dict(seconds)


def subtract_readings(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Return the processor seconds between two readings by process name, the largest first.

    A value can be negative when the process ended in between: its parent then has that time, and the sum is
    right.
    """
    spent = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in {*after, *before}}
    return dict(sorted(spent.items(), key=lambda entry: (-entry[1], entry[0])))


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


class Alongside(ABC):
    """A thread that executes `run` for as long as a block lasts; at the block's end `is_over` is set."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self.run, name=type(self).__name__, daemon=True)

    @abstractmethod
    def run(self) -> None:
        """Work until `is_over` is set."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.is_over.set()
        self._thread.join()


class PeakSampler(Alongside):
    """A thread that samples a number of bytes: `before_bytes` before the block, `peak_bytes` during it.

    A peak that is shorter than the pause between two samples may be missed.
    """

    def __init__(self, read: Callable[[], int], pause_seconds: float) -> None:
        super().__init__()
        self._read = read
        self._pause_seconds = pause_seconds
        self.before_bytes = self.peak_bytes = 0

    @property
    def growth_bytes(self) -> int:
        return self.peak_bytes - self.before_bytes

    def __enter__(self) -> Self:
        self.before_bytes = self.peak_bytes = self._read()
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__()
        self.peak_bytes = max(self.peak_bytes, self._read())

    def run(self) -> None:
        while not self.is_over.wait(self._pause_seconds):
            self.peak_bytes = max(self.peak_bytes, self._read())


def sample_memory(processes: Sequence[psutil.Process], pause_seconds: float = 0.005) -> PeakSampler:
    """Return a sampler of the resident bytes of all processes together.

    Memory pages that two processes share count twice.
    """
    return PeakSampler(partial(resident_bytes, processes), pause_seconds)


def resident_bytes(processes: Sequence[psutil.Process]) -> int:
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
