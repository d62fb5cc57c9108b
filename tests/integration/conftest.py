"""Fixtures on real servers. A server that cannot start fails the tests; nothing is skipped."""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import httpx
import pytest
from redis import Redis
from sqlalchemy import Engine, make_url

from tests.api_server import api_client
from tests.clusters import new_directory
from tests.faulty_engine import MakeEngine, making_engines
from tests.services import (
    connected_engine,
    migrated_database,
    of_database,
    running_postgres,
    running_valkey,
    settings_of,
)
from tests.webhook_receiver import Receiver, receiving
from vectormill.embedded.stack import EmbeddedStack
from vectormill.settings import Settings

# Threads that meet after every tiny product take forty times the product: the reference of a certificate takes 7 s of
# processor time with two, on cores that others use too, and 0.2 s with one. A worker sets its own number.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="module", autouse=True)
def any_folder() -> Iterator[None]:
    """Let local files of tests lie in any folder, where a test names none."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SOURCE", "OUTPUT"):
            patch.setenv(f"VECTORMILL_{name}_ROOT", "/")
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reproducible-texts", type=int, metavar="N", help="how many texts keep their bits, instead of 600"
    )
    parser.addoption(
        "--write-schema", action="store_true", help="write docs/SCHEMA.md from a migrated database"
    )
    parser.addoption(
        "--postgres-url", metavar="URL", help="a superuser's URL of another server than the embedded one"
    )
    group = parser.getgroup("histories", "histories that a seed decides (interleavings, repair, order)")
    group.addoption(
        "--interleavings", type=int, metavar="N", help="how many worlds are played instead of a few"
    )
    group.addoption(
        "--seeds", type=int, default=1, metavar="N", help="of how many seeds the histories are played"
    )
    group.addoption("--shorten", action="store_true", help="look for a short history that fails, too")
    group.addoption(
        "--first-seed", type=int, metavar="SEED", help="the first one's seed, instead of a random one"
    )


@pytest.fixture(scope="session")
def postgres_url(request: pytest.FixtureRequest) -> Iterator[str]:
    given = request.config.getoption("--postgres-url")
    with nullcontext(given) if given else running_postgres() as url:
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
def admin_url(postgres_url: str, database_url: str) -> str:
    """The administrator's URL of the test's database, for what no role of Vectormill may do."""
    return of_database(postgres_url, make_url(database_url).database or "")


@pytest.fixture
def roles(admin_url: str) -> Settings:
    """Settings with the URLs of owner, service and reader in the test's database."""
    return settings_of(admin_url)


@pytest.fixture
def admin(admin_url: str) -> Iterator[Engine]:
    """An engine of the administrator, who makes and drops roles."""
    with connected_engine(admin_url) as engine:
        yield engine


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    with connected_engine(database_url) as engine:
        yield engine


@pytest.fixture
def http(engine: Engine, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A client of an API on the test's database, with the API_SETTINGS of the test's file if it has some."""
    with api_client(engine, **getattr(request.module, "API_SETTINGS", {})) as http:
        yield http


@pytest.fixture
def client(http: httpx.Client) -> httpx.Client:
    return http


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    """Empty: what an earlier test's worker said of itself is gone."""
    with Redis.from_url(redis_url) as redis:
        redis.flushall()
        yield redis


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A data directory that does not exist yet, which any user can reach; removed with its servers."""
    with new_directory() as directory:
        yield directory / "data"
        EmbeddedStack(directory / "data").destroy()


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[MakeEngine]:
    with making_engines(tmp_path) as make:
        yield make


@pytest.fixture(scope="session")
def new_cache_dir(tmp_path_factory: pytest.TempPathFactory, conversions: Path) -> Callable[[], Path]:
    """Makes cache directories that share conversions. What an engine learns about the size of batches is its own."""

    def make() -> Path:
        directory = tmp_path_factory.mktemp("cache")
        (directory / "openvino").symlink_to(conversions)
        return directory

    return make
