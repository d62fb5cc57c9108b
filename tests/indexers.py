"""An indexer for tests: the real one in a thread, with sources that a test provides."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, text

from indexer.context import RunContext
from indexer.main import serve
from indexer.reindexing import open_run_source
from tests.database import ask, execute
from tests.protocol import submit
from tests.waiting import wait_for
from vectormill.domain.errors import SourceFailed
from vectormill.jobs.item import Item
from vectormill.models.registry import Registry
from vectormill.runs.run import HELD, REINDEX, Run
from vectormill.runs.runs import create_run, find_run
from vectormill.settings import Settings
from vectormill.sources.reader import Complaints, Reader

QUICK = {"heartbeat_seconds": 0.2}


@dataclass
class ListedSource(Reader):
    """A source with its rows in memory.

    It fails before row `fails_at` if that is set; `before` is called with the position of each batch before
    it is read.
    """

    items: list[Item] = field(default_factory=list)
    batch: int = 3
    fails_at: int | None = None
    before: Callable[[int], object] = lambda position: None
    tells_what_vanished: bool = True
    complaints: Complaints = field(default_factory=Complaints)

    def read(self) -> Iterator[list[Item]]:
        for start in range(0, len(self.items), self.batch):
            self.before(start)
            if self.fails_at is not None and start >= self.fails_at:
                raise SourceFailed("The source broke.")
            yield self.items[start : start + self.batch]


class KeptSource:
    """A proxy for the collection's own source, opened when a run calls `open`."""

    def open(self, context: RunContext) -> None:
        self._reader = open_run_source(context)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


def row(key: str, content: str, **metadata: Any) -> Item:
    packed = json.dumps(metadata, sort_keys=True, separators=(",", ":")).encode() if metadata else b""
    return Item(key, content.encode("utf-8", "surrogatepass"), packed)


def make_collection(engine: Engine, name: str = "docs") -> None:
    """Make an empty collection with the vector space of the stand-in worker."""
    submit(engine, [Item("seed", b"seed")], collection=name)
    execute(engine, "DELETE FROM vectormill.jobs")


@contextmanager
def indexing(
    engine: Engine,
    source: Any,
    on_open: Callable[[RunContext], object] = lambda context: None,
    **settings: Any,
) -> Iterator[threading.Event]:
    """Run an indexer in a thread during the block; setting the yielded event stops it early."""

    def open_source(context: RunContext) -> Any:
        on_open(context)
        return source

    stop = threading.Event()
    url = engine.url.render_as_string(hide_password=False)
    thread = threading.Thread(
        target=serve,
        args=(Settings(**QUICK | settings), url, Registry({}), stop, open_source),
        name="indexer",
    )
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive(), "the indexer did not stop"


def start_run(engine: Engine, collection: str = "docs", kind: str = REINDEX, **options: Any) -> UUID:
    run = ask(engine, create_run, collection, kind, options=options)
    assert run is not None
    return run.id


def look(engine: Engine, run_id: UUID) -> Run:
    return ask(engine, find_run, run_id)


def await_run(engine: Engine, run_id: UUID) -> Run:
    """Wait until the run has ended or is held, and return it."""

    def is_over() -> Run | None:
        run = look(engine, run_id)
        return run if run.is_terminal or run.state == HELD else None

    return wait_for(is_over, 20, "the run ended")


def contents(engine: Engine, name: str = "docs") -> dict[str, tuple[bytes, Mapping[str, Any] | None]]:
    """Return content hash and metadata of each row of the collection, by key."""
    with engine.connect() as connection:
        rows = connection.execute(text(f"SELECT key, content_hash, metadata FROM public.{name}"))
        return {row.key: (bytes(row.content_hash), row.metadata) for row in rows}


def wanted(items: Iterable[Item]) -> dict[str, tuple[bytes, Mapping[str, Any] | None]]:
    return {
        item.key: (item.content_hash(), json.loads(item.metadata) if item.metadata else None)
        for item in items
    }


COUNT_ENCODED = text("SELECT coalesce(sum(num_items), 0) FROM vectormill.jobs WHERE metadata ? 'run'")


def count_encoded(engine: Engine) -> int:
    """Count the items of all jobs that runs have submitted."""
    return int(execute(engine, COUNT_ENCODED).scalar_one())
