"""Where the model process runs and when it ends: pinned to its device's cores, and never longer than its worker."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.faulty_engine import CRASH
from vectormill.models.registry import DEFAULT_MODEL, EncodingOptions, Registry, make_spec
from worker.batching.batch import Batch
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor
from worker.encoder.encoder import EncoderOrder
from worker.engine.engine import Engine
from worker.engine.request import EncodeRequest
from worker.runner import runner as runner_module
from worker.runner.messages import Encode, Encoded, Load, Loaded, Started
from worker.runner.runner import Runner, RunnerLost
from worker.settings import WorkerSettings

FACTORY = "tests.faulty_engine:FaultyEncoder"
CARD = Registry({}).card(DEFAULT_MODEL)

# A worker in one line: starts an engine, says so, and waits for the end.
WORKER = f"""
import pathlib, sys, threading
from vectormill.models.registry import Registry
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor
from worker.engine.engine import Engine
from worker.settings import WorkerSettings
card, device = Registry({{}}).card("{DEFAULT_MODEL}"), split_processor(detect_inventory(), 1)[0]
engine = Engine(card, device, WorkerSettings(), pathlib.Path(sys.argv[1]), factory="{FACTORY}")
engine.start()
print("started", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
def test_the_model_process_dies_with_its_worker_however_that_happens(
    tmp_path: Path, death: signal.Signals
) -> None:
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()) as worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "started\n"
            runners = psutil.Process(worker.pid).children(recursive=True)
            assert runners
        finally:
            os.kill(worker.pid, death)
    _, alive = psutil.wait_procs(runners, timeout=80)
    assert alive == []


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="macOS pins no process to cores")
def test_the_model_process_runs_on_the_cores_of_its_device_only(tmp_path: Path) -> None:
    inventory = detect_inventory()
    device = split_processor(inventory, min(2, len(inventory.physical_cores)))[-1]
    engine = Engine(CARD, device, WorkerSettings(), tmp_path, factory=FACTORY)
    engine.start()
    try:
        affinities = [set(child.cpu_affinity()) for child in psutil.Process().children()]
        assert set(device.cores) in affinities
    finally:
        engine.stop()


def test_an_engine_that_has_nothing_to_do_uses_no_processor_time(tmp_path: Path) -> None:
    engine = Engine(
        CARD, split_processor(detect_inventory(), 1)[0], WorkerSettings(), tmp_path, factory=FACTORY
    )
    engine.start()
    try:
        request = EncodeRequest("r", make_spec(CARD, EncodingOptions()), [b"a text"], False, 100)
        engine.encode(request, threading.Event())
        runner = max(psutil.Process().children(), key=lambda child: child.create_time())

        def has_rested() -> bool:
            """Nothing is used in a second. Who looks for work all the time has no such second."""
            before = time.process_time() + sum(runner.cpu_times()[:2])
            threading.Event().wait(1.0)
            assert runner.is_running()
            return time.process_time() + sum(runner.cpu_times()[:2]) - before < 0.03

        assert any(has_rested() for _ in range(10))  # other threads of the tests may end in one of them
    finally:
        engine.stop()


def start_runner(cache_dir: Path) -> Runner:
    device = split_processor(detect_inventory(), 1)[0]
    return Runner(Load(FACTORY, EncoderOrder(CARD, device, "auto", "auto", 1, cache_dir)), dict(os.environ))


def test_what_a_runner_said_before_it_died_is_heard(tmp_path: Path) -> None:
    """Else a batch that it had finished would be blamed for its death."""
    runner = start_runner(tmp_path)
    assert isinstance(runner.receive()[0], Loaded)
    for number, word in enumerate((1, CRASH), start=1):
        runner.send(Encode(number, Batch.from_ids([np.array([word], np.int32)]), is_urgent=False))
    psutil.Process(runner.pid).wait(80)
    said = runner.kill()
    assert {(type(message), message.number) for message in said} == {(Started, 1), (Encoded, 1), (Started, 2)}
    assert runner.kill() == []


def test_a_process_that_reads_nothing_any_more_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose reader is stuck in a driver: a batch that fills the pipe must not be sent for ever."""
    monkeypatch.setattr(runner_module, "SEND_TIMEOUT_SECONDS", 1)
    runner = start_runner(tmp_path)
    try:
        os.kill(runner.pid, signal.SIGSTOP)
        batch = Batch.from_ids([np.ones(1, np.int32)])

        def send_on() -> None:
            for number in itertools.count():
                runner.send(Encode(number, batch, is_urgent=False))

        with pytest.raises(RunnerLost, match="has not read anything for 1 s"):
            send_on()
    finally:
        runner.kill()
    assert not psutil.pid_exists(runner.pid)


def test_a_process_that_cannot_be_killed_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that waits inside a driver. The executor, which waits for it, would look at no time-out any more."""
    monkeypatch.setattr(runner_module, "KILL_TIMEOUT_SECONDS", 0.5)
    runner = start_runner(tmp_path)
    process = psutil.Process(runner.pid)
    try:
        with monkeypatch.context() as spared:
            spared.setattr(subprocess.Popen, "kill", lambda self: None)
            process.suspend()  # nor does it see that its pipe is closed
            assert runner.kill() == []
        assert "has not exited" in caplog.text
    finally:
        process.kill()
        runner.kill()


def test_a_process_that_cannot_read_what_it_is_sent_ends(tmp_path: Path) -> None:
    """Else it would wait for batches that nobody reads, until the time of a forward pass is over."""
    runner = start_runner(tmp_path)
    assert isinstance(runner.receive()[0], Loaded)
    runner.connection.send_bytes(b"not a message")
    with pytest.raises(RunnerLost, match="status 4"):
        runner.receive()
    runner.kill()
