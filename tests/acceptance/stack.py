"""Stack: one `vectormill up` of the checkout, as the black-box tests start it, with the client and options.

`lending` lends one service to tests in turn.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from tests.blackbox.service import Popen, Service
from tests.clusters import new_directory
from vectormill.client import Client
from vectormill.embedded.stack import EmbeddedStack
from vectormill.processes import lifetimes as processes

OPEN_JOBS = "SELECT id FROM vectormill.jobs WHERE finished_at IS NULL"


class Stack(Service):
    """One `vectormill up`: `start` starts it, `client` returns a client of its API, `destroy` removes it."""

    def __init__(
        self, data_dir: Path, environment: Mapping[str, str] = {}, *, options: Sequence[str] = ()
    ) -> None:
        super().__init__(Path(sys.executable), data_dir.parent)
        self.environment |= environment
        self.options = options

    def command(self) -> list[str]:
        program, *arguments = super().command()
        return [program, "-m", "vectormill.cli", *arguments, *self.options]

    def spawn(self) -> Popen:
        with self.log.open("ab") as output:
            # The child process stops when the tests are killed, too.
            return processes.spawn(self.command(), env=self.environment, output=output)

    def log_tails(self) -> str:
        return read_tails([self.log, *(self.data_dir / "logs").glob("*.log")])

    def destroy(self) -> None:
        try:
            if self.process is not None and self.process.poll() is None:
                # Stop rather than kill: a killed Postgres leaves a megabyte in /dev/shm that only its next
                # start would remove.
                self.stop()
        except BaseException:
            self.kill()
            raise
        finally:
            self.http.close()
            EmbeddedStack(self.data_dir).destroy()

    def client(self) -> Client:
        return Client(self.api_url)

    def urls(self) -> dict[str, str]:
        values: dict[str, str] = json.loads((self.data_dir / "stack.json").read_text())
        return values

    def is_whole_and_idle(self) -> bool:
        is_running = self.process is not None and self.process.poll() is None
        return is_running and self.is_ready() and not self.sql(OPEN_JOBS)


def read_tails(logs: Iterable[Path]) -> str:
    """Return the last lines of every log, for the report of a failed test."""
    return "\n".join(
        f"---- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-60:])
        for log in sorted(logs)
    )


@contextmanager
def running_stack(
    directory: Path | None = None, environment: Mapping[str, str] = {}, *models: str
) -> Iterator[Stack]:
    """Yield a running stack with a worker for each model; destroy it at the end."""
    with ExitStack() as cleanup:
        directory = directory or cleanup.enter_context(new_directory())
        options = [word for model in models for word in ("--model", model)]
        stack = Stack(directory / "data", environment, options=options)
        cleanup.callback(stack.destroy)
        stack.start()
        yield stack


class Lendable(Protocol):
    def is_whole_and_idle(self) -> bool: ...


L = TypeVar("L", bound=Lendable)


@contextmanager
def lending(running: Callable[[], AbstractContextManager[L]]) -> Iterator[Callable[[], L]]:
    """Yield a function that lends one service to tests in turn, because a start takes 8 s.

    A broken or busy one is replaced before it is lent again.
    """
    lent: list[L] = []
    with ExitStack() as cleanup:

        def lend() -> L:
            if not lent or not lent[-1].is_whole_and_idle():
                cleanup.close()
                lent.append(cleanup.enter_context(running()))
            return lent[-1]

        yield lend
