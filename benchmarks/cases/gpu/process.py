"""StepProcess: a step in a process of its own, which is ended at the step's limit with all that it started."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.cases.gpu.driver import Ending
from benchmarks.cases.gpu.plan import Step
from benchmarks.cases.gpu.state import DONE, FAILED, TIMED_OUT
from benchmarks.peers.environment import ROOT
from benchmarks.results.writing import write_seconds
from vectormill.processes.logfile import tail_of
from vectormill.settings import process_environment

# From the request to leave until it is killed: servers stop, and models in other processes end.
LEAVE_SECONDS: Final = 10.0
CHILD: Final = "benchmarks.cases.gpu.child"


@dataclass(frozen=True, slots=True)
class StepOrder:
    """What a step's process is told. `devices` are names, `step` the fields of a Step; `result` is the file of what it
    found, `directory` is for whatever it writes beside that.
    """

    step: Mapping[str, Any]
    scale: str
    devices: tuple[str, ...]
    models: str
    directory: str
    result: str
    given: Mapping[str, Any]


class StepProcess:
    """A RunStep. Logs are kept in `directory`, by the name of the step; `module` is what runs one."""

    def __init__(
        self, scale: str, devices: tuple[str, ...], models: Path, directory: Path, module: str = CHILD
    ) -> None:
        self._scale = scale
        self._devices = devices
        self._models = models
        self._directory = directory
        self._module = module

    def __call__(self, step: Step, given: Mapping[str, Any]) -> Ending:
        logs = self._directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{step.name.replace(' ', '-')}.log"
        with tempfile.TemporaryDirectory(prefix="vectormill-gpu-") as temporary:
            if os.geteuid() == 0:
                Path(temporary).chmod(0o711)  # root's Postgres runs as another user
            result = Path(temporary) / "result.json"
            order = StepOrder(
                asdict(step), self._scale, self._devices, str(self._models), temporary, str(result), given
            )
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [sys.executable, "-m", self._module, json.dumps(asdict(order))],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    env=process_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    start_new_session=True,
                )
            try:
                status: int | None = process.wait(step.limit_seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:  # also when somebody ends us
                end_tree(process)
            found = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else {}
        if status == 0:
            return Ending(DONE, found)
        if status is None:
            return Ending(TIMED_OUT, found, f"it was ended after {write_seconds(step.limit_seconds)}")
        words = tail_of(log).strip() or f"it ended with status {status} and said nothing"
        return Ending(FAILED, found, words)


def end_tree(process: "subprocess.Popen[bytes]") -> None:
    """Asks the process to leave, and kills it after a while, and whatever is left of what it had started."""
    tree: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        tree = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(psutil.Error):
                tree += psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
    for each in tree:
        with contextlib.suppress(
            psutil.Error
        ):  # a process that ended, also where its number is another's now
            each.kill()
    psutil.wait_procs(tree, LEAVE_SECONDS)
