"""Pushes: how what a client streams becomes a run, and what is left when it does not."""

from contextlib import suppress
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event, text

from tests.database import ask, execute
from tests.protocol import make_items, submit
from vectormill.domain.errors import SourceFailed
from vectormill.jobs.item import Item
from vectormill.models.registry import Registry
from vectormill.runs.runs import claim_run
from vectormill.settings import Settings
from vectormill.sources.opening import open_source
from vectormill.sources.pushes import PushWriter, prune_pushes
from vectormill.sources.reader import Reader, SourcePlace
from vectormill.sources.source import PUSH, Source
from vectormill.sources.sources import save_source


@pytest.fixture
def place(engine: Engine) -> SourcePlace:
    return SourcePlace(engine, Settings(), Registry({}), collection="docs")


def read_all(reader: Reader) -> list[Item]:
    return [item for batch in reader.read() for item in batch]


def make_collection(engine: Engine) -> None:
    submit(engine, make_items(1), collection="docs")
    ask(engine, save_source, "docs", Source(PUSH, {}))


def test_a_push_is_read_part_by_part_in_its_order(place: SourcePlace, engine: Engine) -> None:
    make_collection(engine)
    items = [Item(f"k{number}", b"text", b'{"n":1}') for number in range(9000)]
    with PushWriter(engine, "docs", {"is_complete": True}) as writer:
        for item in items:
            writer.add(item)
        run_id = writer.finish()
    here = SourcePlace(engine, Settings(), Registry({}), collection="docs", run_id=run_id)
    reader = open_source(Source(PUSH, {}), here)
    assert [len(batch) for batch in reader.read()] == [4096, 4096, 808]
    assert read_all(reader) == items
    assert reader.count_rows() == 9000
    assert find_runs(engine) == [("queued", {"is_complete": True, "num_parts": 3}, None, 3)]
    execute(engine, "DELETE FROM vectormill.run_parts WHERE seq = 2")
    with pytest.raises(SourceFailed, match="Only 2 of 3 parts of the push arrived"):
        read_all(reader)


def lose_the_answer(engine: Engine, error: BaseException) -> None:
    """Have an indexer take the run that the next COMMIT makes, of which the client hears this error alone."""

    @event.listens_for(engine, "commit", once=True)
    def commit_and_claim(connection: Connection) -> None:
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.commit()
        assert ask(engine, claim_run, "an indexer", 30.0) is not None
        raise error


@pytest.mark.parametrize("error", [psycopg.OperationalError("the connection is lost"), KeyboardInterrupt()])
def test_a_push_whose_commit_was_not_heard_of_stays_whole_for_the_indexer_that_has_it(
    place: SourcePlace, engine: Engine, error: BaseException
) -> None:
    make_collection(engine)
    with suppress(KeyboardInterrupt), PushWriter(engine, "docs", {"is_complete": True}) as writer:
        writer.add(Item("a", b"text"))
        lose_the_answer(engine, error)
        assert writer.finish() == writer.id
    ((state, _, told, parts),) = find_runs(engine)
    assert (state, told, parts) == ("running", None, 1)


def test_a_push_that_was_not_queued_is_no_success_though_postgres_answers_again(engine: Engine) -> None:
    make_collection(engine)

    def push() -> None:
        with PushWriter(engine, "docs", {}) as writer:
            writer.add(Item("a", b"text"))

            @event.listens_for(engine, "commit", once=True)
            def lose(connection: Connection) -> None:
                raise psycopg.OperationalError("the connection is lost")

            writer.finish()

    with pytest.raises(psycopg.OperationalError):
        push()
    ((state, _, told, parts),) = find_runs(engine)
    assert (state, parts) == ("failed", 0)
    assert "interrupted" in str(told)


def find_runs(engine: Engine) -> list[tuple[object, ...]]:
    statement = text("""
        SELECT state, options, error,
               (SELECT count(*) FROM vectormill.run_parts WHERE run_id = runs.id) FROM vectormill.runs
    """)
    return [tuple(row) for row in execute(engine, statement)]


def test_a_run_that_nothing_was_pushed_to_reads_nothing_rather_than_an_empty_source(
    place: SourcePlace, engine: Engine
) -> None:
    here = SourcePlace(engine, Settings(), Registry({}), collection="docs", run_id=uuid4())
    with pytest.raises(SourceFailed, match="Nothing was pushed"):
        read_all(open_source(Source(PUSH, {}), here))


def test_a_push_whose_process_was_killed_fails_and_parts_that_were_read_are_removed(engine: Engine) -> None:
    make_collection(engine)
    killed = PushWriter(engine, "docs", {})
    killed.__enter__()
    for number in range(5000):
        killed.add(Item(f"k{number}", b"text"))
    with PushWriter(engine, "docs", {}) as writer:
        writer.add(Item("a", b"text"))
        writer.finish()
    age = "UPDATE vectormill.runs SET updated_at = now() - interval '2 hours' WHERE state = 'uploading'"
    execute(engine, age)
    ask(engine, prune_pushes, 3600)
    assert sorted((state, parts) for state, _, _, parts in find_runs(engine)) == [
        ("failed", 0),
        ("queued", 1),
    ]
    killed._keys.close()
