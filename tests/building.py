"""Build a generation beside the live one, as a run does, but without a source and without a model."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final
from uuid import uuid4

from sqlalchemy import Engine, text

from indexer.context import RunContext
from tests.api_server import encode_waiting
from tests.database import ask, execute
from tests.protocol import SPEC, submit
from vectormill.collections.collection import Generation
from vectormill.collections.generations import open_target_generation, swap_generations
from vectormill.db.locks import act_in_short_locks
from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.item import Item
from vectormill.jobs.job import Job, NewJob
from vectormill.jobs.jobs import draw_seq
from vectormill.jobs.submission import JobWriter
from vectormill.models.registry import Registry
from vectormill.runs.run import CHECKING, REINDEX, RUNNING, Run, RunCounts
from vectormill.settings import Settings

# NEXT is another vector space that fits the same column; the vectors of BITS need another column.
NEXT: Final = replace(SPEC, revision="2")
BITS: Final = replace(SPEC, revision="2", vector_type="binary")


def encode_all(engine: Engine) -> None:
    while encode_waiting(engine):
        pass


def put(engine: Engine, *keys: str, content: str = "text", spec: EncodingSpec = SPEC, **options: Any) -> Job:
    """Submit a client's job with these keys into `docs`."""
    items = [Item(key, f"{content} {key}".encode()) for key in keys]
    return submit(engine, items, collection="docs", spec=spec, **options)


def build(engine: Engine, spec: EncodingSpec = NEXT) -> Generation:
    return open_target_generation(engine, "docs", spec)


def swap(engine: Engine, building: Generation) -> None:
    done = act_in_short_locks(engine, lambda connection: swap_generations(connection, building.id))
    assert done is not None, "twins lag behind"


def rows_of(engine: Engine, table: str) -> dict[str, int]:
    """Return the sequence number of the writing job of each row, by key."""
    return {row.key: row.job_seq for row in execute(engine, f"SELECT key, job_seq FROM {table}")}


def table_of(generation: Generation) -> str:
    return f"vectormill.{generation.table_name}"


class Rebuild:
    """A run that has read these items and submitted them for the generation that is being built."""

    def __init__(
        self,
        engine: Engine,
        items: Iterable[Item],
        spec: EncodingSpec = NEXT,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.engine = engine
        self.reports: dict[str, Mapping[str, Any]] = {}
        self.generation = build(engine, spec)
        items = list(items)
        self.run = make_run(
            self.generation,
            collection_id=self.generation.collection_id,
            seq=ask(engine, draw_seq),
            counts=RunCounts(num_seen=len(items)),
            options=options or {},
        )
        with engine.begin() as connection:
            seen = f"vectormill.run_{self.run.id.hex}_seen"
            connection.execute(text(f"CREATE UNLOGGED TABLE {seen} (key text NOT NULL)"))
            connection.execute(
                text(f"INSERT INTO {seen} SELECT unnest(CAST(:keys AS text[]))"),
                {"keys": [item.key for item in items]},
            )
        new_job = NewJob(spec, collection="docs", seq=self.run.seq, generation_id=self.generation.id)
        with JobWriter(engine, new_job, Settings(chunk_max_items=4)) as writer:
            for item in items:
                writer.add(item)
            self.job = writer.finish()

    def context(self, check: Callable[[], None] = lambda: None) -> RunContext:
        return make_context(self.engine, self.run, check, self.reports.__setitem__)


def make_context(
    engine: Engine,
    run: Run,
    check: Callable[[], None] = lambda: None,
    tell: Callable[[str, Mapping[str, Any]], None] = lambda phase, found: None,
    **settings: Any,
) -> RunContext:
    """Return what an indexer gives the phases of a run; the run has no row in the database that is locked."""
    chosen = Settings(**settings)
    return RunContext(run, engine, chosen, Registry(chosen.models), check, tell, lambda connection: None)


def make_run(generation: Generation | None = None, **given: Any) -> Run:
    """Return a run that is under way, by default one of `docs` that checks the generation if there is one."""
    now = datetime.now(UTC)
    values: dict[str, Any] = {
        "id": uuid4(), "seq": None, "collection_id": 1, "collection": "docs", "kind": REINDEX, "state": RUNNING,
        "phase": CHECKING, "generation_id": generation and generation.id, "job_id": None,
        "spec": generation and generation.spec, "options": {}, "counts": RunCounts(), "report": {}, "error": None,
        "schedule_id": None, "due_at": None, "attempt": 1, "created_at": now, "started_at": now, "finished_at": None,
        "now": now,
    }  # fmt: skip
    return Run(**values | given)
