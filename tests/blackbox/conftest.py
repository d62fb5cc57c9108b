"""One service for all black-box tests, started again where a test has left it broken."""

import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.blackbox.service import Service, new_service


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vectormill", help="The program to test; else the one beside this Python.")
    parser.addoption(
        "--write-seen", action="store_true", help="Keep what users see now as what they are to see."
    )


@pytest.fixture(scope="session")
def program(pytestconfig: pytest.Config) -> Path:
    """The `vectormill` to test: that of `--vectormill`, else the one beside the Python of the tests."""
    named = pytestconfig.getoption("--vectormill", default=None)
    return Path(named) if named else Path(sys.executable).parent / "vectormill"


@pytest.fixture(scope="session")
def running(program: Path) -> Iterator[Service]:
    with new_service(program) as service:
        service.start()
        yield service


@pytest.fixture
def service(running: Service) -> Service:
    """The service, whole: whatever the test before did to it."""
    if running.process is None or running.process.poll() is not None:
        running.start()
    return running


@pytest.fixture
def name() -> str:
    """A name for a collection that no other test has."""
    return f"c_{uuid4().hex[:10]}"
