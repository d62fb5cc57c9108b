"""Fixtures for tests of the whole system: `vectormill up` in a child process, used over HTTP."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.acceptance.parts import Parts, running_parts
from tests.acceptance.stack import Stack, lending, running_stack
from tests.clusters import new_directory
from vectormill.embedded.stack import EmbeddedStack

os.environ["OMP_NUM_THREADS"] = "1"  # as in tests/integration


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption(
        "--soak-seconds", type=float, default=60.0, help="How long test_chaos.py kills and stops."
    )
    group.addoption("--chaos-seed", type=int, help="Replays the plan of faults of an earlier run.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raise the soak test's time limit: its faults, and the time that a busy machine needs to recover."""
    for item in items:
        if item.path.name == "test_chaos.py":
            item.add_marker(pytest.mark.timeout(config.getoption("--soak-seconds") + 600))


@pytest.fixture
def data_dir() -> Iterator[Path]:
    # pytest's tmp_path is unreachable for the servers' user when tests run as root, and its path is too long
    # for a socket.
    with new_directory() as directory:
        yield directory / "data"
        EmbeddedStack(directory / "data").destroy()


@pytest.fixture(scope="session")
def lend_stack() -> Iterator[Callable[[], Stack]]:
    with lending(running_stack) as lend:
        yield lend


@pytest.fixture
def stack(lend_stack: Callable[[], Stack]) -> Stack:
    """Return a running, healthy stack without open jobs. Earlier tests may have used it."""
    return lend_stack()


@pytest.fixture
def collection() -> str:
    """Return a name for a collection that no earlier test has used."""
    return f"docs_{uuid4().hex[:8]}"


@pytest.fixture(scope="session")
def lend_parts() -> Iterator[Callable[[], Parts]]:
    with lending(running_parts) as lend:
        yield lend


@pytest.fixture
def parts(lend_parts: Callable[[], Parts], request: pytest.FixtureRequest) -> Iterator[Parts]:
    """Yield servers, API, scheduler and two workers of a tiny model, healthy and without open jobs."""
    parts = lend_parts()
    num_failed = request.session.testsfailed
    yield parts
    if request.session.testsfailed > num_failed:
        print(parts.log_tails())
