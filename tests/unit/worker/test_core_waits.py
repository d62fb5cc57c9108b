"""How long threads wait for cores, as Linux tells it, and where it does not."""

import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.models import DEVICE
from tests.waiting import wait_for
from worker.devices import core_waits
from worker.devices.core_waits import CoreWaits
from worker.devices.device import CUDA

BUSY = "while True: pass"


@pytest.fixture(autouse=True)
def _read_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_waits, "READ_SECONDS", 0.0)


def write(proc: Path, pid: int, **waits: int) -> None:
    for thread, nanoseconds in waits.items():
        folder = proc / str(pid) / "task" / thread
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"5 {nanoseconds} 7\n")


def test_waits_are_added_up_over_threads_and_processes(tmp_path: Path) -> None:
    pid = 7
    waits = CoreWaits(replace(DEVICE, num_threads=2), lambda: pid, tmp_path)
    write(tmp_path, pid, a=9_000_000_000)
    assert waits.read() == 0.0, "what it waited before is not known to be of this worker"
    write(tmp_path, pid, a=10_000_000_000, b=1_000_000_000)
    assert waits.read() == 1.0
    pid = 8
    write(tmp_path, pid, c=50_000_000_000)
    assert waits.read() == 1.0
    write(tmp_path, pid, c=52_000_000_000)
    assert waits.read() == 2.0
    (tmp_path / "8" / "task" / "c" / "schedstat").write_text("")
    assert waits.read() == 2.0, "a kernel that counts nothing"


def test_a_gpu_and_a_process_that_is_not_there_wait_for_no_core(tmp_path: Path) -> None:
    write(tmp_path, 7, a=1)
    assert CoreWaits(replace(DEVICE, kind=CUDA), lambda: 7, tmp_path).read() == 0.0
    assert CoreWaits(DEVICE, lambda: None, tmp_path).read() == 0.0


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel counts no waits")
def test_of_three_busy_processes_on_one_core_each_waits_most_of_the_time() -> None:
    core = {min(os.sched_getaffinity(0))}
    with ExitStack() as stack:
        children = []
        for _ in range(3):
            child = subprocess.Popen([sys.executable, "-c", BUSY])
            stack.callback(child.wait)
            stack.callback(child.kill)
            os.sched_setaffinity(child.pid, core)
            children.append(child)
        waits = CoreWaits(replace(DEVICE, num_threads=1), lambda: children[0].pid)
        waits.read()
        wait_for(lambda: waits.read() > 0.3, 30, "it waited for its core")
