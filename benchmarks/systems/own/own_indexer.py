"""OwnIndexer: `vectormill indexer` on an embedded Postgres, with a stub in place of workers, as a child to be watched.

What a re-index costs besides encoding: nothing else of the service is started.
"""

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil
from sqlalchemy import text

from benchmarks.order import BenchmarkFailed
from benchmarks.probes.memory import MemorySampler
from benchmarks.systems.own.articles import TABLE, Articles
from benchmarks.systems.own.stub_worker import StubWorker
from vectormill.cli.stack import stop
from vectormill.db.collections.collections import open_collection
from vectormill.db.jsonb import to_jsonb
from vectormill.db.migrations import upgrade
from vectormill.db.runs.runs import create_run, find_run
from vectormill.db.session import make_engine
from vectormill.domain.collection import NO_INDEX
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.run import REINDEX, Run
from vectormill.domain.source import SQL
from vectormill.embedded.postgres import EmbeddedPostgres
from vectormill.models.registry import DEFAULT_MODEL, EncodingOptions, Registry, make_spec
from vectormill.processes.lifetimes import spawn
from vectormill.processes.logfile import open_log, tail_of
from vectormill.settings import process_environment

COLLECTION: Final = "docs"
POLL_SECONDS: Final = 0.005
# The source is the table as a user names it, metadata in two columns.
OPTIONS: Final = {
    "query": f"SELECT key, body, lang, year FROM {TABLE}",
    "key": "key",
    "text": "body",
    "metadata": ["lang", "year"],
}
SET_SOURCE: Final = text("""
    INSERT INTO vectormill.sources (collection_id, kind, options)
    SELECT id, :kind, CAST(:options AS jsonb) FROM vectormill.collections WHERE name = :collection
""")
SET_POLICY: Final = text("UPDATE vectormill.collections SET index_policy = :policy")


class OwnIndexer:
    """A context manager around a collection that follows a table of `num_rows` articles."""

    def __init__(self, home: Path, num_rows: int, index_policy: str = NO_INDEX) -> None:
        self._home = home
        self._num_rows = num_rows
        self._index_policy = index_policy
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as exits:
            postgres = EmbeddedPostgres(self._home)
            exits.callback(postgres.stop)
            url = postgres.start()
            upgrade(url)
            self.engine = make_engine(url, application_name="benchmark", pool_size=4)
            exits.callback(self.engine.dispose)
            self.articles = Articles(url)
            self.articles.fill(self._num_rows)
            self._make_collection()
            environment = process_environment() | {"VECTORMILL_DATABASE_URL": url}
            with open_log(self._home / "indexer.log") as log:
                child = spawn(
                    (sys.executable, "-m", "vectormill.cli", "indexer"), env=environment, output=log
                )
            exits.callback(stop, child)
            self.process = psutil.Process(child.pid)
            exits.enter_context(StubWorker(self.engine))
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exits.__exit__(kind, error, traceback)

    @property
    def spec(self) -> EncodingSpec:
        return make_spec(Registry({}).card(DEFAULT_MODEL), EncodingOptions())

    def _make_collection(self) -> None:
        with self.engine.begin() as connection:
            open_collection(connection, COLLECTION, self.spec)
            connection.execute(SET_POLICY, {"policy": self._index_policy})
            values = {"kind": SQL, "options": to_jsonb(OPTIONS), "collection": COLLECTION}
            connection.execute(SET_SOURCE, values)

    def reindex(self) -> tuple[Run, int]:
        """The run when it has ended, and the indexer's memory at its peak, in bytes."""
        with MemorySampler([self.process]) as sampler:
            with self.engine.begin() as connection:
                run = create_run(connection, COLLECTION, REINDEX)
                assert run is not None
            while not run.is_terminal and run.state != "held":
                time.sleep(POLL_SECONDS)
                with self.engine.connect() as connection:
                    run = find_run(connection, run.id)
        if run.state != "completed":
            raise BenchmarkFailed(
                f"A run ended {run.state}: {run.error}{tail_of(self._home / 'indexer.log')}"
            )
        return run, sampler.peak_bytes


def seconds_of(run: Run) -> float:
    """From its making to its end, on the database's clock."""
    assert run.finished_at is not None
    return (run.finished_at - run.created_at).total_seconds()
