"""The whole system as a user runs it: `vectormill up` in a child process, spoken to over HTTP."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.stack import Stack
from tests.clusters import new_directory


@pytest.fixture
def data_dir() -> Iterator[Path]:
    # Not pytest's tmp_path: as root the servers' user could not reach it, and its path is long for a socket.
    with new_directory() as directory:
        yield directory / "data"


@pytest.fixture
def stack(data_dir: Path) -> Iterator[Stack]:
    stack = Stack(data_dir)
    try:
        stack.start()
        yield stack
    finally:
        stack.destroy()
