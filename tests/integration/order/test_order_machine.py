"""The rule of order under whatever comes: Hypothesis is the clients, the workers, the operator and the indexer's luck.

Jobs stay open through swaps and rollbacks, builds are given up at any step, runs fail, are cancelled and die. What the
generations have is compared with a plain model (ledger.py). Postgres and the phases of runs are real, no model is.
"""

from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import text

from indexer.context import RunContext
from indexer.opening import open_run_source
from indexer.phases.reading import Source
from tests.building import ask
from tests.indexers import ListedSource
from tests.integration.order.ledger import Ledger, Value, Write
from tests.integration.order.stepped_run import SteppedRun, reading_in_step
from tests.protocol import SPEC, claim, complete, dispatch_all, submit, vector_of
from tests.services import connected_engine, migrated_database
from vectormill.db.chunks.payloads import load_payload
from vectormill.db.collections.building import discard_generation
from vectormill.db.collections.collections import find_generation
from vectormill.db.collections.generations import find_building
from vectormill.db.collections.retired import prune_retired_generations
from vectormill.db.collections.swaps import list_lagging_twins, roll_back
from vectormill.db.rows.items import delete_items
from vectormill.db.runs.run_claims import claim_run
from vectormill.db.runs.runs import cancel_run, create_run, find_run
from vectormill.db.short_locks import act_in_short_locks
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import Conflict, LeaseLost, RunCancelled, SourceFailed
from vectormill.domain.jobs.chunk import Claim
from vectormill.domain.jobs.item import Item
from vectormill.domain.run import CANCELLING, COMPARING, COMPLETED, REINDEX, Run
from vectormill.settings import Settings

NAMES = "abcd"
KEYS = st.sampled_from(NAMES)
VALUES = st.tuples(
    st.sampled_from(["one", "two", "three"]), st.sampled_from(["", '{"page":1}', '{"page":2}'])
)
SOURCES = st.dictionaries(KEYS, VALUES, max_size=4)
OUTSIDE, OWN, CARRIED = "outside", "own", "carried"
SPECS = [SPEC, replace(SPEC, revision="2"), replace(SPEC, revision="3")]
# Of a kept text there is no other, so nothing is left to the canary to encode.
OPTIONS = {"confirm": True, "canary_sample": 0}
SETTINGS = Settings(chunk_max_items=1, max_attempts=100)
LEASE_SECONDS = 3600.0

LIST_OPEN_CHUNKS = text("""
    SELECT chunks.id, jobs.generation_id, coalesce(jobs.place, jobs.seq) AS place,
           EXISTS (SELECT 1 FROM vectormill.runs WHERE runs.job_id = jobs.id) AS is_of_run
      FROM vectormill.chunks JOIN vectormill.jobs ON jobs.id = chunks.job_id
     WHERE chunks.state IN ('pending', 'queued', 'leased')
""")
LIST_GENERATIONS = text(
    "SELECT id, state, live_at IS NOT NULL AS was_live FROM vectormill.generations ORDER BY id"
)
LIST_OPEN_RUNS = text("SELECT id FROM vectormill.runs WHERE finished_at IS NULL")
LAST_PLACE = text("SELECT last_value FROM vectormill.jobs_seq_seq")
READ_ROWS = """
    SELECT live.key, live.content_hash, live.embedding::text AS embedding, kept.text, kept.metadata::text AS metadata,
           kept.content_hash AS described_hash
      FROM vectormill.generation_{id} AS live
      FULL JOIN vectormill.generation_{id}_attributes AS kept ON kept.key = live.key
"""


