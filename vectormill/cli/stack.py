"""Run `vectormill up` as a child process for the duration of one command, and prepare its data directory."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn, Self

from vectormill.cli.endpoint import START_SECONDS
from vectormill.domain.errors import Unavailable
from vectormill.embedded.account import make_data_dir
from vectormill.extras import require_service
from vectormill.processes.lifetimes import end_child, free_port, spawn
from vectormill.processes.logs import open_log, tail_of
from vectormill.settings import PREFIX, process_environment

COMMAND: Final = (sys.executable, "-m", "vectormill.cli")
# `up` promises to stop within 15 s.
END: Final = ((signal.SIGTERM, 30.0),)
POLL_SECONDS: Final = 0.1
LOG_NAME: Final = "up.log"
ENDING_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)


class StackFailed(Unavailable):
    """The embedded stack could not be started; its log says why."""


class Stack:
    """A context manager that runs every process of Vectormill, on free ports, during its block.

    The processes log to `up.log` in the data directory. The block begins at once; `wait_until_ready` returns
    the API's URL. `variables` are added to the environment of this process. SIGTERM and SIGHUP end the block
    as Ctrl-C does, so that nothing is left running.
    """

    def __init__(
        self,
        data_dir: Path,
        model: str | None = None,
        command: Sequence[str] = COMMAND,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        data_dir = make_data_dir(data_dir)
        self._log = data_dir / LOG_NAME
        api_port, flower_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{api_port}"
        self._command = [*command, "up", "--data-dir", str(data_dir)]
        self._command += ["--api-port", str(api_port), "--flower-port", str(flower_port)]
        self._command += [] if model is None else ["--model", model]
        self._environment = process_environment() | dict(variables or {})
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        require_service(
            is_embedded=not {f"{PREFIX}DATABASE_URL", f"{PREFIX}REDIS_URL"} <= self._environment.keys()
        )
        self._handlers = {number: signal.signal(number, _exit_on_signal) for number in ENDING_SIGNALS}
        with open_log(self._log) as output:
            output.truncate(0)  # otherwise the line `ready` of an earlier run would be found
            # The child has its own session: Ctrl-C reaches only this process, which cancels jobs first.
            self._child = spawn(self._command, env=self._environment, output=output)
        return self

    def __exit__(self, *_: object) -> None:
        # A second signal must not interrupt the shutdown.
        handlers = {
            number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *ENDING_SIGNALS)
        }
        if self._child is not None:
            end_child(self._child, END)
        for number, handler in (handlers | self._handlers).items():
            signal.signal(number, handler)

    def wait_until_ready(self) -> str:
        """Return the API's URL, once all processes are healthy. Raise StackFailed with the end of the log."""
        assert self._child is not None, "the stack is started by entering it"
        deadline = time.monotonic() + START_SECONDS
        while not any(line.startswith(b"ready") for line in self._log.read_bytes().splitlines()):
            status = self._child.poll()
            if status is not None:
                raise StackFailed(
                    f"The stack ended before it was ready, with status {status}:{tail_of(self._log)}"
                )
            if time.monotonic() > deadline:
                raise StackFailed(f"The stack was not ready within {START_SECONDS:g} s:{tail_of(self._log)}")
            time.sleep(POLL_SECONDS)
        return self.url


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@contextmanager
def workplace(data_dir: Path | None, keep: bool = False) -> Iterator[Path]:
    """Yield the given directory, or a temporary one that is removed at the end unless `keep` is set."""
    if data_dir is not None:
        yield make_data_dir(data_dir)
        return
    directory = Path(tempfile.mkdtemp(prefix="vectormill-"))
    if os.geteuid() == 0:
        directory.chmod(0o711)
    try:
        yield directory
    finally:
        if not keep:
            from vectormill.embedded.postgres import remove_cluster

            remove_cluster(directory)  # the cluster may be outside the directory
            shutil.rmtree(directory, ignore_errors=True)
