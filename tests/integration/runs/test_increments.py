"""Runs on a source with a column of changes read what changed, and find vanished rows now and then."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text

from tests.api_server import encoding_meanwhile
from tests.database import ask, execute
from tests.indexers import KeptSource, await_run, contents, indexing, make_collection, start_run
from vectormill.domain.errors import InvalidOption
from vectormill.models.registry import Registry
from vectormill.runs.run import COMPLETED, COMPLETED_WITH_ERRORS, FAILED, Run
from vectormill.settings import Settings
from vectormill.sources.opening import open_source
from vectormill.sources.reader import SourcePlace
from vectormill.sources.source import SQL, Source
from vectormill.sources.sources import save_source

QUERY = "SELECT id, body, changed FROM tickets"
OPTIONS = {"query": QUERY, "key": "id", "text": "body", "changed": "changed"}


@pytest.fixture(params=["bigint", "timestamptz", "timestamp", "date", "text", "citext", "numeric"])
def tickets(engine: Engine, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A table of tickets whose column `changed` has a type of its own, a collection of it, and an indexer."""
    make_collection(engine)
    execute(engine, "CREATE EXTENSION citext")
    execute(engine, f"CREATE TABLE tickets (id int PRIMARY KEY, body text, changed {request.param})")
    execute(
        engine, f"CREATE FUNCTION at(n int) RETURNS {request.param} LANGUAGE sql AS $$ {AT[request.param]} $$"
    )
    ask(engine, save_source, "docs", Source(SQL, OPTIONS))
    put(engine, *((number, f"ticket {number}", number) for number in range(1, 41)))
    source = KeptSource()
    with encoding_meanwhile(engine), indexing(engine, source, source.open):
        yield engine


AT = {
    "bigint": "SELECT n::bigint",
    "numeric": "SELECT n + 0.50",
    # Here a sorts before B, as by most collations, and after it in Python.
    "citext": "SELECT CASE WHEN n <= 40 THEN 'a' ELSE 'B' END || lpad(n::text, 6, '0')",
    "timestamptz": "SELECT timestamptz '2026-03-29 00:30+01' + n * interval '1 minute'",
    "timestamp": "SELECT timestamp '2026-01-01' + n * interval '1 minute'",
    "date": "SELECT date '2026-01-01' + n",
    "text": "SELECT lpad(n::text, 6, '0')",
}


def put(engine: Engine, *rows: tuple[int, str, int]) -> None:
    with engine.begin() as connection:
        for number, body, moment in rows:
            connection.execute(
                text(
                    "INSERT INTO tickets VALUES (:number, :body, at(:moment)) "
                    "ON CONFLICT (id) DO UPDATE SET body = excluded.body, changed = excluded.changed"
                ),
                {"number": number, "body": body, "moment": moment},
            )


def remove(engine: Engine, number: int) -> None:
    execute(engine, "DELETE FROM tickets WHERE id = :number", number=number)


def follow(engine: Engine, state: str = COMPLETED, **options: Any) -> Run:
    run = await_run(engine, start_run(engine, "docs", **options))
    assert (run.state, run.error) == (state, None)
    return run


def test_what_changed_is_read_and_what_vanished_is_found_by_a_full_run(tickets: Engine) -> None:
    assert follow(tickets).counts.num_new == 40
    assert follow(tickets).counts.num_unchanged == 40, (
        "the second run reads all, since the first may have missed some"
    )
    put(tickets, (7, "another ticket 7", 50), (100, "a new ticket", 51))
    remove(tickets, 3)
    third = follow(tickets)
    # Ticket 40, the newest of the first run, is read again, and found unchanged.
    assert (third.counts.num_seen, third.counts.num_changed, third.counts.num_new) == (3, 1, 1)
    assert {"3", "100"} <= contents(tickets).keys()
    fourth = follow(tickets)
    assert (fourth.counts.num_seen, fourth.counts.num_unchanged) == (3, 3)
    assert follow(tickets).counts.num_seen == 1
    last = follow(tickets, full=True)
    assert (last.counts.num_seen, last.counts.num_deleted) == (40, 1)
    assert "3" not in contents(tickets)
    assert follow(tickets).counts.num_seen == 1


def test_a_transaction_that_was_open_during_a_run_is_found_by_the_next(tickets: Engine) -> None:
    follow(tickets)
    put(tickets, (41, "ticket 41", 60))
    follow(tickets)
    put(tickets, (42, "a ticket that was committed late", 55))
    follow(tickets)
    assert "42" in contents(tickets)


