"""A Postgres of a test's own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters import new_directory
from vectormill.embedded.postgres import EmbeddedPostgres


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory that any user can reach, unlike pytest's own; removed with its cluster."""
    with new_directory() as directory:
        yield directory
        EmbeddedPostgres(directory).destroy()


@pytest.fixture
def server(home: Path) -> Iterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(home)
    yield server
    server.stop()
