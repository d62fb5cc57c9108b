"""The actors about one collection that keeps its texts: clients, workers, indexers, an operator and the scheduler.

Builds are begun, swapped, given up and rolled back while jobs stay open. Each actor calls the product's own functions,
transaction by transaction; what its process would log and survive ends it quietly. What was written in which place of
the order of writers is noted as it happens (`Notes`), for the oracle: see test_collection_interleavings.py.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any
from unittest.mock import patch
from uuid import UUID

import numpy as np
from sqlalchemy import Connection, Engine, text

from indexer.context import RunContext
from indexer.phases import Tools, carry_out
from indexer.reindexing import open_run_source
from tests.database import ask, load_payload
from tests.indexers import ListedSource, make_collection
from tests.integration.interleavings.world import outage
from tests.integration.order.ledger import Ledger, Value, Write
from tests.integration.order.stepped_run import reading_in_step
from tests.protocol import FAULTY, SPEC, dispatch_all, fail_faulty, stack
from vectormill.collections.collections import find_generation
from vectormill.collections.generations import discard_generation, prune_retired_generations, roll_back
from vectormill.collections.items import delete_items
from vectormill.db.locks import act_in_short_locks
from vectormill.db.outages import DATABASE_ERRORS, is_outage
from vectormill.db.session import driver_of
from vectormill.domain.errors import (
    Conflict,
    JobNotFound,
    LeaseLost,
    PayloadGone,
    RunCancelled,
    VectormillError,
)
from vectormill.files.roots import ANYWHERE
from vectormill.jobs.chunk import ChunkOutcome, Claim
from vectormill.jobs.chunks import claim_chunk, release_chunk, renew_leases, split_chunk
from vectormill.jobs.completion import cancel_chunk
from vectormill.jobs.dual_writes import change_twins
from vectormill.jobs.item import Item
from vectormill.jobs.job import CANCELLING, NewJob
from vectormill.jobs.jobs import cancel_job, draw_seq, find_job, pause_job, resume_job
from vectormill.jobs.submission import JobWriter
from vectormill.models.registry import Registry
from vectormill.ragged import Ragged
from vectormill.runs.differences import Rows, RunTables, make_stage, note_vanished, stage_rows
from vectormill.runs.run import REINDEX
from vectormill.runs.runs import cancel_run, claim_run, create_run
from vectormill.settings import Settings
from vectormill.sources.reader import Reader
from vectormill.work.work import Lease, Stopping, handing_back
from worker.chunk.commit import PostgresSink

NAMES = "abcd"
TEXTS = ["one", "two", "three", FAULTY.decode()]
METADATA = ["", '{"page":1}', '{"page":2}']
SPECS = [SPEC, replace(SPEC, revision="2"), replace(SPEC, revision="3")]
# Of a kept text there is no other, so nothing is left to the canary to encode; faulty texts are no fault of a build.
OPTIONS = {"confirm": True, "canary_sample": 0, "most_failed_share": 1.0}
SETTINGS = Settings(chunk_max_items=1, max_attempts=1000)
# A worker, or an indexer, with the first one has stalled beyond its lease: another may take over at once.
LEASES = [-1.0, 30.0, 30.0]

LIST_OPEN_RUNS = text("SELECT id FROM vectormill.runs WHERE finished_at IS NULL ORDER BY created_at")
LIST_OPEN_JOBS = text("""
    SELECT id FROM vectormill.jobs WHERE state IN ('queued', 'running', 'paused', 'cancelling') ORDER BY seq
""")
LIST_DISCARDABLE = text("""
    SELECT id FROM vectormill.generations WHERE state IN ('building', 'retired') ORDER BY id
