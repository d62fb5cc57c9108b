"""A real Postgres: what it is like, what survives, what is cleaned up, and what root must not do."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from vectormill import processes
from vectormill.embedded import account, binaries
from vectormill.embedded.errors import AlreadyRunning, EmbeddedServerFailed
from vectormill.embedded.postgres import EmbeddedPostgres

REPOSITORY = Path(__file__).resolve().parents[2]
NOBODY = 65534

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has PR_SET_PDEATHSIG")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as another user")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def connect(url: str) -> "psycopg.Connection[tuple[object, ...]]":
    return psycopg.connect(url.replace("+psycopg", ""), autocommit=True)


def value(url: str, query: str) -> object:
    with connect(url) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def servers_of(home: Path) -> list[int]:
    return [process.pid for process in processes.running_in(home / "postgres" / "data", "postgres")]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A directory that is wholly cleaned up: a cluster may lie elsewhere."""
    yield tmp_path
    if (tmp_path / "postgres").exists():
        EmbeddedPostgres(tmp_path).destroy()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A running server for tests that only look."""
    home = tmp_path_factory.mktemp("shared")
    server = EmbeddedPostgres(home)
    try:
        yield home, server.start()
    finally:
        server.destroy()


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT '[1,2]'::halfvec(2) <=> '[1,2]'::halfvec(2)", 0.0),
        ("SHOW server_encoding", "UTF8"),
        ("SELECT datlocale FROM pg_database WHERE datname = current_database()", "C.UTF-8"),
        ("SHOW data_checksums", "on"),
        ("SHOW fsync", "on"),
        ("SHOW max_wal_size", "4GB"),  # ours, not the default of 1GB: the settings file is read
        ("SHOW listen_addresses", ""),  # a socket only
        ("SELECT count(*)::int FROM pg_hba_file_rules WHERE auth_method <> 'scram-sha-256'", 0),
    ],
)
def test_the_server_is_set_up_as_promised(shared: tuple[Path, str], query: str, expected: object) -> None:
    assert value(shared[1], query) == expected


def test_nobody_gets_in_without_the_password(shared: tuple[Path, str]) -> None:
    home, url = shared
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        connect(url.replace(url.split(":")[2].split("@")[0], "wrong"))
    cluster = home / "postgres"
    assert [mode(cluster), mode(cluster / "data"), mode(cluster / "run")] == [0o700] * 3
    assert mode(cluster / "password") == 0o600


def test_a_second_server_on_the_same_cluster_is_refused_and_told_who_runs(shared: tuple[Path, str]) -> None:
    with pytest.raises(AlreadyRunning, match=rf"vectormill \(pid {os.getpid()}\) is running on {shared[0]};"):
        EmbeddedPostgres(shared[0]).start()
    assert value(shared[1], "SELECT 1") == 1


def test_data_and_url_survive_a_stop_and_no_process_does(home: Path) -> None:
    server = EmbeddedPostgres(home)
    url = server.start()
    value(url, "CREATE TABLE t AS SELECT 7 AS x; SELECT 1") if False else connect_and_run(url)
    server.stop()
    assert servers_of(home) == []
    assert server.pid is None
    server.stop()  # again is no error
    assert EmbeddedPostgres(home).start() == url
    assert value(url, "SELECT x FROM t") == 7


def test_committed_data_survives_the_death_of_the_server(home: Path) -> None:
    server = EmbeddedPostgres(home)
    url = server.start()
    connect_and_run(url)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    assert server.start() == url
    assert value(url, "SELECT x FROM t") == 7
    server.stop()


def connect_and_run(url: str) -> None:
    with connect(url) as connection:
        connection.execute("CREATE TABLE t AS SELECT 7 AS x")
