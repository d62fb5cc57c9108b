"""Tests that failed, and tests that were left when a test process died, are run again by `make test-again`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from tests.completeness import Completeness

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Completeness(config))
"""
TESTS = """
import os
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(6))
def test_it(number):
    if number == 2 and "DIES" in os.environ:
        os._exit(3)
    if number == 3 and not Path("was_there").exists():
        Path("was_there").touch()
        raise AssertionError("the first time")
    assert number != 4 or "FAILS" not in os.environ
"""
AGAIN = ("--last-failed", "--last-failed-no-failures=none")
TOGETHER = ("--numprocesses=2", "--dist=loadfile", "--max-worker-restart=0")
# What other packages bring into every pytest takes 1.7 s of the 2 s in which one starts; 18 are started here.
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    return tmp_path


def run(project: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments],
        cwd=project,
        env=inherited | ALONE | {"PYTHONPATH": str(Path.cwd())} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_what_passes_by_itself_is_good_and_what_fails_twice_is_not(project: Path) -> None:
    assert "1 failed, 5 passed" in run(project, *TOGETHER).stdout
    again = run(project, *AGAIN)
    assert again.returncode == 0
    assert "1 passed" in again.stdout
    assert run(project, *AGAIN).returncode == 5  # nothing to try again is no success
    (project / "was_there").unlink()
    assert "2 failed, 4 passed" in run(project, *TOGETHER, FAILS="1").stdout
    again = run(project, *AGAIN, FAILS="1")
    assert (again.returncode, "1 failed, 1 passed" in again.stdout) == (1, True)


def test_what_a_dead_process_left_is_run_again_with_what_failed(project: Path) -> None:
    assert "1 failed" in run(project, *TOGETHER, DIES="1").stdout
    again = run(project, *AGAIN)
    assert again.returncode == 1
    assert "1 failed, 3 passed" in again.stdout, "the test that died, and those behind it"
    (project / "was_there").touch()
    assert run(project, *AGAIN).returncode == 0


def test_after_a_killed_run_nothing_is_tried_again(project: Path) -> None:
    assert run(project, *AGAIN).returncode == 4  # nor where there was none
    assert run(project, "-p", "no:xdist", DIES="1").returncode == 3  # the only process dies
    again = run(project, *AGAIN)
    assert again.returncode == 4
    assert "was broken off before its end" in again.stderr
