"""ChildSystem: an encoder in a process of its own, seen from here. Asks it line by line over its standard streams."""

import contextlib
import json
import select
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.order import BenchmarkFailed
from benchmarks.probes.process_tree import MODEL_PROCESS, find_named, list_tree
from benchmarks.systems.protocol import ENCODE, REPORT, SAVE, WARM_UP, ChildOrder, Pass
from benchmarks.systems.system import EncodingProcesses
from vectormill.processes.logfile import open_log, tail_of

STOP_SECONDS: Final = 15.0
# Loading may export a model first, and a pass of a slow encoder takes minutes; a child silent for longer hangs.
ANSWER_SECONDS: Final = 1200.0


class ChildSystem:
    """A module with a `main`, run as `python -m MODULE ORDER`. See benchmarks.systems.peers.serving for its side.

    `python` may be that of another environment, which needs numpy and what the module itself imports.
    """

    def __init__(
        self,
        name: str,
        module: str,
        order: ChildOrder,
        environment: Mapping[str, str],
        python: Path | str = sys.executable,
    ) -> None:
        self.name = name
        self._python = str(python)
        self._module = module
        self._order = order
        self._environment = environment
        self._log = Path(order.vectors).with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Starts the child and waits until its model is loaded."""
        with open_log(self._log) as log:
            self._process = subprocess.Popen(
                [self._python, "-m", self._module, json.dumps(asdict(self._order))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(self._environment),
            )
        try:
            self._answer()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def warm_up(self, mix: str) -> None:
        self._ask(f"{WARM_UP} {mix}")

    def encode(self, mix: str) -> Pass:
        return Pass(**self._ask(f"{ENCODE} {mix}"))

    def report(self) -> dict[str, Any]:
        """What the encoder says of itself; empty when it says nothing."""
        return self._ask(REPORT)

    def vectors(self) -> NDArray[np.float32]:
        self._ask(SAVE)
        vectors: NDArray[np.float32] = np.load(self._order.vectors)
        return vectors

    def find_processes(self) -> EncodingProcesses:
        tree = list_tree(self._running().pid)
        # An encoder without a model process of its own holds the model itself.
        return EncodingProcesses(model=find_named(tree, MODEL_PROCESS) or tree[:1], whole=tree)

    def _ask(self, command: str) -> dict[str, Any]:
        stream = self._running().stdin
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the missing answer tells
            stream.write(command.encode() + b"\n")
            stream.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        stream = self._running().stdout
        assert stream is not None
        if not select.select([stream], [], [], ANSWER_SECONDS)[0]:
            raise BenchmarkFailed(f"{self.name} did not answer within {ANSWER_SECONDS:.0f} s.")
        line = stream.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its last words come after its last answer
                self._running().wait(STOP_SECONDS)
            raise BenchmarkFailed(f"{self.name} ended before it answered:{tail_of(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _running(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None, "the child is started by entering it"
        return self._process

    def _stop(self) -> None:
        """Closes the streams, at which the child ends; kills it when it does not."""
        process = self._running()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
