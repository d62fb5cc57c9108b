"""SteppedRun: an indexer's run that stands still between its transactions, until a test lets it go on.

The real phases on a thread of their own, of which one moves at a time: where it stands is where the product asks
whether it may go on, so nothing is locked then. What reads ahead on threads in the product reads in step here.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from sqlalchemy import Engine

from indexer.context import RunContext
from indexer.phases import PHASES, Tools, carry_out
from vectormill.models.registry import Registry
from vectormill.runs.differences import Rows, pack_rows
from vectormill.runs.run import INDEXING, Run
from vectormill.settings import Settings
from vectormill.sources.reader import Reader
from vectormill.work.work import Lease

PATIENCE_SECONDS = 60.0


class SteppedRun:
    """One claim of a run. `advance` until it answers False."""

    def __init__(
        self,
        engine: Engine,
        claimed: tuple[Lease, Run],
        open_source: Callable[[RunContext], Reader],
        settings: Settings,
    ) -> None:
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._order: Exception | None = None
        self._error: BaseException | None = None
        self._is_over = False

        def open_in_steps(context: RunContext) -> Reader:
            self._stop()
            source = open_source(context)
            self._stop()  # between what was made ready and the beginning of the reading
            return source

        tools = Tools(engine, settings, Registry({}), open_in_steps, lambda _: self._stop())

        def work() -> None:
            try:
                self._go.acquire()
                carry_out(*claimed, tools, self._stop)
            except BaseException as error:
                self._error = error
            self._is_over = True
            self._stands.release()

        self._thread = threading.Thread(target=work, name="stepped run", daemon=True)
        self._thread.start()

    def _stop(self) -> None:
        self._stands.release()
        assert self._go.acquire(timeout=PATIENCE_SECONDS), "nobody lets this run go on"
        if self._order is not None:
            raise self._order

    def advance(self, order: Exception | None = None) -> bool:
        """Lets it go on to where it stands next; `order` is raised where it stands. False when it has ended."""
        self._order = order
        self._go.release()
        assert self._stands.acquire(timeout=PATIENCE_SECONDS), "the run never stood still"
        if self._is_over:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return not self._is_over


class _InStep:
    """The reader of a source, on the thread of the run."""

    def __init__(self, source: Reader) -> None:
        self._batches = source.read()
        self._first = 1

    def take(self, context: RunContext) -> Rows | None:
        context.check()
        items = next(self._batches, None)
        if items is None:
            return None
        rows = pack_rows(self._first, items)
        self._first += len(items)
        return rows

    def refuse_duplicates(self, *_: object) -> None:
        """Nothing: sources of these tests have none."""

    def close(self) -> None:
        """Nothing: there is no thread."""


class _AtOnce:
    """An executor that does at once what it is given."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> "_AtOnce":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, act: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(act(*arguments))
        return done


@contextmanager
def reading_in_step(rows_per_page: int) -> Iterator[None]:
    """Own texts come in pages of so few rows, nothing is read before its step, and no index is built."""
    with ExitStack() as patches:
        patches.enter_context(patch("indexer.reindexing._Ahead", _InStep))
        patches.enter_context(patch("vectormill.collections.exports.ThreadPoolExecutor", _AtOnce))
        patches.enter_context(patch("vectormill.collections.exports.MOST_PAGE_ROWS", rows_per_page))
        patches.enter_context(patch.dict(PHASES, {INDEXING: lambda *_: None}))
        yield
