"""A model process as its parent sees it: how it is started, where it is, and what half a message means."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import pytest

from tests.architecture.sources import ROOT
from tests.waiting import wait_for
from vectormill.domain.errors import ModelError
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.devices.device import CPU, CUDA, Device
from worker.encoder.encoder import EncoderOrder
from worker.runner import runner, starter
from worker.runner.channel import Channel, make_memory
from worker.runner.messages import LoadFailed
from worker.runner.runner import NO_ANSWER, Runner, RunnerLost, StackFile, bound_waits
from worker.runner.starter import RunnerStarter


def test_a_process_that_stops_in_the_middle_of_a_message_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "RECEIVE_TIMEOUT_SECONDS", 1)
    ours, theirs = socket.socketpair()
    bound_waits(ours)
    waiting = object.__new__(Runner)  # without a process
    memory = make_memory()
    waiting._channel = Channel(Connection(ours.detach()), memory, is_worker=True)
    waiting._free_blocks = []
    os.close(memory)
    with theirs, waiting.connection:
        theirs.sendall(b"\0\0")  # half of the length of a message
        with pytest.raises(RunnerLost, match="in the middle of a message"):
            waiting.receive()


# It waits in C: a handler written in Python would wait with it.
PROGRAM = """
import sys, threading
from worker.runner.runner import answer_with_stacks
answer_with_stacks(int(sys.argv[1]))
lock = threading.Lock()
def wait_for_ever():
    print("ready", flush=True)
    with lock:
        lock.acquire()
wait_for_ever()
"""

Child = tuple["subprocess.Popen[bytes]", StackFile]


@pytest.fixture
def child() -> Iterator[Child]:
    file = StackFile()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(file.fileno())],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        pass_fds=[file.fileno()],
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process, file
    process.kill()
    process.communicate()
    file.close()


def test_a_process_says_where_it_waits_as_often_as_it_is_asked(child: Child) -> None:
    process, file = child
    wait_for(lambda: "in wait_for_ever" in file.ask(process.send_signal))
    again = file.ask(process.send_signal)
    assert again.count("in wait_for_ever") == 1, "what it said before is not said again"
    assert process.poll() is None, "it goes on"


@pytest.mark.parametrize("ending", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_is_stopped_or_gone_gives_no_answer_and_nobody_waits_long_for_it(
    child: Child, ending: signal.Signals
) -> None:
    process, file = child
    os.kill(process.pid, ending)
    if ending == signal.SIGKILL:
        process.wait()
    assert file.ask(process.send_signal) == NO_ANSWER


EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize(
    ("kind", "environment", "expected"),
    [
        (CUDA, {}, EXPANDABLE),
        (CUDA, {"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native"),
        (CUDA, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, None),  # torch's older name for it
        (CPU, {}, None),
    ],
)
def test_the_allocator_of_a_gpu_expands_its_segments_unless_a_user_has_said_otherwise(
    monkeypatch: pytest.MonkeyPatch, kind: str, environment: dict[str, str], expected: str | None
) -> None:
    told: list[dict[str, str]] = []
    monkeypatch.setattr(starter, "Runner", lambda load, environment: told.append(environment))
    device = Device(f"{kind}:0", kind, 0, (), 1, 1 << 30, uuid="GPU-1")
    order = EncoderOrder(Registry({}).card(DEFAULT_MODEL), device, "auto", "auto", 1, Path())
    RunnerStarter("module:function", order, environment, collective_timeout_seconds=1).start()
    assert told[0].get("PYTORCH_ALLOC_CONF") == expected
    assert told[0]["HF_HUB_DISABLE_PROGRESS_BARS"] == "1", "the only bar is ours"
    assert told[0]["CUDA_VISIBLE_DEVICES"] == ("GPU-1" if kind == CUDA else "")


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_a_model_process_logs_what_its_parent_would_log(
    level: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    caplog.set_level(level)
    device = Device("cpu:0", CPU, 0, (), 1, 1 << 30)
    order = EncoderOrder(Registry({}).card(DEFAULT_MODEL), device, "auto", "auto", 1, tmp_path)
    # A line of each level: what the factory logs, and that it made no encoder.
    started = RunnerStarter("logging:info", order, os.environ, collective_timeout_seconds=1).start()
    with pytest.raises(RunnerLost):
        started.receive()
    said = capfd.readouterr().err
    assert " runner ERROR " in said
    assert (" runner INFO " in said) == (level == "INFO")
    started.stop()


def tell_interval(order: EncoderOrder) -> NoReturn:
    raise ModelError(repr(sys.getswitchinterval()))


def test_a_thread_that_launches_kernels_soon_gets_pythons_lock_in_a_model_process_alone(
    tmp_path: Path,
) -> None:
    device = Device("cpu:0", CPU, 0, (), 1, 1 << 30)
    order = EncoderOrder(Registry({}).card(DEFAULT_MODEL), device, "auto", "auto", 1, tmp_path)
    factory = f"{__name__}:{tell_interval.__name__}"
    started = RunnerStarter(factory, order, os.environ, collective_timeout_seconds=1).start()
    assert started.receive() == [LoadFailed("0.0005")]
    assert sys.getswitchinterval() == 0.005
    started.stop()


def test_a_model_process_imports_nothing_from_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('of the user')")
    monkeypatch.chdir(tmp_path)
    device = Device("cpu:0", CPU, 0, (), 1, 1 << 30)
    order = EncoderOrder(Registry({}).card(DEFAULT_MODEL), device, "auto", "auto", 1, tmp_path)
    started = RunnerStarter("logging:info", order, os.environ, collective_timeout_seconds=1).start()
    with pytest.raises(RunnerLost):
        started.receive()
    assert "of the user" not in capfd.readouterr().err
    started.stop()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, "/cache/compiled"), ({"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}, "/elsewhere")],
)
def test_what_is_compiled_lies_in_the_workers_cache_unless_a_user_has_said_otherwise(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    told: list[dict[str, str]] = []
    monkeypatch.setattr(starter, "Runner", lambda load, environment: told.append(environment))
    device = Device("cpu:0", CPU, 0, (), 1, 1 << 30)
    order = EncoderOrder(Registry({}).card(DEFAULT_MODEL), device, "auto", "auto", 1, Path("/cache"))
    RunnerStarter("module:function", order, environment, collective_timeout_seconds=1).start()
    assert told[0]["TORCHINDUCTOR_CACHE_DIR"] == expected
