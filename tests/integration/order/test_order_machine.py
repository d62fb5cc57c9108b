"""The rule of order under whatever comes: Hypothesis is the clients, the workers, the operator and the indexer's luck.

Jobs stay open through swaps and rollbacks, builds are given up at any step, runs fail, are cancelled and die. What the
generations have is compared with a plain model (ledger.py). Postgres and the phases of runs are real, no model is.
"""

from contextlib import suppress
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
)

from indexer.context import RunContext
from indexer.reindexing import open_run_source
from tests.database import ask, execute
from tests.faulty_workers import mend_pages
from tests.histories import play_histories
from tests.indexers import ListedSource
from tests.integration.order.followed import CARRIED, NAMES, OUTSIDE, OWN, Expected, Followed
from tests.integration.order.ledger import Ledger, Write
from tests.integration.order.stepped_run import SteppedRun
from tests.protocol import SPEC, claim, complete, dispatch_all, submit
from vectormill.collections.collections import find_generation
from vectormill.collections.generations import (
    discard_generation,
    list_lagging_twins,
    prune_retired_generations,
    roll_back,
)
from vectormill.collections.items import delete_items
from vectormill.db.locks import act_in_short_locks
from vectormill.domain.errors import Conflict, LeaseLost, RunCancelled, SourceFailed
from vectormill.jobs.chunk import Claim
from vectormill.jobs.item import Item
from vectormill.jobs.transitions import rescue_expired_chunks
from vectormill.runs.run import CANCELLING, REINDEX
from vectormill.runs.runs import cancel_run, claim_run, create_run
from vectormill.settings import Settings
from vectormill.sources.reader import Reader

KEYS = st.sampled_from(NAMES)
VALUES = st.tuples(
    st.sampled_from(["one", "two", "three"]), st.sampled_from(["", '{"page":1}', '{"page":2}'])
)
SOURCES = st.dictionaries(KEYS, VALUES, max_size=4)
REVISIONS = st.sampled_from(["1", "2", "3"])
# Of a kept text there is no other, so nothing is left to the canary to encode.
OPTIONS = {"confirm": True, "canary_sample": 0}
SETTINGS = Settings(chunk_max_items=1, max_attempts=100)
LEASE_SECONDS = 3600.0


