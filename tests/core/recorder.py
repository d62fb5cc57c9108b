"""A pytest plugin that records what each test costs and which lines of the product run in its processes.

Lines are recorded by coverage, in the test process and in every Python process that a test starts; each carries
the test's name as its context. A process that is killed records nothing.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Final
from uuid import uuid4

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
    """Switches coverage to each test in turn, and notes the processor time of the test and of what it started.

    Both are written when all tests have ended, so that no test has a cost without lines.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._costs: dict[str, float] = {}
        self._has_passed = False
        self._coverage = coverage.Coverage(config_file=os.environ["COVERAGE_PROCESS_START"], data_suffix=True)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        os.environ[TEST] = item.nodeid
        self._coverage.switch_context(item.nodeid)
        self._has_passed = False
        before = count_seconds()
        outcome = yield
        if self._has_passed:
            self._costs[item.nodeid] = round(max(count_seconds() - before, 0.0), 2)
        return outcome

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._has_passed = report.passed

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        file = self._folder / f"costs.{uuid4()}.json"
        file.write_text(json.dumps(self._costs), encoding="utf-8")


def count_seconds() -> float:
    """Return the processor time so far of this process, of its children that ended, and of those that run."""
    seconds = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        try:
            seconds += sum(child.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return seconds
