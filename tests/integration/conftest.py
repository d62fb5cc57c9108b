"""Fixtures on real servers. A server that cannot start fails the tests; nothing is skipped."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from tests.faulty_engine import MakeEngine, making_engines
from tests.services import connected_engine, migrated_database, running_postgres, running_valkey


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with running_postgres() as url:
        yield url


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with running_valkey() as url:
        yield url


@pytest.fixture
def database_url(postgres_url: str) -> Iterator[str]:
    with migrated_database(postgres_url) as url:
        yield url


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with connected_engine(database_url) as engine:
        yield engine


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[MakeEngine]:
    with making_engines(tmp_path) as make:
        yield make