@dataclass(slots=True)
class Expected:
    """What the model knows of a run.

    `doubtful` are keys of which older writes were open when it began to read, `vanished` those that the live generation
    had and its source had not, when they were compared by the claim `compared_by`.
    """

    kind: str
    source: list[Item] = field(default_factory=list)
    may_fail: bool = False
    seq: int | None = None
    generation_id: int = 0
    num_seen: int = 0
    doubtful: set[str] = field(default_factory=set)
    vanished: set[str] = field(default_factory=set)
    compared_by: SteppedRun | None = None
    carried_from: int = 0
    since: int = 0
    owed: list[tuple[str, Write]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Before:
    """What was so before a step of a run."""

    live_id: int
    building_id: int | None
    rows: dict[int, dict[str, Value]]
    open_places: set[int]
    open_keys: dict[int, set[str]]
    at_work: SteppedRun | None
    phase: str | None


class Collection(RuleBasedStateMachine):
    """A collection that keeps its texts, and a ledger for each generation that is not given up."""

    postgres_url: str

    def __init__(self) -> None:
        super().__init__()
        self.open = ExitStack()
        self.open.enter_context(reading_in_step(rows_per_page=2))
        url = self.open.enter_context(migrated_database(self.postgres_url))
        self.engine = self.open.enter_context(connected_engine(url))
        self.ledgers: dict[int, Ledger] = {}
        self.live_since: dict[int, int] = {}
        self.written: dict[str, set[Value]] = {name: set() for name in NAMES}
        self.runs: dict[UUID, Expected] = {}
        self.unfinished_carries: list[Expected] = []
        self.waiting: list[int] = []
        self.claims: list[Claim] = []
        self.at_work: tuple[UUID, SteppedRun] | None = None

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
        self.ledgers[live.id], self.live_since[live.id] = Ledger(), 0
        self.commit_all()
        with self.engine.begin() as connection:
            connection.execute(text("UPDATE vectormill.collections SET keep_text = true"))
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
            complete(self.engine, claimed)

    def commit_all(self) -> bool:
        """Whether there was anything."""
        self.take_all()
        has_any = bool(self.claims)
        while self.claims:
            self.commit_claim(self.claims.pop())
        return has_any

    # -- the operator -------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.list_open_runs()) < 2)
    @rule(kind=st.sampled_from([OWN, OUTSIDE]), source=SOURCES, spec=st.sampled_from([*SPECS, None]))
    def begin_run(self, kind: str, source: dict[str, tuple[str, str]], spec: EncodingSpec | None) -> None:
        """Of the texts that the collection keeps, or of a source that clients know nothing of."""
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
        since = min(
            [
                self.live_since[old],
                *(each.since for each in self.unfinished_carries if each.carried_from == old),
            ]
        )
        known = {(key, write.place) for key, writes in ledger.writes.items() for write in writes}
        owed = [
            (key, replace(write, is_certain=write.is_certain and not write.is_removal))
            for key, writes in self.ledgers[old].writes.items()
            for write in writes
            if write.place > since and (key, write.place) not in known
        ]
        for key, write in owed:
            ledger.add(key, replace(write, is_certain=False))
        self.runs[done.run_id] = Expected(
            CARRIED, generation_id=new, carried_from=old, since=since, owed=owed
        )
        self.live_since[new] = self.last_place()

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
    @rule(kind=st.sampled_from([OWN, OUTSIDE]), source=SOURCES, spec=st.sampled_from(SPECS))
    def change_model(self, kind: str, source: dict[str, tuple[str, str]], spec: EncodingSpec) -> None:
        self.begin_run(kind, source, spec)
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
            with self.engine.begin() as connection:
                claimed = claim_run(connection, "indexer", LEASE_SECONDS)
            if claimed is None:
                return False
            run_id = claimed.run.id
            self.at_work = run_id, SteppedRun(self.engine, claimed, self.open_source, SETTINGS)
        run_id, stepped = self.at_work
        before = self.look()
        if order is None and hears and self.find_run(run_id).state == CANCELLING:
            order = RunCancelled()
        if not stepped.advance(order):
            self.at_work = None
        self.follow(run_id, before)
        if self.at_work is None:
            with self.engine.begin() as connection:
                connection.execute(
                    text("UPDATE vectormill.runs SET lease_until = now(), available_at = now()")
                )
        return True

    def open_source(self, context: RunContext) -> Source:
        run = self.runs[context.run.id]
        return ListedSource(run.source, batch=2) if run.kind == OUTSIDE else open_run_source(context)

    # -- the model ----------------------------------------------------------------------------------------------------

    def look(self) -> Before:
        open_keys: dict[int, set[str]] = {}
        places = set()
        with self.engine.connect() as connection:
            live, building = find_generation(connection, "docs"), find_building(connection, "docs")
            for row in connection.execute(LIST_OPEN_CHUNKS).all():
                items = load_payload(connection, row.id)
                open_keys.setdefault(row.generation_id, set()).update(item.key for item in items)
                if row.generation_id == live.id and not row.is_of_run:
                    places.add(row.place)
        rows = {generation_id: self.read(generation_id) for generation_id in self.ledgers}
        run_id, stepped = self.at_work or (None, None)
        phase = self.find_run(run_id).phase if run_id else None
        return Before(live.id, building.id if building else None, rows, places, open_keys, stepped, phase)

    def follow_all(self, before: Before) -> None:
        for run_id in list(self.runs):
            self.follow(run_id, before)

    def follow(self, run_id: UUID, before: Before) -> None:
        """What the step of a run was meant to do to the generations."""
        now, expected = self.find_run(run_id), self.runs[run_id]
        if (
            expected.kind == OUTSIDE
            and before.phase == COMPARING
            and expected.compared_by is not before.at_work
        ):
            expected.compared_by = before.at_work
            if expected.generation_id == before.live_id:
                there = set(before.rows[before.live_id])
                expected.vanished = there - {item.key for item in expected.source}
        live = ask(self.engine, find_generation, "docs").id
        building = next(iter(self.list_in_state("building")), None)
        if before.building_id is not None and building != before.building_id and live != before.building_id:
            self.ledgers.pop(before.building_id, None)
        if building is not None and building != before.building_id:
            ledger = self.ledgers[building] = Ledger()
            places = before.open_places if expected.kind == OUTSIDE else None
            ledger.copy_from(self.ledgers[before.live_id], places)
        if now.seq != expected.seq:
            self.begin_reading(now, expected, before)
        if expected.kind == OUTSIDE and now.counts.num_seen > expected.num_seen:
            self.compare_batch(now, expected, before)
        if live != before.live_id and expected.kind != CARRIED:
            self.live_since[live] = self.last_place()
        if now.is_terminal:
            self.end(now, expected)
            del self.runs[run_id]

    def begin_reading(self, now: Run, expected: Expected, before: Before) -> None:
        """The run takes its place, perhaps anew. What its source has not is gone, unless something older is open."""
        assert now.seq is not None
        assert now.generation_id is not None
        ledger = self.ledgers.get(now.generation_id)
        if ledger is None:  # given up at this moment
            return
        if expected.seq is not None:
            for key in NAMES:
                ledger.take_out(key, expected.seq)
        expected.seq, expected.generation_id, expected.num_seen = now.seq, now.generation_id, 0
        if expected.kind == OUTSIDE:
            expected.doubtful = before.open_keys.get(before.live_id, set()) | before.open_keys.get(
                now.generation_id, set()
            )
            for key in NAMES:
                ledger.add(key, Write(now.seq, None, is_certain=False, is_removal=True))
        elif now.generation_id != before.live_id:
            ledger.copy_from(self.ledgers[before.live_id])

    def compare_batch(self, now: Run, expected: Expected, before: Before) -> None:
        """What the generation has as the source has it is not written: something older and open may come over it."""
        assert now.seq is not None
        ledger = self.ledgers.get(expected.generation_id)
        for item in expected.source[expected.num_seen : now.counts.num_seen]:
            value = item.text.decode(), item.metadata.decode()
            is_written = before.rows.get(expected.generation_id, {}).get(item.key) != value
            if ledger is not None:
                ledger.put(item.key, Write(now.seq, value, is_certain=is_written))
        expected.num_seen = now.counts.num_seen

    def end(self, now: Run, expected: Expected) -> None:
        ledger = self.ledgers.get(expected.generation_id, Ledger())
        is_done = now.state == COMPLETED
        if not is_done:
            assert now.state == "cancelled" or expected.may_fail, f"{now.state}: {now.error}"
        if expected.kind == CARRIED:
            if not is_done:
                self.unfinished_carries.append(expected)
            for key, write in expected.owed if is_done else []:
                ledger.put(key, write)
        elif expected.kind == OUTSIDE and expected.seq is not None:
            for key, write in ledger.list_at(expected.seq):
                is_certain = key not in expected.doubtful if write.is_removal else write.is_certain
                ledger.put(key, replace(write, is_certain=is_done and is_certain))
            for key in expected.vanished:  # as if a client had deleted it
                for each in self.ledgers.values():
                    each.put(key, Write(expected.seq, None, is_certain=is_done))

    @rule()
    def settle(self) -> None:
        """All runs and jobs come to their end; then each generation has what it is to have."""
        for _ in range(1000):
            has_run, has_chunk = self.step(), self.commit_all()
            if not has_run and not has_chunk:
                break
        else:
            raise AssertionError("there is always something to do")
        for generation_id in self.list_in_state("live", "retired"):
            found = self.read(generation_id)
            for key in NAMES:
                allowed = self.ledgers[generation_id].allowed(key)
                assert found.get(key) in allowed, (
                    f"{key} of generation {generation_id}: {found.get(key)} and not of {allowed}; "
                    f"{sorted(self.ledgers[generation_id].writes.get(key, []), key=lambda write: write.place)}"
                )

    @invariant()
    def vectors_texts_and_metadata_are_never_parted(self) -> None:
        for generation_id in self.ledgers:
            for key, value in self.read(generation_id).items():
                assert value in self.written[key], f"{key} of generation {generation_id} is {value}"

    def read(self, generation_id: int) -> dict[str, Value]:
        """Texts and metadata by key, each compared with the vector beside it."""
        with self.engine.connect() as connection:
            rows = connection.execute(text(READ_ROWS.format(id=generation_id))).all()
        found: dict[str, Value] = {}
        for row in rows:
            assert row.key is not None, "attributes without a row"
            content = row.text.encode()
            assert Item(row.key, content).content_hash() == row.content_hash == row.described_hash
            vector = np.fromstring(row.embedding[1:-1], sep=",")
            assert vector @ vector_of(content) > 0.99, "the vector of another text"
            found[row.key] = row.text, (row.metadata or "").replace(" ", "")
        return found

    def find_run(self, run_id: UUID) -> Run:
        return ask(self.engine, find_run, run_id)

    def list_in_state(self, *states: str) -> list[int]:
        """Of those that are not given up."""
        with self.engine.connect() as connection:
            rows = connection.execute(LIST_GENERATIONS).all()
        return [row.id for row in rows if row.state in states and (row.was_live or row.state == "building")]

    def list_open_runs(self) -> list[UUID]:
        with self.engine.connect() as connection:
            return sorted(connection.execute(LIST_OPEN_RUNS).scalars(), key=list(self.runs).index)

    def last_place(self) -> int:
        with self.engine.connect() as connection:
            number: int = connection.execute(LAST_PLACE).scalar_one()
        return number


def pack(values: dict[str, tuple[str, str]]) -> list[Item]:
    return [Item(key, content.encode(), metadata.encode()) for key, (content, metadata) in values.items()]


def play(postgres_url: str, max_examples: int, steps: int, **options: Any) -> None:
    machine = type("Collection", (Collection,), {"postgres_url": postgres_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            **options,
        ),
    )


@pytest.mark.timeout(300)
def test_the_newest_write_of_a_key_wins_in_every_generation(postgres_url: str) -> None:
    play(postgres_url, 12, 30)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_newest_write_of_a_key_wins_in_many_more_histories(postgres_url: str) -> None:
    play(postgres_url, 400, 60)