def test_all_rows_are_read_where_marks_tell_nothing(tickets: Engine) -> None:
    for _ in range(3):
        follow(tickets)
    ask(tickets, save_source, "docs", Source(SQL, OPTIONS | {"query": f"{QUERY} WHERE id > 1"}))
    changed = follow(tickets)
    assert (changed.counts.num_seen, changed.counts.num_deleted) == (39, 1)
    follow(tickets)
    assert follow(tickets).counts.num_seen == 1
    with tickets.begin() as connection:
        path = "'{reading,changed,whole_at}'"
        connection.execute(
            text(
                f"UPDATE vectormill.runs SET report = jsonb_set(report, {path}, to_jsonb(now() - interval '8 days')) "
                f"WHERE report #> {path} IS NOT NULL"
            )
        )
    assert follow(tickets).counts.num_seen == 39


@pytest.mark.parametrize("tickets", ["bigint"], indirect=True)
def test_what_cannot_tell_changes_is_refused(tickets: Engine) -> None:
    place = SourcePlace(tickets, None, None, collection="docs")  # type: ignore[arg-type]  # nothing is read
    with pytest.raises(InvalidOption, match="cannot name a column of changes"):
        open_source(Source(SQL, OPTIONS, {"by": "paragraphs"}), place)
    execute(tickets, "ALTER TABLE tickets ALTER changed TYPE boolean USING true")
    run = await_run(tickets, start_run(tickets))
    assert (run.state, "does not tell" in (run.error or "")) == (FAILED, True)


@pytest.mark.parametrize("tickets", ["timestamptz"], indirect=True)
def test_a_moment_without_an_end_is_no_mark(tickets: Engine) -> None:
    execute(tickets, "UPDATE tickets SET changed = 'infinity' WHERE id = 1")
    follow(tickets)
    follow(tickets)
    put(tickets, (2, "another ticket 2", 50))
    assert follow(tickets).counts.num_changed == 1


@pytest.mark.parametrize("tickets", ["bigint"], indirect=True)
def test_a_text_that_could_not_be_encoded_is_tried_by_each_run_until_it_is(
    tickets: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tickets, (3, " ", 3))
    assert follow(tickets, COMPLETED_WITH_ERRORS).counts.num_failed == 1
    follow(tickets, COMPLETED_WITH_ERRORS)
    put(tickets, (41, "ticket 41", 60))
    again = follow(tickets, COMPLETED_WITH_ERRORS)
    assert (again.counts.num_seen, again.counts.num_new, again.counts.num_failed) == (3, 2, 1)
    monkeypatch.setattr("tests.api_server.find_side_failure", lambda *_: None)
    assert follow(tickets).counts.num_new == 1
    assert "3" in contents(tickets)
    assert follow(tickets).counts.num_seen == 1


@pytest.mark.parametrize("tickets", ["bigint"], indirect=True)
def test_all_rows_are_read_once_nothing_tells_which_texts_could_not_be_encoded(
    tickets: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tickets, (3, " ", 3))
    for _ in range(3):
        follow(tickets, COMPLETED_WITH_ERRORS)
    monkeypatch.setattr("tests.api_server.find_side_failure", lambda *_: None)
    execute(tickets, "DELETE FROM vectormill.jobs")
    whole = follow(tickets)
    assert (whole.counts.num_seen, whole.counts.num_new) == (40, 1)


AWKWARD = ("it's", "a\\b", "100%", "50%%", 'say "x"', "ü", "{a,b}")


@pytest.mark.parametrize("database", ["postgresql", "sqlite"])
def test_any_key_is_looked_for_and_any_text_is_a_mark(
    engine: Engine, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine if database == "postgresql" else create_engine(f"sqlite:///{tmp_path}/tickets.db")
    with made.begin() as connection:
        connection.execute(text("CREATE TABLE tickets (id text, body text, changed text)"))
        for number, key in enumerate(AWKWARD):
            values = {"key": key, "changed": f"{number} {key}"}
            connection.execute(text("INSERT INTO tickets VALUES (:key, 'a ticket', :changed)"), values)
    made.dispose()
    if database == "sqlite":
        monkeypatch.setenv("TICKETS_URL", f"sqlite:///{tmp_path}/tickets.db")
    options = OPTIONS | ({"url_env": "TICKETS_URL"} if database == "sqlite" else {})
    place = SourcePlace(engine, Settings(), Registry({}), collection="docs")
    for number, key in enumerate(AWKWARD):
        reader = open_source(Source(SQL, options), place)
        reader.narrow(f"{number} {key}", AWKWARD[:2])
        read = [item.key for batch in reader.read() for item in batch]
        assert sorted(read) == sorted({*AWKWARD[:2], *AWKWARD[number:]})
        assert reader.newest == f"{len(AWKWARD) - 1} {AWKWARD[-1]}"
