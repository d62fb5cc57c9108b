"""Runs of re-indexing: what each kind of difference between a source and its collection leads to."""

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import Engine, text

from indexer import reindexing
from tests.api_server import encoding_meanwhile
from tests.database import ask, execute
from tests.indexers import (
    ListedSource,
    await_run,
    contents,
    count_encoded,
    indexing,
    make_collection,
    row,
    start_run,
    wanted,
)
from tests.protocol import make_items, submit, vector_of
from tests.waiting import wait_for
from vectormill.collections.items import delete_items
from vectormill.jobs.duplicate_keys import DuplicateFinder
from vectormill.jobs.item import Item
from vectormill.runs.run import RunCounts
from vectormill.runs.runs import cancel_run, confirm_run

ROWS = [row(f"k{number}", f"text {number}", page=number) for number in range(10)]
BARE = row("bare", "without metadata")


@dataclass(frozen=True)
class Case:
    """A source that differs from the first one, and what the run is to count. `why` names the row."""

    why: str
    items: list[Item]
    counts: RunCounts
    num_encoded: int
    options: dict[str, Any] = field(default_factory=dict)


def but(position: int, *others: Item) -> list[Item]:
    """The rows with others in place of one."""
    return [*ROWS[:position], *others, *ROWS[position + 1 :]]


CASES = [
    Case("unchanged", ROWS, RunCounts(10, 10), 0),
    Case("changed text", but(3, row("k3", "another", page=3)), RunCounts(10, 9, num_changed=1), 1),
    Case("changed metadata", but(3, row("k3", "text 3", page=99)), RunCounts(10, 9, num_metadata_only=1), 0),
    Case("metadata taken away", but(3, row("k3", "text 3")), RunCounts(10, 9, num_metadata_only=1), 0),
    Case("both changed", but(3, row("k3", "another")), RunCounts(10, 9, num_changed=1), 1),
    Case("new", [*ROWS, row("x", "ex", page=1)], RunCounts(11, 10, num_new=1), 1),
    Case("new without metadata", [*ROWS, BARE], RunCounts(11, 10, num_new=1), 1),
    Case("vanished", ROWS[:-1], RunCounts(9, 9, num_deleted=1), 0),
    Case(
        "renamed",
        but(3, row("renamed", "text 3", page=3)),
        RunCounts(10, 9, num_moved=1),
        0,
    ),
    Case(
        "one renamed, two deleted",
        [*ROWS[:7], row("renamed", "text 8")],
        RunCounts(8, 7, num_moved=1, num_deleted=2),
        0,
    ),
    Case(
        "two rows that change places",
        [*ROWS[:8], row("k8", "text 9", page=9), row("k9", "text 8", page=8)],
        RunCounts(10, 8, num_moved=2),
        0,
    ),
    Case(
        "moved by one, with something new before",
        [*ROWS[:8], row("k8", "before"), row("k9", "text 8", page=8), row("k10", "text 9", page=9)],
        RunCounts(11, 8, num_changed=1, num_moved=2),
        1,
    ),
    Case("a copy of another row", [*ROWS, row("copy", "text 0")], RunCounts(11, 10, num_moved=1), 0),
    Case(
        "an unencodable text",
        but(3, row("k3", " ", page=3)),
        RunCounts(10, 9, num_changed=1, num_failed=1),
        1,
    ),
    Case(
        "half of a surrogate pair",
        but(3, row("k3", "\ud800", page=3)),
        RunCounts(10, 9, num_changed=1, num_failed=1),
        1,
    ),
    Case("an empty source, confirmed", [], RunCounts(num_deleted=10), 0, {"confirm": True}),
]


def build(engine: Engine, items: list[Item]) -> None:
    """The collection as the first run of this source leaves it."""
    make_collection(engine)
    source = ListedSource(items)
    with indexing(engine, source), encoding_meanwhile(engine):
        run = await_run(engine, start_run(engine))
    assert (run.state, run.error) == ("completed", None)
    assert run.counts == RunCounts(len(items), num_new=len(items))
    assert contents(engine) == wanted(items)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.why)
