"""A pytest plugin that records what each test costs and which lines of the product run in its processes.

Lines are recorded by coverage, in the test process and in every Python process that a test starts; each carries
the test's name as its context. A process that is killed records nothing.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import coverage
import psutil
import pytest

# The folder of the records, given to the test processes and their children by `python -m tests.core record`.
FOLDER: Final = "TESTS_RECORDED_IN"
# Which test a process that is started now belongs to; coverage.ini reads it.
TEST: Final = "RECORDED_TEST"


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Recorder(Path(os.environ[FOLDER])), "recorder")


class Recorder:
    """Switches coverage to each test in turn, and notes the processor time of the test and of what it started."""

    def __init__(self, folder: Path) -> None:
        self._costs = folder / f"costs.{os.getpid()}.jsonl"
        self._coverage = coverage.Coverage(config_file=os.environ["COVERAGE_PROCESS_START"], data_suffix=True)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        os.environ[TEST] = item.nodeid
        self._coverage.switch_context(item.nodeid)
        before = count_seconds()
        outcome = yield
        cost = {"test": item.nodeid, "seconds": round(count_seconds() - before, 2)}
        with self._costs.open("a", encoding="utf-8") as file:
            file.write(json.dumps(cost) + "\n")
        return outcome

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()


def count_seconds() -> float:
    """Return the processor time so far of this process, of its children that ended, and of those that run."""
    seconds = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        try:
            seconds += sum(child.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return seconds
