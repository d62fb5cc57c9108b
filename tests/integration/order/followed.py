"""Followed: a collection, the generations that it has, and what the plain model says that each of them is to have.

Looks before and after each step of a run and tells the ledgers what the step was meant to do. Takes no step itself.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from uuid import UUID

from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
)
from sqlalchemy import text

from scheduler.reaper import Recomputer
from tests.database import ask, execute, load_payload
from tests.faulty_workers import ProvenWorker
from tests.integration.order.ledger import Ledger, Value, Write
from tests.integration.order.stepped_run import SteppedRun, reading_in_step
from tests.kept_rows import read_rows
from tests.services import connected_engine, migrated_database
from vectormill.collections.collections import find_building, find_generation
from vectormill.jobs.chunk import Claim
from vectormill.jobs.item import Item
from vectormill.runs.run import COMPARING, COMPLETED, Run
from vectormill.runs.runs import find_run

NAMES = "abcd"
OUTSIDE, OWN, CARRIED = "outside", "own", "carried"

LIST_OPEN_CHUNKS = text("""
    SELECT chunks.id, jobs.generation_id, coalesce(jobs.place, jobs.seq) AS place,
           EXISTS (SELECT 1 FROM vectormill.runs WHERE runs.job_id = jobs.id) AS is_of_run
      FROM vectormill.chunks JOIN vectormill.jobs ON jobs.id = chunks.job_id
     WHERE chunks.state IN ('pending', 'queued', 'leased')
""")
LIST_GENERATIONS = text(
    "SELECT id, state, live_at IS NOT NULL AS was_live FROM vectormill.generations ORDER BY id"
)
LIST_SUSPECT = text("""
    SELECT chunks.id, jobs.generation_id, coalesce(jobs.place, jobs.seq) AS place
      FROM vectormill.chunks JOIN vectormill.jobs ON jobs.id = chunks.job_id
     WHERE chunks.is_suspect AND chunks.state <> 'split'
""")
LIST_FILLING = text("SELECT id FROM vectormill.generations WHERE state = 'building' AND report ? 'fill'")
LIST_OPEN_RUNS = text("SELECT id FROM vectormill.runs WHERE finished_at IS NULL")
LAST_PLACE = text("SELECT last_value FROM vectormill.jobs_seq_seq")


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
    carried_to: int = 0
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


class Followed(RuleBasedStateMachine):
    """The state of the machine, and the comparison; what happens to the collection a subclass says."""

    postgres_url: str

    def __init__(self) -> None:
        super().__init__()
        self.open = ExitStack()
        self.open.enter_context(reading_in_step(rows_per_page=2))
        url = self.open.enter_context(migrated_database(self.postgres_url))
        self.engine = self.open.enter_context(connected_engine(url))
        self.ledgers: dict[int, Ledger] = {}
        self.retired_since: dict[int, int] = {}
        self.written: dict[str, set[Value]] = {name: set() for name in NAMES}
        self.runs: dict[UUID, Expected] = {}
        self.unfinished_carries: list[Expected] = []
        self.waiting: list[int] = []
        self.claims: list[Claim] = []
        self.worker, self.mender = ProvenWorker(self.engine, "w"), Recomputer(self.engine)
        self.has_failed_period = False
        self.at_work: tuple[UUID, SteppedRun] | None = None

    # The machine that derives from this class has the rules, and with them these three steps, which `settle` repeats.

    def step(self) -> bool:
        """Take one step of a run. Return False if there is nothing to do."""
        raise NotImplementedError

    def end_faults(self) -> None:
        """Prove all that was computed, or put it back to be computed again."""
        raise NotImplementedError

    def commit_all(self) -> bool:
        """Claim and commit all chunks that wait. Return whether there were any."""
        raise NotImplementedError

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
            self.retire(before.live_id)
        if now.is_terminal:
            self.end(now, expected)
            del self.runs[run_id]

    def retire(self, generation_id: int) -> None:
        """Remember what a rollback to this generation owes: also what runs that were to carry rows to it have not."""
        carries = [*self.runs.values(), *self.unfinished_carries]
        since = [each.since for each in carries if each.carried_to == generation_id]
        self.retired_since[generation_id] = min([self.last_place(), *since])

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
        """All runs and jobs come to their end; then each generation has what it is to have, of proven periods."""
        self.end_faults()
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
        self.check_vectors()

    def check_vectors(self) -> None:
        """Vectors of failed periods are in suspect chunks: of cancelled jobs, and of generations that were replaced."""
        suspects = set()
        with self.engine.connect() as connection:
            for row in connection.execute(LIST_SUSPECT).all():
                items = load_payload(connection, row.id)
                places = items.places or [row.place] * len(items)
                suspects |= {(row.generation_id, *each) for each in zip(items.keys, places, strict=True)}
            for generation_id in self.list_in_state("live", "retired"):
                for key, found in read_rows(connection, generation_id).items():
                    is_suspect = (generation_id, key, found.vector_place) in suspects
                    assert is_suspect or not found.is_faulty, (
                        f"{key} of generation {generation_id} has the vector of a failed period: {found}"
                    )

    @invariant()
    def vectors_texts_and_metadata_are_never_parted(self) -> None:
        for generation_id in self.ledgers:
            for key, value in self.read(generation_id).items():
                assert value in self.written[key], f"{key} of generation {generation_id} is {value}"

    def read(self, generation_id: int) -> dict[str, Value]:
        """Texts and metadata by key, each compared with the vector beside it."""
        return {key: row.content for key, row in ask(self.engine, read_rows, generation_id).items()}

    def find_run(self, run_id: UUID) -> Run:
        return ask(self.engine, find_run, run_id)

    def list_in_state(self, *states: str) -> list[int]:
        """Of those that are not given up."""
        rows = execute(self.engine, LIST_GENERATIONS).all()
        return [row.id for row in rows if row.state in states and (row.was_live or row.state == "building")]

    def list_filling(self) -> list[int]:
        """Return the ids of generations that have a fill, see vectormill/collections/bulk_loads.py."""
        return list(execute(self.engine, LIST_FILLING).scalars())

    def list_open_runs(self) -> list[UUID]:
        return sorted(execute(self.engine, LIST_OPEN_RUNS).scalars(), key=list(self.runs).index)

    def last_place(self) -> int:
        number: int = execute(self.engine, LAST_PLACE).scalar_one()
        return number
