"""The whole system as a user runs it: `vectormill up` in a child process, spoken to over HTTP."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.acceptance.stack import Stack


@pytest.fixture
def data_dir() -> Iterator[Path]:
    # Not pytest's tmp_path: the embedded servers outlive a test that fails, and the path must be short for a socket.
    with TemporaryDirectory(prefix="vectormill-") as directory:
        yield Path(directory) / "data"


@pytest.fixture
def stack(data_dir: Path) -> Iterator[Stack]:
    stack = Stack(data_dir)
    try:
        stack.start()
        yield stack
    finally:
        stack.destroy()
