import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from vectormill.cli import endpoint
from vectormill.cli import stack as stacks
from vectormill.cli.app import main
from vectormill.cli.stack import Stack, StackFailed, workplace
from vectormill.domain.errors import Unavailable
from vectormill.embedded.data_dir import (
    FILE_NAME,
    LOCK_NAME,
    DirectoryLock,
    RunningStack,
    read_holder,
    write_note,
)
from vectormill.processes.lifetimes import is_alive, started_at

# Programs that run until they are ended: their long sleep is what a service does, no test waits for it.
READY = """
import pathlib, signal, sys, time
print("booting", sys.argv[1:], flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
pathlib.Path(sys.argv[sys.argv.index("--data-dir") + 1], "pid").write_text(str(__import__("os").getpid()))
print("ready  api http://127.0.0.1", flush=True)
time.sleep(60)
"""
BROKEN = "import sys; print('no room on the disk'); sys.exit(3)"
SILENT = "import time; time.sleep(60)"
STUBBORN = READY.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")


def fake_up(directory: Path, program: str) -> tuple[str, ...]:
    script = directory / "up.py"
    script.write_text(program)
    return (sys.executable, str(script))


def test_the_stack_lives_as_long_as_its_block(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Stack(data, "mini", fake_up(tmp_path, READY)) as stack:
        url = stack.wait_until_ready()
        pid = int((data / "pid").read_text())
        assert is_alive(pid)
    assert not is_alive(pid)
    log = (data / "up.log").read_text()
    assert f"'--api-port', '{url.rpartition(':')[2]}'" in log
    assert "'--model', 'mini'" in log


def test_a_stack_that_dies_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    with (
        pytest.raises(StackFailed, match=r"(?s)status 3:.*no room on the disk"),
        Stack(tmp_path, command=fake_up(tmp_path, BROKEN)) as stack,
    ):
        stack.wait_until_ready()


def test_a_stack_that_never_gets_ready_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "START_SECONDS", 0.3)
    with (
        pytest.raises(StackFailed, match="not ready within"),
        Stack(tmp_path, command=fake_up(tmp_path, SILENT)) as stack,
    ):
        stack.wait_until_ready()


def test_a_stack_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "END", ((signal.SIGTERM, 0.3),))
    with Stack(tmp_path, command=fake_up(tmp_path, STUBBORN)) as stack:
        stack.wait_until_ready()
        pid = int((tmp_path / "pid").read_text())
    assert not is_alive(pid)


def test_the_ready_line_of_an_earlier_run_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "up.log").write_text("ready  api http://127.0.0.1:1\n")
    with (
        pytest.raises(StackFailed),
        Stack(tmp_path, command=fake_up(tmp_path, BROKEN)) as stack,
    ):
        stack.wait_until_ready()


# In a process of its own, since a signal that arrives too early or too late ends the process that gets it.
TERMINATED = """
import os, signal, sys, time
from pathlib import Path
from vectormill.cli.stack import Stack

before = signal.getsignal(signal.SIGTERM)
try:
    with Stack(Path(sys.argv[1]), command=(sys.executable, sys.argv[2])) as stack:
        stack.wait_until_ready()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)  # the signal ends it
finally:
    print(signal.getsignal(signal.SIGTERM) is before)
"""


def test_sigterm_ends_the_block_and_the_stack(tmp_path: Path) -> None:
    _, script = fake_up(tmp_path, READY)
    argv = [sys.executable, "-c", TERMINATED, str(tmp_path), script]
    ended = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGTERM, "True\n")
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_a_temporary_workplace_is_removed_with_all_that_is_in_it() -> None:
    with workplace(None) as directory:
        (directory / "postgres").mkdir()
        (directory / "postgres" / "file").write_text("x")
    assert not directory.exists()


def test_a_given_workplace_is_made_and_kept(tmp_path: Path) -> None:
    with workplace(tmp_path / "a" / "b") as directory:
        (directory / "file").write_text("x")
    assert (tmp_path / "a" / "b" / "file").exists()
    assert directory.stat().st_mode & 0o066 == 0, "nobody else looks around in it"


def note_stack(directory: Path, api_url: str | None) -> None:
    pid = os.getpid()
    write_note(directory, RunningStack(pid, started_at(pid) or 0.0, "postgresql://", "redis://", api_url))


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[Path]:
    """A data directory on which a stack starts, whose servers run and whose API does not answer yet."""
    lock = DirectoryLock(tmp_path / LOCK_NAME)
    lock.acquire()
    note_stack(tmp_path, None)
    yield tmp_path
    lock.release()


