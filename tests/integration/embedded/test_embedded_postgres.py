"""A real Postgres: what it is like, what survives, and what is cleaned up."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import create_engine

from tests.clusters import START_AND_WAIT, connect, new_directory, servers_of, value
from tests.database import execute
from tests.waiting import wait_for
from vectormill.embedded.errors import AlreadyRunning, EmbeddedServerFailed
from vectormill.embedded.postgres import EmbeddedPostgres
from vectormill.processes import lifetimes as processes

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has PR_SET_PDEATHSIG")


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Path, str]]:
    """A running server for tests that only look."""
    with new_directory() as home:
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
    modes = {name: (cluster / name).stat().st_mode & 0o777 for name in (".", "data", "run", "password")}
    assert modes == {".": 0o700, "data": 0o700, "run": 0o700, "password": 0o600}


def test_a_second_server_on_the_same_cluster_is_refused_and_told_who_runs(shared: tuple[Path, str]) -> None:
    with pytest.raises(AlreadyRunning, match=rf"vectormill \(pid {os.getpid()}\) is running on {shared[0]}:"):
        EmbeddedPostgres(shared[0]).start()
    assert value(shared[1], "SELECT 1") == 1


def create_table(url: str) -> None:
    with connect(url) as connection:
        connection.execute("CREATE TABLE t AS SELECT 7 AS x")


def test_data_and_url_survive_a_stop_and_no_process_does(home: Path, server: EmbeddedPostgres) -> None:
    url = server.start()
    create_table(url)
    server.stop()
    assert servers_of(home) == []
    assert server.pid is None
    server.stop()  # again is no error
    assert server.start() == url
    assert value(url, "SELECT x FROM t") == 7


def test_committed_data_survives_the_death_of_the_server(home: Path, server: EmbeddedPostgres) -> None:
    url = server.start()
    create_table(url)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    assert server.start() == url
    assert value(url, "SELECT x FROM t") == 7


@on_linux
def test_the_server_shuts_down_by_itself_when_its_parent_is_killed(
    home: Path, server: EmbeddedPostgres
) -> None:
    argv = [sys.executable, "-c", START_AND_WAIT, str(home)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        create_table(url)
        assert servers_of(home)
        parent.kill()
    wait_for(lambda: not servers_of(home))
    assert server.start() == url
    assert value(url, "SELECT x FROM t") == 7


def test_a_server_left_running_is_ended_and_started_afresh(home: Path, server: EmbeddedPostgres) -> None:
    abandoned = EmbeddedPostgres(home)
    url = abandoned.start()
    create_table(url)
    left_over = abandoned.pid
    assert left_over is not None
    assert abandoned._lock is not None
    abandoned._lock.release()  # as the kernel does when the holder is killed; on macOS the server lives on
    assert server.start() == url
    assert not processes.is_alive(left_over)
    assert value(url, "SELECT x FROM t") == 7
    abandoned.stop()
    assert value(url, "SELECT 1") == 1  # the abandoned one had nothing left to stop


def test_a_pid_file_naming_another_living_program_is_removed(home: Path, server: EmbeddedPostgres) -> None:
    url = server.start()
    server.stop()
    data = home / "postgres" / "data"
    (data / "postmaster.pid").write_text(f"{os.getpid()}\n{data}\n1\n5432\n\n\n\nready   \n")
    assert server.start() == url


@pytest.mark.parametrize("name", ['a "b" %40 ü', "with, comma"])
def test_a_directory_may_have_any_name(home: Path, name: str) -> None:
    odd = home / name
    odd.mkdir()
    server = EmbeddedPostgres(odd)
    try:
        url = server.start()
        assert value(url, "SELECT 1") == 1
        engine = create_engine(url)
        assert execute(engine, "SELECT 2").scalar() == 2
        engine.dispose()
    finally:
        server.destroy()


def test_a_half_made_cluster_is_made_anew(home: Path, server: EmbeddedPostgres) -> None:
    server.start()
    server.stop()
    (home / "postgres" / "data").rename(home / "postgres" / "data.draft")  # as killed in the middle of initdb
    assert value(server.start(), "SELECT 1") == 1


def test_a_server_that_cannot_start_says_why_with_its_own_words(home: Path, server: EmbeddedPostgres) -> None:
    server.start()
    server.stop()
    with (home / "postgres" / "data" / "postgresql.auto.conf").open("a") as configuration:
        configuration.write("max_connections = many\n")
    with pytest.raises(
        EmbeddedServerFailed, match=r"(?s)Postgres ended while starting:.*max_connections.*many"
    ):
        server.start()
    assert servers_of(home) == []


def test_a_cluster_of_another_major_version_is_refused(home: Path, server: EmbeddedPostgres) -> None:
    server.start()
    server.stop()
    (home / "postgres" / "data" / "PG_VERSION").write_text("17\n")
    with pytest.raises(EmbeddedServerFailed, match="created by Postgres 17, but version 18 is installed"):
        server.start()


def test_a_path_too_long_for_a_socket_gets_a_loopback_port_and_a_password(home: Path) -> None:
    far = home / ("long" * 30)
    far.mkdir()
    server = EmbeddedPostgres(far)
    try:
        url = server.start()
        assert "@127.0.0.1:" in url
        assert value(url, "SHOW unix_socket_directories") == ""
        server.stop()
        assert server.start() == url  # whoever was given it can go on
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            connect(url.replace(url.split(":")[2].split("@")[0], "wrong"))
    finally:
        server.destroy()