def test_a_run_makes_the_collection_what_its_source_is(engine: Engine, case: Case) -> None:
    build(engine, ROWS)
    with indexing(engine, ListedSource(case.items)), encoding_meanwhile(engine):
        run = await_run(engine, start_run(engine, **case.options))
    assert run.error is None
    assert run.counts == case.counts
    failed = [item for item in case.items if not item.text.strip() or b"\xed" in item.text]
    assert run.state == ("completed_with_errors" if failed else "completed")
    assert contents(engine) == wanted(item for item in case.items if item not in failed)
    assert count_encoded(engine) == len(ROWS) + case.num_encoded
    assert_vectors_fit(engine, [item for item in case.items if item not in failed])
    assert not left_stages(engine)


def assert_vectors_fit(engine: Engine, items: list[Item]) -> None:
    """Each row has the vector of its own text."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT key, embedding::text AS embedding FROM docs"))
        found = {row.key: [float(number) for number in row.embedding.strip("[]").split(",")] for row in rows}
    for item in items:
        assert found[item.key] == pytest.approx(vector_of(item.text).tolist(), abs=2e-3)


LEFT_STAGES = text("SELECT relname FROM pg_class WHERE relname LIKE 'run\\_%' AND relkind = 'r'")


def left_stages(engine: Engine) -> list[str]:
    names = execute(engine, LEFT_STAGES).scalars().all()
    return [name for name in names if name != "run_parts"]


def test_a_source_that_breaks_midway_changes_nothing(engine: Engine) -> None:
    build(engine, ROWS)
    source = ListedSource([row(f"k{number}", "another") for number in range(6)], fails_at=3)
    with indexing(engine, source), encoding_meanwhile(engine):
        run = await_run(engine, start_run(engine, confirm=True))
    assert (run.state, run.error) == ("failed", "The source broke.")
    assert contents(engine) == wanted(ROWS)
    assert not left_stages(engine)


def test_a_key_that_the_source_has_twice_changes_nothing(engine: Engine) -> None:
    build(engine, ROWS)
    with indexing(engine, ListedSource([*ROWS, row("k0", "again")])), encoding_meanwhile(engine):
        run = await_run(engine, start_run(engine))
    assert run.state == "failed"
    assert run.error is not None
    assert "Rows 1 and 11 of the source have the same key" in run.error
    assert contents(engine) == wanted(ROWS)


def test_two_keys_with_one_hash_are_no_duplicate(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mistaken(DuplicateFinder):
        """A ledger that meets a collision among any keys."""

        def find_duplicate(self, *_: object) -> tuple[int, int]:
            return 2, 5

    monkeypatch.setattr(reindexing, "DuplicateFinder", Mistaken)
    build(engine, ROWS)


@pytest.mark.parametrize(
    ("items", "said"),
    [
        (
            [row(f"k{number}", f"other {number}", page=number) for number in range(10)],
            "10 have a different text",
        ),
        ([], "10 are no longer in the source"),
    ],
)
def test_a_run_that_would_change_too_much_is_held_until_it_is_confirmed(
    engine: Engine, items: list[Item], said: str
) -> None:
    build(engine, ROWS)
    with indexing(engine, ListedSource(items)), encoding_meanwhile(engine):
        run = await_run(engine, start_run(engine))
        assert run.state == "held"
        assert run.error is not None
        assert said in run.error
        assert contents(engine) == wanted(ROWS)
        assert ask(engine, confirm_run, run.id).state == "queued"
        run = await_run(engine, run.id)
    assert (run.state, run.error) == ("completed", None)
    assert contents(engine) == wanted(items)


def test_a_run_that_was_confirmed_reads_again_and_takes_no_row_away_that_came_back(engine: Engine) -> None:
    build(engine, ROWS)
    source = ListedSource(ROWS[:6])
    with indexing(engine, source), encoding_meanwhile(engine):
        held = await_run(engine, start_run(engine))
        assert held.state == "held"
        source.items = [*ROWS[:6], ROWS[9]]
        ask(engine, confirm_run, held.id)
        run = await_run(engine, held.id)
    assert (run.state, run.error) == ("completed", None)
    assert contents(engine) == wanted([*ROWS[:6], ROWS[9]])


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([], "10 are no longer in the source"),
        (
            [row(f"k{number}", f"other {number}", page=number) for number in range(10)],
            "10 have a different text",
        ),
    ],
)
def test_a_run_that_finds_more_than_was_confirmed_is_held_again(
    engine: Engine, items: list[Item], said: str
) -> None:
    build(engine, ROWS)
    source = ListedSource(ROWS[:6])
    with indexing(engine, source), encoding_meanwhile(engine):
        held = await_run(engine, start_run(engine))
        source.items = items
        ask(engine, confirm_run, held.id)
        run = await_run(engine, held.id)
        assert run.state == "held"
        assert said in (run.error or "")
        assert contents(engine) == wanted(ROWS)


def test_one_text_that_cannot_be_kept_does_not_fail_the_run_that_keeps_the_others(engine: Engine) -> None:
    # More words than the index of a full-text search takes of one text.
    large = row("large", " ".join(f"w{number:06}" for number in range(110_000)), page=1)
    items = [*ROWS[:4], large, *ROWS[4:]]
    build(engine, items)
    execute(engine, "UPDATE vectormill.collections SET keep_text = true")
    with indexing(engine, ListedSource(items, batch=11)), encoding_meanwhile(engine):
        run = await_run(engine, start_run(engine))
    assert (run.state, run.error) == ("completed", None)
    assert run.report["kept_texts"] == {"num_refused": 1}
    assert contents(engine) == wanted(items)
    with engine.connect() as connection:
        table = connection.execute(text("SELECT id FROM vectormill.generations")).scalar_one()
        kept = connection.execute(text(f"SELECT key, text FROM vectormill.generation_{table}_attributes"))
        assert {row.key: row.text for row in kept} == {
            item.key: None if item is large else item.text.decode() for item in items
        }


def test_a_held_run_keeps_no_other_run_of_the_collection_waiting_and_can_be_cancelled(engine: Engine) -> None:
    build(engine, ROWS)
    with indexing(engine, ListedSource([])), encoding_meanwhile(engine):
        held = await_run(engine, start_run(engine))
        assert await_run(engine, start_run(engine)).state == "held"
        assert ask(engine, cancel_run, held.id).state == "cancelled"


def test_a_wider_share_lets_a_run_change_more(engine: Engine) -> None:
    build(engine, ROWS)
    with indexing(engine, ListedSource(ROWS[:6])), encoding_meanwhile(engine):
        run = await_run(engine, start_run(engine, max_change_share=0.5))
    assert (run.state, run.counts.num_deleted) == ("completed", 4)


def test_what_a_client_puts_or_deletes_during_a_run_is_newer_than_its_source(engine: Engine) -> None:
    build(engine, ROWS)

    def meanwhile(position: int) -> None:
        if position == 6:  # behind the rows that are read
            submit(engine, [Item("k1", b"put meanwhile"), Item("mine", b"mine")], collection="docs")
            wait_for(lambda: "mine" in contents(engine), 20, "the put was encoded")
            ask(engine, delete_items, "docs", ["k2", "k4"])

    items = [row(f"k{number}", f"other {number}", page=number) for number in range(10)]
    with indexing(engine, ListedSource(items, before=meanwhile)), encoding_meanwhile(engine):
        run = await_run(engine, start_run(engine, confirm=True))
    assert run.state == "completed"
    expected = {item.key: item for item in items if item.key not in ("k1", "k2", "k4")}
    expected |= {"k1": Item("k1", b"put meanwhile"), "mine": Item("mine", b"mine")}
    assert contents(engine) == wanted(expected.values())


def test_runs_of_one_collection_follow_one_another_and_those_of_others_do_not_wait(engine: Engine) -> None:
    make_collection(engine)
    make_collection(engine, "others")
    at_work, most = 0, 0
    lock = threading.Lock()
    both, have_met = threading.Barrier(2), threading.Event()

    def meet(position: int) -> None:
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        if not have_met.is_set():
            both.wait(80)  # one of each collection is here
            have_met.set()
        with lock:
            at_work -= 1

    source = ListedSource(make_items(2), before=meet)
    with indexing(engine, source), encoding_meanwhile(engine):
        first, second = start_run(engine), start_run(engine)
        other = start_run(engine, "others")
        await_run(engine, other)
        runs = [await_run(engine, run_id) for run_id in (first, second)]
    assert most == 2
    assert runs[0].finished_at is not None
    assert runs[1].started_at is not None
    assert runs[0].finished_at <= runs[1].started_at
    assert [run.state for run in runs] == ["completed"] * 2