def test_a_command_waits_for_the_stack_that_starts_on_its_data_directory(
    starting: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The stack names its API while the command pauses between two looks.
    monkeypatch.setattr(time, "sleep", lambda seconds: note_stack(starting, "http://127.0.0.1:2"))
    monkeypatch.setenv("VECTORMILL_API_URL", "http://127.0.0.1:3")
    assert endpoint.find_service("api_url", data_dir=starting).api_url == "http://127.0.0.1:2"
    assert "Waiting for the stack" in capsys.readouterr().err


def test_a_stack_that_was_killed_is_not_waited_for_when_its_pid_is_another_process(
    starting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_holder(starting / LOCK_NAME) == os.getpid()
    (starting / FILE_NAME).unlink()
    # So it is after a reboot, and in a container, where pids begin again.
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: time.time() + 3600)
    assert read_holder(starting / LOCK_NAME) is None
    assert endpoint.await_stack(starting, seconds=0.0) is None


def test_a_stack_that_names_no_api_ends_the_wait_with_a_sentence(starting: Path) -> None:
    with pytest.raises(Unavailable, match=r"has not announced its API within 0 s: see .*logs"):
        endpoint.await_stack(starting, seconds=0.0)


def test_a_command_with_a_data_directory_on_which_nothing_runs_asks_no_other_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VECTORMILL_API_URL", "http://127.0.0.1:3")
    with pytest.raises(SystemExit) as end:
        main(("workers", "--data-dir", str(tmp_path)))
    assert end.value.code == 3
    assert f"No stack is running on {tmp_path}" in capsys.readouterr().err


POSTGRES, REDIS, OTHER = "postgresql://mine", "redis://mine", "redis://other"


def note_servers(directory: Path) -> None:
    pid = os.getpid()
    write_note(directory, RunningStack(pid, started_at(pid) or 0.0, POSTGRES, REDIS, "http://127.0.0.1:2"))


@pytest.mark.parametrize(
    ("is_named", "set_here", "found"),
    [
        (True, {}, (POSTGRES, REDIS)),
        (False, {}, (POSTGRES, REDIS)),
        (True, {"DATABASE_URL": OTHER, "REDIS_URL": OTHER}, (POSTGRES, REDIS)),  # the directory was named
        (False, {"DATABASE_URL": OTHER, "REDIS_URL": OTHER}, (OTHER, OTHER)),
        (False, {"DATABASE_URL": POSTGRES}, (POSTGRES, REDIS)),  # `up` was started with this setting
        (False, {"REDIS_URL": OTHER}, (None, OTHER)),  # not Redis of one service with Postgres of another
    ],
)
def test_every_command_finds_the_servers_of_one_service(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_named: bool,
    set_here: Mapping[str, str],
    found: tuple[str | None, str | None],
) -> None:
    note_servers(tmp_path)
    monkeypatch.setenv("VECTORMILL_DATA_DIR", str(tmp_path / "nothing" if is_named else tmp_path))
    for name, value in set_here.items():
        monkeypatch.setenv(f"VECTORMILL_{name}", value)
    service = endpoint.find_service("database_url", "redis_url", data_dir=tmp_path if is_named else None)
    assert (service.database_url, service.redis_url) == found


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("worker.launcher", ["worker", "--model", "mine"]),
        ("scheduler.main", ["scheduler"]),
        ("indexer.main", ["indexer"]),
        ("api.app", ["api"]),
        ("vectormill.broker.flower", ["flower"]),
    ],
)
def test_a_process_finds_the_stack_of_the_data_directory_or_says_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str,
    arguments: Sequence[str],
) -> None:
    monkeypatch.setenv("VECTORMILL_DATA_DIR", str(tmp_path))
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert f"`vectormill up --data-dir {tmp_path}`" in capsys.readouterr().err
    found = []
    monkeypatch.setattr(f"{program}.run", lambda settings, *rest, **named: found.append(settings))
    note_servers(tmp_path)
    for options in ([], ["--data-dir", str(tmp_path)]):
        with contextlib.suppress(SystemExit):
            main([*arguments, *options])
    assert {(each.database_url, each.redis_url) for each in found} == {(POSTGRES, REDIS)}
    assert len(found) == 2
