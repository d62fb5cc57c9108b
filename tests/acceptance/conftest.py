"""The whole system as a user runs it: `vectormill up` in a child process, spoken to over HTTP."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.acceptance.stack import Stack, StackOnLoan
from tests.clusters import new_directory
from vectormill.embedded.stack import EmbeddedStack


@pytest.fixture
def data_dir() -> Iterator[Path]:
    # Not pytest's tmp_path: as root the servers' user could not reach it, and its path is long for a socket.
    with new_directory() as directory:
        yield directory / "data"
        EmbeddedStack(directory / "data").destroy()


@pytest.fixture(scope="session")
def stack_on_loan() -> Iterator[StackOnLoan]:
    stack_on_loan = StackOnLoan()
    try:
        yield stack_on_loan
    finally:
        stack_on_loan.end()


@pytest.fixture
def stack(stack_on_loan: StackOnLoan) -> Stack:
    """A stack that runs, is whole and has no open job. Earlier tests may have used it."""
    return stack_on_loan.lend()


@pytest.fixture
def collection() -> str:
    """A name that no earlier test has used."""
    return f"docs_{uuid4().hex[:8]}"