class Collection(Followed):
    """A collection that keeps its texts, and a ledger for each generation that is not given up."""

    def teardown(self) -> None:
        try:
            if self.ledgers:
                self.settle()
        finally:
            self.open.close()

    @initialize(source=SOURCES)
    def make_collection(self, source: dict[str, tuple[str, str]]) -> None:
        submit(self.engine, [Item("seed", b"seed")], collection="docs")
        live = ask(self.engine, find_generation, "docs")
        self.ledgers[live.id] = Ledger()
        self.commit_all()
        execute(self.engine, "UPDATE vectormill.collections SET keep_text = true")
        ask(self.engine, delete_items, "docs", ["seed"])
        if source:
            self.submit(source)

    # -- clients ------------------------------------------------------------------------------------------------------

    @rule(values=st.dictionaries(KEYS, VALUES, min_size=1, max_size=3))
    def submit(self, values: dict[str, tuple[str, str]]) -> None:
        """A job with a chunk for each key; a put is one of a single key."""
        live = ask(self.engine, find_generation, "docs")
        job = submit(self.engine, pack(values), collection="docs", spec=live.spec, chunk_max_items=1)
        for key, value in values.items():
            self.written[key].add(value)
            for generation_id in self.list_in_state("live", "building"):
                self.ledgers[generation_id].add(key, Write(job.seq, value))

    @rule(keys=st.lists(KEYS, min_size=1, max_size=2, unique=True))
    def delete(self, keys: list[str]) -> None:
        ask(self.engine, delete_items, "docs", keys)
        place = self.last_place()
        for ledger in self.ledgers.values():
            for key in keys:
                ledger.add(key, Write(place, None))

    # -- workers ------------------------------------------------------------------------------------------------------

    @rule(choice=st.integers(0, 1000))
    def take(self, choice: int) -> None:
        """A worker claims any chunk that waits, and keeps it."""
        self.waiting += [dispatch.chunk_id for dispatch in dispatch_all(self.engine)]
        if self.waiting:
            chunk_id = self.waiting.pop(choice % len(self.waiting))
            taken = claim(self.engine, chunk_id, lease_seconds=LEASE_SECONDS)
            self.claims += [taken] if taken else []

    def take_all(self) -> None:
        self.take(0)
        while self.waiting:
            self.take(0)

    @rule(choice=st.integers(0, 1000), count=st.integers(1, 3))
    def commit(self, choice: int, count: int) -> None:
        for _ in range(count):
            if not self.claims:
                self.take(choice)
            if self.claims:
                self.commit_claim(self.claims.pop(choice % len(self.claims)))

    def commit_claim(self, claimed: Claim) -> None:
        with suppress(LeaseLost):  # its job was cancelled meanwhile
            complete(self.engine, claimed, proof_id=self.worker.period, is_faulty=self.worker.is_faulty)

    @rule(is_faulty=st.booleans())
    def prove(self, is_faulty: bool) -> None:
        """A proof ends the period in which workers commit; a bad one ends them too, and what they held is put back."""
        if self.worker.prove(is_faulty=is_faulty):
            return
        self.has_failed_period = True
        self.claims.clear()
        execute(
            self.engine,
            "UPDATE vectormill.chunks SET lease_until = now() - interval '1 s' WHERE state = 'leased'",
        )
        ask(self.engine, rescue_expired_chunks)
        execute(self.engine, "UPDATE vectormill.chunks SET available_at = now() WHERE state = 'pending'")

    @precondition(lambda self: self.has_failed_period)
    @rule(num_pages=st.integers(1, 9))
    def mend(self, num_pages: int) -> None:
        """The mender reads so many pages of chunks, and puts those back that a failed period has computed."""
        self.has_failed_period = mend_pages(self.engine, self.mender, num_pages)

    def end_faults(self) -> None:
        self.prove(is_faulty=False)
        while self.has_failed_period:
            self.mend(100)

    def commit_all(self) -> bool:
        """Whether there was anything."""
        self.take_all()
        has_any = bool(self.claims)
        while self.claims:
            self.commit_claim(self.claims.pop())
        return has_any

    # -- the operator -------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.list_open_runs()) < 2)
    @rule(kind=st.sampled_from([OWN, OUTSIDE]), source=SOURCES, revision=REVISIONS | st.none())
    def begin_run(self, kind: str, source: dict[str, tuple[str, str]], revision: str | None) -> None:
        """Of the texts that the collection keeps, or of a source that clients know nothing of."""
        spec = None if revision is None else replace(SPEC, revision=revision)
        run = ask(
            self.engine,
            lambda connection: create_run(connection, "docs", REINDEX, options=OPTIONS, spec=spec),
        )
        assert run is not None
        self.runs[run.id] = Expected(kind, pack(source) if kind == OUTSIDE else [])
        if kind == OUTSIDE:
            for key, value in source.items():
                self.written[key].add(value)

    @precondition(lambda self: self.list_open_runs())
    @rule(choice=st.integers(0, 1000))
    def cancel(self, choice: int) -> None:
        open_runs = self.list_open_runs()
        before = self.look()
        run_id = open_runs[choice % len(open_runs)]
        ask(self.engine, cancel_run, run_id)
        self.follow(run_id, before)

    @precondition(lambda self: self.list_in_state("retired"))
    @rule()
    def roll_back(self) -> None:
        old = ask(self.engine, find_generation, "docs").id
        before = self.look()
        try:
            done = act_in_short_locks(self.engine, lambda connection: roll_back(connection, "docs"))
        except Conflict:  # nothing to go back to, or a run is at work
            return
        self.follow_all(before)
        new, ledger = done.live.id, self.ledgers[done.live.id]
        since = self.retired_since[new]
        known = {(key, write.place) for key, writes in ledger.writes.items() for write in writes}
        owed = [
            (key, replace(write, is_certain=write.is_certain and not write.is_removal))
            for key, writes in self.ledgers[old].writes.items()
            for write in writes
            if write.place > since and (key, write.place) not in known
        ]
        for key, write in owed:
            ledger.add(key, replace(write, is_certain=False))
        self.retire(old)
        self.runs[done.run_id] = Expected(CARRIED, generation_id=new, carried_to=new, since=since, owed=owed)

    @precondition(lambda self: self.list_in_state("building", "retired"))
    @rule(choice=st.integers(0, 1000), num_rounds=st.integers(0, 3))
    def give_up(self, choice: int, num_rounds: int) -> None:
        """A generation that is being built, or one to which nobody wants to roll back."""
        others = self.list_in_state("building", "retired")
        chosen = others[choice % len(others)]
        ask(self.engine, discard_generation, chosen)
        for run in self.runs.values():
            run.may_fail |= run.kind != CARRIED and run.generation_id in (0, chosen)
        del self.ledgers[chosen]
        self.tidy_up(num_rounds)

    @rule(num_rounds=st.integers(1, 3))
    def tidy_up(self, num_rounds: int) -> None:
        """Rounds of the scheduler: what writes a generation that was given up is cancelled, its tables go."""
        for _ in range(num_rounds):
            prune_retired_generations(self.engine, 1e9)

    # -- the indexer --------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 20), hears=st.booleans())
    def go_on(self, count: int, hears: bool) -> None:
        """A run takes so many steps; one that was cancelled may hear of it or not."""
        for _ in range(count):
            self.step(hears=hears)

    @rule()
    def go_through(self) -> None:
        """The next run comes to its end, and workers do what it waits for: jobs of clients stay open."""
        if not self.step():
            return
        run_id = self.at_work[0] if self.at_work else None
        for _ in range(200):
            if self.at_work is None or self.at_work[0] != run_id:
                return
            self.step()
            self.commit_for(run_id)
        raise AssertionError("the run waits for something else")

    def commit_for(self, run_id: UUID) -> None:
        """The chunks of the run, and twins of jobs whose clients were told that they had ended."""
        run = self.find_run(run_id)
        wanted = {run.job_id}
        if run.generation_id is not None:
            wanted |= ask(self.engine, list_lagging_twins, run.generation_id)
        self.take_all()
        for claimed in [claimed for claimed in self.claims if claimed.job_id in wanted]:
            self.claims.remove(claimed)
            self.commit_claim(claimed)

    @precondition(lambda self: not self.list_open_runs())
    @rule(
        kind=st.sampled_from([OWN, OUTSIDE]),
        source=SOURCES,
        revision=REVISIONS,
        values=st.dictionaries(KEYS, VALUES, min_size=1, max_size=3),
        deleted=st.lists(KEYS, max_size=2, unique=True),
    )
    def write_beside_a_fill(
        self,
        kind: str,
        source: dict[str, tuple[str, str]],
        revision: str,
        values: dict[str, tuple[str, str]],
        deleted: list[str],
    ) -> None:
        """While a run fills a new generation, clients put and delete, and workers write some of it at once."""
        self.begin_fill(kind, source, revision)
        self.submit(values)
        self.commit(0, 3)
        if deleted:
            self.delete(deleted)
        self.commit(1, 2)

    def begin_fill(self, kind: str, source: dict[str, tuple[str, str]], revision: str) -> None:
        self.begin_run(kind, source, revision)
        for _ in range(100):
            if not self.step() or self.list_filling():
                break

    @precondition(lambda self: not self.list_open_runs())
    @rule(
        kind=st.sampled_from([OWN, OUTSIDE]),
        source=SOURCES,
        revision=REVISIONS,
        num_chunks=st.integers(1, 4),
        num_steps=st.integers(0, 8),
    )
    def spoil_a_fill(
        self, kind: str, source: dict[str, tuple[str, str]], revision: str, num_chunks: int, num_steps: int
    ) -> None:
        """A faulty worker fills a new generation; that is found out while the fill is open, closed, merged or live."""
        self.begin_fill(kind, source, revision)
        self.prove(is_faulty=True)
        self.commit(0, num_chunks)
        for _ in range(num_steps):
            self.step()
        self.prove(is_faulty=False)
        self.mend(9)

    @precondition(lambda self: not self.list_open_runs())
    @rule(kind=st.sampled_from([OWN, OUTSIDE]), source=SOURCES, revision=REVISIONS)
    def change_model(self, kind: str, source: dict[str, tuple[str, str]], revision: str) -> None:
        self.begin_run(kind, source, revision)
        self.go_through()

    @precondition(lambda self: self.at_work)
    @rule()
    def die(self) -> None:
        """The indexer is lost, and another one will take its run over."""
        self.step(LeaseLost("The indexer died, as this test wants it."))

    @precondition(lambda self: self.at_work)
    @rule()
    def fail(self) -> None:
        assert self.at_work is not None
        self.runs[self.at_work[0]].may_fail = True
        self.step(SourceFailed("The run failed, as this test wants it."))

    def step(self, order: Exception | None = None, *, hears: bool = True) -> bool:
        """False when there is nothing to do."""
        if self.at_work is None:
            claimed = ask(self.engine, claim_run, "indexer", LEASE_SECONDS)
            if claimed is None:
                return False
            run_id = claimed[1].id
            self.at_work = run_id, SteppedRun(self.engine, claimed, self.open_source, SETTINGS)
        run_id, stepped = self.at_work
        before = self.look()
        if order is None and hears and self.find_run(run_id).state == CANCELLING:
            order = RunCancelled()
        if not stepped.advance(order):
            self.at_work = None
        self.follow(run_id, before)
        if self.at_work is None:
            execute(self.engine, "UPDATE vectormill.runs SET lease_until = now(), available_at = now()")
        return True

    def open_source(self, context: RunContext) -> Reader:
        run = self.runs[context.run.id]
        return ListedSource(run.source, batch=2) if run.kind == OUTSIDE else open_run_source(context)


def pack(values: dict[str, tuple[str, str]]) -> list[Item]:
    return [Item(key, content.encode(), metadata.encode()) for key, (content, metadata) in values.items()]


# The core has single orders (collections/test_order_of_writers.py) and overlaps (interleavings) of the same writers.
@pytest.mark.timeout(600)
def test_the_newest_write_of_a_key_wins_in_every_generation(
    postgres_url: str, pytestconfig: pytest.Config
) -> None:
    play_histories(make_machine(postgres_url), pytestconfig, 12, 30)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_newest_write_of_a_key_wins_in_many_more_histories(
    postgres_url: str, pytestconfig: pytest.Config
) -> None:
    play_histories(make_machine(postgres_url), pytestconfig, 200, 60)


def make_machine(postgres_url: str) -> type[Collection]:
    return type("Collection", (Collection,), {"postgres_url": postgres_url})
