"""Puts and deletions while a generation is built, swapped and rolled back: the content equals a model's at every rest.

Hypothesis chooses what clients do and which chunk is committed next; Postgres is real, no model is.
"""

from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import text

from tests.building import BITS, NEXT, ask, build, put, swap, table_of
from tests.protocol import SPEC, claim, complete, dispatch_all
from tests.services import connected_engine, migrated_database
from vectormill.db.collections.collections import find_generation
from vectormill.db.collections.swaps import roll_back
from vectormill.db.jobs.jobs import draw_seq
from vectormill.db.jobs.submission import JobWriter
from vectormill.db.rows.items import delete_items, delete_rows
from vectormill.db.short_locks import act_in_short_locks
from vectormill.domain.collection import Generation
from vectormill.domain.jobs.item import Item
from vectormill.domain.jobs.job import NewJob
from vectormill.settings import Settings

KEYS = st.sampled_from("abcde")
TEXTS = st.sampled_from(["one", "two", "three"])


class Rebuilding(RuleBasedStateMachine):
    """`content` is what the collection has once every job is done; `next_content` what the one being built has."""

    postgres_url: str

    def __init__(self) -> None:
        super().__init__()
        self.open = ExitStack()
        url = self.open.enter_context(migrated_database(self.postgres_url))
        self.engine = self.open.enter_context(connected_engine(url))
        self.content: dict[str, str] = {}
        self.next_content: dict[str, str] = {}
        self.building: Generation | None = None
        self.seq = 0
        self.source: dict[str, str] = {}
        self.waiting: list[int] = []
        self.spec = SPEC

    def teardown(self) -> None:
        try:
            self.encode_all()
            self.compare()
        finally:
            self.open.close()

    @initialize()
    def make_collection(self) -> None:
        self.put("a", "first")
        self.encode_all()

    # -- clients

    @rule(key=KEYS, content=TEXTS)
    def put(self, key: str, content: str) -> None:
        put(self.engine, key, content=content, spec=self.spec)
        self.content[key] = content
        self.next_content[key] = content

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        ask(self.engine, delete_items, "docs", [key])
        self.content.pop(key, None)
        self.next_content.pop(key, None)

    # -- workers

    @rule(choice=st.integers(0, 1000))
    def encode_one(self, choice: int) -> None:
        """Any chunk that waits, whichever came first."""
        self.waiting += [dispatch.chunk_id for dispatch in dispatch_all(self.engine)]
        if self.waiting:
            claimed = claim(self.engine, self.waiting.pop(choice % len(self.waiting)))
            if claimed is not None:
                complete(self.engine, claimed)

    def encode_all(self) -> None:
        self.encode_one(0)
        while self.waiting:
            self.encode_one(0)

    # -- a run

    @precondition(lambda self: self.building is None)
    @rule(source=st.dictionaries(KEYS, TEXTS, max_size=5), is_binary=st.booleans())
    def begin_build(self, source: dict[str, str], is_binary: bool) -> None:
        """Reads the source, which clients know nothing of, and submits it for a generation of another space."""
        spec = BITS if is_binary else NEXT
        spec = SPEC if spec == self.spec else spec
        building = build(self.engine, spec)
        assert building.state == "building"
        self.building, self.source = building, source
        self.seq = ask(self.engine, draw_seq)
        self.next_content = dict(source)
        if source:
            new_job = NewJob(spec, "docs", seq=self.seq, generation_id=building.id)
            with JobWriter(self.engine, new_job, Settings(chunk_max_items=2)) as writer:
                for key, content in source.items():
                    writer.add(Item(key, f"{content} {key}".encode()))
                writer.finish()

    @precondition(lambda self: self.building is not None)
    @rule()
    def swap(self) -> None:
        """As a run does it: what is submitted is encoded, what the source has not is deleted, and then it swaps."""
        assert self.building is not None
        self.encode_all()
        gone = sorted(set("abcde") - set(self.source))
        ask(self.engine, delete_rows, self.building.id, gone, [self.seq] * len(gone))
        self.compare()
        swap(self.engine, self.building)
        self.spec, self.building, self.content = self.building.spec, None, self.next_content
        self.next_content = {}
        self.compare()

    def compare(self) -> None:
        """What the live generation has, and what the one that is being built has, where no job is open."""
        live = ask(self.engine, find_generation, "docs")
        assert self.read(table_of(live)) == hashes(self.content)
        assert self.read("docs") == hashes(self.content)
        if self.building is not None:
            found = self.read(table_of(self.building))
            gone = set(found) - set(self.next_content)
            assert not gone & set(self.source), f"{gone} of the source were deleted and are there"
            kept = {key: value for key, value in found.items() if key not in gone}
            assert kept == hashes(self.next_content)

    def read(self, table: str) -> dict[str, bytes]:
        with self.engine.connect() as connection:
            rows = connection.execute(text(f"SELECT key, content_hash FROM {table}"))
            return {row.key: bytes(row.content_hash) for row in rows}

    @precondition(lambda self: self.building is None)
    @rule()
    def roll_back_twice(self) -> None:
        """Forth and back: nothing is changed by it."""
        self.encode_all()
        with self.engine.connect() as connection:
            retired = (
                "SELECT count(*) FROM vectormill.generations WHERE state = 'retired' AND live_at IS NOT NULL"
            )
            if not connection.execute(text(retired)).scalar_one():
                return
        for _ in range(2):
            act_in_short_locks(self.engine, lambda connection: roll_back(connection, "docs"))
        self.compare()


def hashes(content: dict[str, str]) -> dict[str, bytes]:
    return {key: Item(key, f"{value} {key}".encode()).content_hash() for key, value in content.items()}


@pytest.fixture
def machine(postgres_url: str) -> type[Rebuilding]:
    return type("Rebuilding", (Rebuilding,), {"postgres_url": postgres_url})


@pytest.mark.timeout(300)
def test_the_content_of_a_collection_is_what_clients_and_sources_have_written_last(
    machine: type[Rebuilding],
) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=15,
            stateful_step_count=25,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