""")
LIST_STAGED = "SELECT key, kind, text, metadata, place FROM {changes} WHERE ordinal >= %(first)s"

Values = dict[str, tuple[str, str]]


@dataclass(slots=True)
class RunNotes:
    """What a run will write, as it was staged. A build is one of another generation than the live one."""

    source: Values | None = None  # None: the texts that the collection keeps
    staged: dict[str, Write] = field(default_factory=dict)
    is_build: bool = False
    seq: int | None = None


@dataclass(slots=True)
class Notes:
    """Everything that was written: `contents` by key and place, and the writes that the live generation should have."""

    contents: dict[tuple[str, int], Value] = field(default_factory=dict)
    writes: Ledger = field(default_factory=Ledger)
    jobs: dict[UUID, int] = field(default_factory=dict)  # the place of each client's job
    doubtful_places: set[int] = field(default_factory=set)
    runs: dict[UUID, RunNotes] = field(default_factory=dict)
    has_given_up: bool = False


class CollectionWorld:
    """What the actors share: Redis (`messages`), the workers' memory (`claims`), and what the test has noted."""

    def __init__(self, engine: Engine, random: Random) -> None:
        self.engine, self.random = engine, random
        self.notes = Notes()
        self.messages: list[int] = []
        self.claims: list[Claim] = []
        self._drawn: dict[int, int] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """What runs stage and deletions draw is noted; locks are waited for until a deadlock is one."""
        with ExitStack() as patches:
            patches.enter_context(reading_in_step(rows_per_page=2))
            for name, value in (
                ("vectormill.db.locks.LOCK_MILLISECONDS", 0),
                ("vectormill.collections.generations.DRAIN_SECONDS", 0.04),
                ("vectormill.collections.items.draw_seq", self._draw_seq),
                ("indexer.reindexing.make_stage", self._make_stage),
                ("indexer.reindexing.stage_rows", self._stage_rows),
                ("indexer.reindexing.note_vanished", self._note_vanished),
                ("indexer.phases.handing_back", _handing_back),
            ):
                patches.enter_context(patch(name, value))
            yield

    def make_collection(self) -> None:
        make_collection(self.engine)
        with self.engine.begin() as connection:
            connection.execute(text("UPDATE vectormill.collections SET keep_text = true"))

    # -- clients ------------------------------------------------------------------------------------------------------

    def draw_values(self, most: int = 3) -> Values:
        keys = self.random.sample(NAMES, self.random.randint(1, most))
        return {key: (self.random.choice(TEXTS), self.random.choice(METADATA)) for key in keys}

    def submit(self) -> None:
        """A job with a chunk for each key. A client that is refused, since another model is live now, asks again."""
        values = self.draw_values()
        for _ in range(3):
            with suppress(Conflict):
                if self.send(values):
                    return

    def put(self) -> None:
        """A job of a single key, which goes when its client was told."""
        with suppress(Conflict):
            self.send(self.draw_values(1), lifetime_seconds=float("inf"))

    def send(self, values: Values, lifetime_seconds: float | None = None) -> bool:
        job_id = UUID(int=self.random.getrandbits(128), version=4)
        is_answered = False
        with outage():
            spec = ask(self.engine, find_generation, "docs").spec
            new_job = NewJob(spec, collection="docs", id=job_id, lifetime_seconds=lifetime_seconds)
            with JobWriter(self.engine, new_job, SETTINGS) as writer:
                for item in pack(values):
                    writer.add(item)
                self.note_job(job_id, writer.finish().seq, values)
            is_answered = True
        if is_answered:
            return True
        # Nobody was answered; but the COMMIT may have come about.
        with suppress(JobNotFound):
            self.note_job(job_id, ask(self.engine, find_job, job_id).seq, values)
            self.notes.doubtful_places.add(self.notes.jobs[job_id])
        return False

    def note_job(self, job_id: UUID, place: int, values: Values) -> None:
        self.notes.jobs[job_id] = place
        for key, value in values.items():
            if not is_faulty(value):
                self.notes.contents[key, place] = value
                self.notes.writes.put(key, Write(place, value))

    def delete(self) -> None:
        keys = self.random.choice([["a"], ["a", "b"], ["b", "c", "d"]])
        self._drawn.pop(threading.get_ident(), None)
        is_answered = False
        with outage():
            ask(self.engine, delete_items, "docs", keys)
            is_answered = True
        place = self._drawn.get(threading.get_ident())
        if place is not None:
            for key in keys:
                self.notes.writes.put(key, Write(place, None, is_certain=is_answered))

    def _draw_seq(self, connection: Connection) -> int:
        place = self._drawn[threading.get_ident()] = draw_seq(connection)
        return place

    def wish(self, act: Callable[[Connection, UUID], Any], job_id: UUID) -> None:
        """Of a job and then of its twins, as the API does it."""
        if act is cancel_job:
            self.notes.doubtful_places.add(self.notes.jobs[job_id])
        with suppress(Conflict, JobNotFound), outage():
            ask(self.engine, act, job_id)
            change_twins(self.engine, act, job_id)

    def cancel(self) -> None:
        self._wish_any(cancel_job)

    def pause(self) -> None:
        self._wish_any(pause_job)

    def resume(self) -> None:
        self._wish_any(resume_job)

    def _wish_any(self, act: Callable[[Connection, UUID], Any]) -> None:
        if self.notes.jobs:
            self.wish(act, self.random.choice(list(self.notes.jobs)))

    # -- workers ------------------------------------------------------------------------------------------------------

    def claim(self) -> Claim | None:
        if not self.messages:
            self.messages += [dispatch.chunk_id for dispatch in dispatch_all(self.engine)]
        if not self.messages:
            return None
        chunk_id = self.messages.pop(self.random.randrange(len(self.messages)))
        with self.engine.begin() as connection:
            seconds = self.random.choice(LEASES)
            claimed = claim_chunk(connection, chunk_id, threading.current_thread().name, SPEC.model, seconds)
        if self.random.random() < 0.2:
            self.messages.append(chunk_id)  # a message that comes twice
        return claimed.claim if claimed else None

    def hold_one(self) -> None:
        """A worker that is at work when others begin."""
        claimed = self.claim()
        self.claims += [claimed] if claimed else []

    def take(self) -> None:
        with outage():
            claimed = self.claim()
            if claimed is not None:
                self.work(claimed)

    def commit_older(self) -> None:
        """A worker that has held its claim for long."""
        if self.claims:
            with outage():
                self.work(self.claims.pop(self.random.randrange(len(self.claims))))

    def work(self, claimed: Claim) -> None:
        end = self.random.choice([self.commit, self.commit, self.commit, self.split, self.release])
        with suppress(LeaseLost, PayloadGone):
            with self.engine.connect() as connection:
                items = load_payload(connection, claimed.chunk_id)
            if self.random.random() < 0.3:
                with self.engine.begin() as connection:
                    states = renew_leases(connection, [claimed], 30)
                if states.get(claimed.chunk_id) == CANCELLING:
                    ask(self.engine, cancel_chunk, claimed)
                    return
            end(claimed, items)

    def commit(self, claimed: Claim, items: Sequence[Item]) -> None:
        wanted = np.arange(len(items)) if claimed.only_items is None else np.array(claimed.only_items)
        results = Ragged.from_matrix(stack([items[position] for position in wanted.tolist()]))
        outcome = ChunkOutcome(fail_faulty(items, wanted.tolist()), len(wanted), len(wanted))
        PostgresSink(self.engine, threading.Event(), output_roots=ANYWHERE).commit(
            claimed, items, wanted, results, outcome
        )

    def split(self, claimed: Claim, items: Sequence[Item]) -> None:
        if claimed.num_items > 1:
            with self.engine.begin() as connection:
                split_chunk(connection, claimed, "lost twice")

    def release(self, claimed: Claim, items: Sequence[Item]) -> None:
        with self.engine.begin() as connection:
            release_chunk(connection, claimed, "handed back", is_counted=False)

    # -- the operator and the scheduler -------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Of kept texts or of a source that clients know nothing of; most are of another model."""
        if len(self.list(LIST_OPEN_RUNS)) > 1:
            return
        source = self.random.choice([None, None, self.draw_source()])
        spec = self.random.choice([None, *SPECS])
        with outage(), self.engine.begin() as connection:
            run = create_run(connection, "docs", REINDEX, options=OPTIONS, spec=spec)
            assert run is not None
            self.notes.runs[run.id] = RunNotes(source)

    def draw_source(self) -> Values:
        names = self.random.sample(NAMES, self.random.randint(0, 4))
        return {key: (self.random.choice(TEXTS), self.random.choice(METADATA)) for key in names}

    def cancel_run(self) -> None:
        """Not one that carries what is newer after a rollback: the client would lose what it was answered."""
        chosen = [run_id for run_id in self.list(LIST_OPEN_RUNS) if run_id in self.notes.runs]
        if chosen:
            with suppress(Conflict), outage():
                ask(self.engine, cancel_run, self.random.choice(chosen))

    def roll_back(self) -> None:
        with suppress(Conflict), outage():
            act_in_short_locks(self.engine, lambda connection: roll_back(connection, "docs"))

    def give_up(self) -> None:
        chosen = self.list(LIST_DISCARDABLE)
        if chosen:
            self.notes.has_given_up = True
            with suppress(Conflict), outage():
                ask(self.engine, discard_generation, self.random.choice(chosen))

    def prune(self) -> None:
        with outage():
            prune_retired_generations(self.engine, 1e9)

    # -- the indexer --------------------------------------------------------------------------------------------------

    def carry_on(self) -> None:
        """An indexer takes a run as far as it comes; some die or are stopped soon, and some have stalled."""
        self.carry_out(self.random.choice([4, 12, 40, 200]), self.random.choice(LEASES))

    def carry_out(self, patience: int, lease_seconds: float) -> bool:
        """Whether there was a run; it ends, or its indexer goes after so many looks at whether it may go on."""
        claimed = None
        with outage(), self.engine.begin() as connection:
            claimed = claim_run(connection, threading.current_thread().name, lease_seconds)
        if claimed is None:
            return False

        def check() -> None:
            nonlocal patience
            patience -= 1
            if patience < 0:
                raise self.random.choice([LeaseLost("The indexer died, as this test wants it."), Stopping()])
            if self.random.random() < 0.3:
                self._renew(claimed[0])

        def wait(_: float) -> None:
            check()
            self.take()

        tools = Tools(self.engine, SETTINGS, Registry({}), self.open_source, wait)
        try:
            carry_out(*claimed, tools, check)
        except DATABASE_ERRORS as error:  # the run is left to its lease
            if not is_outage(error):
                raise
        return True

    def _renew(self, lease: Lease) -> None:
        with outage(), self.engine.begin() as connection:
            if lease.renew(connection) == CANCELLING:
                raise RunCancelled

    def open_source(self, context: RunContext) -> Reader:
        notes = self.notes.runs.get(context.run.id)
        if notes is None or notes.source is None:
            return open_run_source(context)
        return ListedSource(pack(notes.source), batch=2)

    def _make_stage(self, connection: Connection, stage: RunTables) -> None:
        make_stage(connection, stage)
        notes = self.notes.runs.get(stage.run_id)
        if notes is not None:
            notes.staged = {}
            live = find_generation(connection, "docs")
            notes.is_build = stage.generation.id != live.id

    def _stage_rows(
        self, connection: Connection, stage: RunTables, rows: Rows, seq: int, *, keep_text: bool
    ) -> dict[str, int]:
        counts = stage_rows(connection, stage, rows, seq, keep_text=keep_text)
        self._note_staged(connection, stage, seq, rows.first)
        return counts

    def _note_vanished(self, connection: Connection, stage: RunTables, **numbers: int) -> int:
        number = note_vanished(connection, stage, **numbers)
        self._note_staged(connection, stage, numbers["seq"], numbers["num_seen"] + 1)
        return number

    def _note_staged(self, connection: Connection, stage: RunTables, seq: int, first: int) -> None:
        """What a source from outside will make of the generation, if the run comes to its end."""
        notes = self.notes.runs.get(stage.run_id)
        if notes is None or notes.source is None:
            return
        notes.seq = seq
        statement = stage.fill_in(LIST_STAGED)
        for key, _, content, metadata, _ in driver_of(connection).execute(statement, {"first": first}):
            value = None if content is None else (content.decode(), metadata.decode())
            if value is not None and not is_faulty(value):
                self.notes.contents[key, seq] = value
            notes.staged[key] = Write(seq, None if value is None or is_faulty(value) else value)

    def list(self, statement: Any) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(statement).scalars())


@contextmanager
def _handing_back(engine: Engine, lease: Lease) -> Iterator[None]:
    """Raise what nobody foresaw: it would be tried again by another indexer, and so be hidden here."""
    unforeseen = None
    with handing_back(engine, lease):
        try:
            yield
        except (VectormillError, Stopping):
            raise
        except Exception as error:
            if is_outage(error):
                raise
            unforeseen = error
    if unforeseen is not None:
        raise unforeseen


def is_faulty(value: tuple[str, str]) -> bool:
    return value[0].encode().startswith(FAULTY)


def pack(values: Values) -> list[Item]:
    return [Item(key, content.encode(), metadata.encode()) for key, (content, metadata) in values.items()]
