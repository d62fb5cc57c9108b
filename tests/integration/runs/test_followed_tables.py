"""A table of a user's own is followed: what is committed there is in the collection after a round; and its triggers."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from psycopg import sql
from psycopg.errors import LockNotAvailable
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError

from indexer import follower
from indexer.follower import Follower, follow_collection
from tests.api_server import encode_waiting
from tests.database import ask, execute
from tests.kinds import RECORDS, SCORES
from tests.papers import (
    QUERY,
    collection_id,
    content,
    count_changes,
    follow,
    make_papers,
    run,
    set_source,
    settle,
)
from tests.protocol import SPEC
from tests.waiting import run_together, wait_for
from vectormill.collections.removals import remove_collection
from vectormill.domain.errors import CollectionNotFound, Conflict, InvalidOption, SourceFailed, SourceNotFound
from vectormill.jobs.deletion import discard_ended_puts
from vectormill.models.registry import Registry
from vectormill.settings import Settings
from vectormill.sources import opening
from vectormill.sources.following import (
    LIST_CHANGED_COLLECTIONS,
    LIST_CHANGES,
    REMOVE_CHANGES,
    FollowedTable,
    follow_table,
    list_followed_tables,
    unfollow_table,
)
from vectormill.sources.opening import write_look_up
from vectormill.sources.source import Source
from vectormill.sources.sql import write_array


@pytest.fixture
def papers(request: pytest.FixtureRequest, engine: Engine) -> str:
    """A table, and a collection `docs`, of the spec given, that its query fills; nothing of it is followed yet."""
    make_papers(engine, getattr(request, "param", SPEC))
    return "papers"


@pytest.fixture
def followed(engine: Engine, papers: str) -> str:
    follow(engine)
    return papers


@pytest.mark.parametrize("papers", [SPEC, SCORES, RECORDS], indirect=True, ids=lambda spec: spec.task)
def test_what_is_inserted_changed_and_deleted_is_so_in_the_collection(engine: Engine, followed: str) -> None:
    run(
        engine,
        "INSERT INTO papers VALUES (1, 'one', 'de', false), (2, 'two', 'en', false), (3, 'x', 'fr', true)",
    )
    settle(engine)
    assert content(engine) == {"1": {"lang": "de"}, "2": {"lang": "en"}}
    run(
        engine,
        "UPDATE papers SET lang = 'da', body = 'eins' WHERE id = 1",
        "UPDATE papers SET is_hidden = NOT is_hidden WHERE id IN (2, 3)",
    )
    settle(engine)
    assert content(engine) == {"1": {"lang": "da"}, "3": {"lang": "fr"}}
    run(engine, "DELETE FROM papers WHERE id = 1")
    settle(engine)
    assert content(engine) == {"3": {"lang": "fr"}}
    assert count_changes(engine) == 0


def test_a_changed_key_is_its_row_under_the_new_one_and_none_under_the_old(
    engine: Engine, followed: str
) -> None:
    run(engine, "INSERT INTO papers VALUES (1, 'one', 'de')")
    settle(engine)
    run(engine, "UPDATE papers SET id = 7")
    settle(engine)
    assert content(engine) == {"7": {"lang": "de"}}


def test_a_table_that_is_emptied_empties_the_collection_and_filled_again_fills_it(
    engine: Engine, followed: str
) -> None:
    run(engine, "INSERT INTO papers SELECT n, 'text ' || n, 'de' FROM generate_series(1, 700) AS n")
    settle(engine)
    assert len(content(engine)) == 700
    run(engine, "TRUNCATE papers", "INSERT INTO papers VALUES (5, 'five', 'en'), (701, 'new', 'en')")
    settle(engine)
    assert content(engine) == {"5": {"lang": "en"}, "701": {"lang": "en"}}
    run(engine, "TRUNCATE papers")
    settle(engine)
    assert content(engine) == {}


def test_a_transaction_that_commits_late_is_not_overlooked(engine: Engine, followed: str) -> None:
    with engine.connect() as late:
        late.execute(text("INSERT INTO papers VALUES (1, 'one', 'de')"))
        run(engine, "INSERT INTO papers VALUES (2, 'two', 'en')")  # a later id, an earlier COMMIT
        settle(engine)
        assert set(content(engine)) == {"2"}
        late.commit()
    settle(engine)
    assert set(content(engine)) == {"1", "2"}


def test_a_change_during_a_round_is_done_in_the_next(
    engine: Engine, followed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = opening.read_keys
    run(engine, "INSERT INTO papers VALUES (1, 'one', 'de')")

    def read_and_be_overtaken(*arguments: Any) -> Any:
        items = read(*arguments)
        monkeypatch.setattr(follower, "read_keys", read)
        run(engine, "UPDATE papers SET lang = 'en'")
        return items

    monkeypatch.setattr(follower, "read_keys", read_and_be_overtaken)
    settle(engine)
    assert content(engine) == {"1": {"lang": "en"}}


def test_of_two_followers_at_once_one_submits_a_change(engine: Engine, followed: str) -> None:
    run(engine, "INSERT INTO papers SELECT n, 'text ' || n, 'de' FROM generate_series(1, 50) AS n")
    together = threading.Barrier(3)

    def follow_once() -> None:
        together.wait()
        follow_collection(engine, Settings(), Registry({}), collection_id(engine))

    run_together(*3 * [follow_once])
    with engine.connect() as connection:
        jobs = connection.execute(
            text("SELECT num_items FROM vectormill.jobs WHERE state = 'queued'")
        ).scalars()
        assert list(jobs) == [50]
    settle(engine)
    assert len(content(engine)) == 50


def test_a_follower_whose_changes_another_has_taken_keeps_nothing(
    engine: Engine, followed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = opening.read_keys
    run(engine, "INSERT INTO papers VALUES (1, 'one', 'de')")

    def read_and_lose(*arguments: Any) -> Any:
        run(engine, "DELETE FROM vectormill.source_changes")
        return read(*arguments)

    monkeypatch.setattr(follower, "read_keys", read_and_lose)
    assert not follow_collection(engine, Settings(), Registry({}), collection_id(engine))
    with engine.connect() as connection:
        left = text("SELECT count(*) FROM vectormill.jobs WHERE state NOT IN ('completed', 'deleting')")
        assert connection.execute(left).scalar_one() == 0


def test_the_changes_of_a_source_that_cannot_be_read_wait(engine: Engine, followed: str) -> None:
    run(
        engine,
        "INSERT INTO papers VALUES (1, 'one', 'de')",
        "ALTER TABLE papers RENAME COLUMN body TO content",
    )
    with pytest.raises(SourceFailed, match="body"):
        follow_collection(engine, Settings(), Registry({}), collection_id(engine))
    assert count_changes(engine) == 1
    run(engine, "ALTER TABLE papers RENAME COLUMN content TO body")
    settle(engine)
    assert set(content(engine)) == {"1"}


def test_while_its_last_job_is_open_nothing_more_is_submitted(engine: Engine, followed: str) -> None:
    for number in (1, 2):
        run(engine, f"INSERT INTO papers VALUES ({number}, 'text', 'de')")
        follow_collection(engine, Settings(), Registry({}), collection_id(engine))
    assert count_changes(engine) == 1
    settle(engine)
    assert set(content(engine)) == {"1", "2"}


def paragraphs(*words: str) -> str:
    return "\n\n".join(word * 30 for word in words)


def test_a_changed_document_replaces_exactly_its_own_passages(engine: Engine, papers: str) -> None:
    set_source(engine, split={"by": "paragraphs", "min_chars": 20, "max_chars": 200})
    follow(engine)
    run(
        engine,
        f"INSERT INTO papers VALUES (1, '{paragraphs('abcd ', 'efgh ', 'ijkl ')}', 'de'),"
        f" (2, '{paragraphs('mnop ', 'qrst ')}', 'en')",
    )
    settle(engine)
    assert set(content(engine)) == {"1#0", "1#1", "1#2", "2#0", "2#1"}
    run(engine, f"UPDATE papers SET body = '{paragraphs('uvwx ')}' WHERE id = 1")
    settle(engine)
    assert set(content(engine)) == {"1#0", "2#0", "2#1"}
    run(engine, "DELETE FROM papers WHERE id = 2")
    settle(engine)
    assert set(content(engine)) == {"1#0"}
    run(engine, "TRUNCATE papers")
    settle(engine)
    assert content(engine) == {}


def test_text_keys_of_any_kind_come_through(engine: Engine, papers: str) -> None:
    run(engine, 'CREATE TABLE public."Odd.Table" ("the ""Key""" text, body text)')
    set_source(
        engine,
        'SELECT "the ""Key""", body FROM "Odd.Table" -- all of it',
        key='the "Key"',
        metadata=[],
    )
    assert str(follow(engine)) == "public.Odd.Table"
    keys = ['a"b', "c\\d", "e'f", "{g,h}", "NULL", "ü %s", " ", "i{}"]
    with engine.begin() as connection:
        for key in keys:
            connection.execute(text("INSERT INTO \"Odd.Table\" VALUES (:key, 'text')"), {"key": key})
        connection.execute(text("INSERT INTO \"Odd.Table\" VALUES (NULL, 'no key'), ('', 'an empty one')"))
    assert count_changes(engine) == len(keys)
    settle(engine)
    assert set(content(engine)) == set(keys)
    assert write_array(["a"]) == '{"a"}'


def test_a_follower_follows_by_itself_and_survives_what_it_cannot_read(
    engine: Engine, followed: str, database_url: str
) -> None:
    with Follower(database_url, Settings(), Registry({})):
        run(engine, "INSERT INTO papers VALUES (1, 'one', 'de')")
        wait_for(lambda: count_changes(engine) == 0)
        encode_waiting(engine)
        assert set(content(engine)) == {"1"}


FILL = """
    INSERT INTO vectormill.source_changes (collection_id, key)
    SELECT 1 + n % 5, 'k' || n FROM generate_series(1, 50000) AS n
"""


def test_changes_are_found_and_removed_by_their_indexes_among_many(engine: Engine, followed: str) -> None:
    run(engine, FILL, "ANALYZE vectormill.source_changes")
    with engine.connect() as connection:
        for statement, values in (
            (LIST_CHANGED_COLLECTIONS, {}),
            (LIST_CHANGES, {"collection_id": 1, "limit": 100}),
            (REMOVE_CHANGES, {"ids": list(range(100))}),
        ):
            plan = "\n".join(connection.execute(text(f"EXPLAIN {statement.text}"), values).scalars())
            assert "Seq Scan" not in plan, plan


def test_rows_of_keys_are_read_by_the_index_of_the_table(engine: Engine, followed: str) -> None:
    run(
        engine,
        "INSERT INTO papers SELECT n, 'text', 'de' FROM generate_series(1, 20000) AS n",
        "ANALYZE papers",
    )
    keys = sql.Literal(write_array(["1", "2"])).as_string(None)
    query = write_look_up(Source("sql", {"query": QUERY, "key": "id"}), keys)
    plan = "\n".join(execute(engine, f"EXPLAIN {query}").scalars())
    assert "papers_pkey" in plan
    assert "Seq Scan" not in plan


def test_a_collection_whose_lock_is_not_had_leaves_the_others_their_turn(
    engine: Engine, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[int] = []

    def follow_one(engine: Engine, settings: Settings, registry: Registry, collection_id: int) -> bool:
        followed.append(collection_id)
        if collection_id == 1:
            raise OperationalError("DELETE", {}, LockNotAvailable("canceling statement due to lock timeout"))
        return False

    monkeypatch.setattr(follower, "list_changed_collections", lambda connection: [1, 2])
    monkeypatch.setattr(follower, "follow_collection", follow_one)
    changes = Follower(database_url, Settings(), Registry({}), clock=lambda: 0.0)
    changes.step()
    changes.step()
    changes._engine.dispose()
    assert followed == [1, 2, 2]


def test_a_row_whose_new_text_cannot_be_encoded_loses_its_former_vector_and_its_job_stays(
    engine: Engine, followed: str, database_url: str
) -> None:
    run(engine, "INSERT INTO papers VALUES (1, 'one', 'de'), (2, 'two', 'en')")
    settle(engine)
    run(engine, "UPDATE papers SET body = '' WHERE id = 1")
    settle(engine)
    make_old = (
        "UPDATE vectormill.jobs SET finished_at = now() - interval '1 day' WHERE finished_at IS NOT NULL"
    )
    run(engine, make_old)
    ask(engine, discard_ended_puts)
    assert set(content(engine)) == {"1", "2"}
    changes = Follower(database_url, Settings(), Registry({}))
    changes.step()
    changes._engine.dispose()
    assert set(content(engine)) == {"2"}
    with engine.begin() as connection:
        discard_ended_puts(connection)
        statement = (
            "SELECT num_failed FROM vectormill.jobs WHERE metadata ? 'changes_of' AND state <> 'deleting'"
        )
        kept = connection.execute(text(statement))
        assert kept.scalars().all() == [1]


def test_unfollowed_a_table_has_no_trigger_and_no_change_waits(engine: Engine, followed: str) -> None:
    run(engine, "INSERT INTO papers VALUES (1, 'one', 'de')")
    with engine.begin() as connection:
        assert [str(table) for table in unfollow_table(connection, "docs")] == ["public.papers"]
    run(engine, "INSERT INTO papers VALUES (2, 'two', 'de')", "TRUNCATE papers")
    with engine.connect() as connection:
        assert list_followed_tables(connection, collection_id(engine)) == []
        triggers = text("SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'vectormill%'")
        assert connection.execute(triggers).scalar_one() == 0
    assert count_changes(engine) == 0


@pytest.mark.parametrize(
    ("change", "insertion"),
    [
        ("ALTER TABLE papers RENAME COLUMN id TO number", "INSERT INTO papers VALUES (2, 'two', 'de')"),
        ("ALTER TABLE papers DROP COLUMN id", "INSERT INTO papers VALUES ('two', 'de')"),
    ],
)
def test_the_table_can_be_written_though_the_column_of_its_keys_is_gone(
    engine: Engine, followed: str, change: str, insertion: str
) -> None:
    run(engine, "INSERT INTO papers VALUES (1, 'one', 'de')", change)
    run(engine, insertion, "UPDATE papers SET body = 'three'", "DELETE FROM papers", "TRUNCATE papers")
    with engine.connect() as connection:
        noted = connection.execute(text("SELECT key FROM vectormill.source_changes ORDER BY id"))
        assert noted.scalars().all() == ["1", "", "", "", ""]  # the empty key is the whole table


def test_to_follow_twice_changes_nothing(engine: Engine, followed: str) -> None:
    assert follow(engine) == FollowedTable("public", "papers", "id")
    run(engine, "INSERT INTO papers VALUES (1, 'one', 'de')")
    assert count_changes(engine) == 1


def test_with_its_collection_the_triggers_of_a_table_go(engine: Engine, followed: str) -> None:
    run(engine, "INSERT INTO papers VALUES (1, 'one', 'de')")
    remove_collection(engine, "docs")
    with engine.connect() as connection:
        triggers = text("SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'vectormill%'")
        assert connection.execute(triggers).scalar_one() == 0
    assert count_changes(engine) == 0


def test_the_table_of_a_collection_that_is_gone_can_be_written_as_before(
    engine: Engine, followed: str
) -> None:
    number = collection_id(engine)
    run(engine, "DROP VIEW docs", "DELETE FROM vectormill.collections WHERE name = 'docs'")
    run(engine, "INSERT INTO papers VALUES (1, 'one', 'de')", "TRUNCATE papers")
    assert not follow_collection(engine, Settings(), Registry({}), number)
    assert count_changes(engine) == 0


@pytest.fixture
def writer(admin: Engine, papers: str) -> Iterator[Connection]:
    """A connection of a role that may write `papers`, and has no right on anything of ours."""
    run(
        admin,
        "DROP ROLE IF EXISTS papers_writer",
        "CREATE ROLE papers_writer",
        "GRANT USAGE ON SCHEMA public TO papers_writer",
        "GRANT ALL ON public.papers TO papers_writer",
    )
    try:
        with admin.connect() as connection:
            connection.execute(text("SET ROLE papers_writer"))
            yield connection
            connection.invalidate()
    finally:
        run(admin, "DROP OWNED BY papers_writer", "DROP ROLE papers_writer")


def test_whoever_writes_the_table_needs_no_right_on_what_is_ours(
    engine: Engine, papers: str, writer: Connection
) -> None:
    writer.commit()
    follow(engine)
    writer.execute(text("INSERT INTO papers VALUES (1, 'one', 'de')"))
    writer.execute(text("UPDATE papers SET lang = 'en'"))
    writer.execute(text("DELETE FROM papers"))
    writer.execute(text("TRUNCATE papers"))
    writer.commit()
    assert count_changes(engine) == 4
    for forbidden in (
        "SELECT 1 FROM vectormill.source_changes",
        "CREATE TRIGGER own AFTER INSERT ON papers FOR EACH STATEMENT"
        " EXECUTE FUNCTION vectormill.note_changes('1', 'id')",
    ):
        with pytest.raises(Exception, match="permission denied"):
            writer.execute(text(forbidden))
        writer.rollback()


def test_without_the_right_to_make_triggers_the_owner_is_told_what_to_say(admin: Engine, papers: str) -> None:
    run(
        admin,
        "DROP ROLE IF EXISTS mill",
        "CREATE ROLE mill",
        "GRANT USAGE ON SCHEMA vectormill TO mill",
        "GRANT ALL ON ALL TABLES IN SCHEMA vectormill TO mill",
        "GRANT SELECT ON papers TO mill",
        "GRANT EXECUTE ON FUNCTION vectormill.note_changes() TO mill",
    )
    try:
        with admin.connect() as connection:
            connection.execute(text("SET ROLE mill"))
            with pytest.raises(Conflict, match=r"GRANT TRIGGER ON public\.papers"):
                follow_table(connection, "docs")
            connection.invalidate()
    finally:
        run(admin, "DROP OWNED BY mill", "DROP ROLE mill")


def test_what_cannot_be_followed_is_refused_with_the_reason(engine: Engine, papers: str) -> None:
    run(
        engine,
        "CREATE TABLE public.other (id bigint)",
        "CREATE VIEW public.seen_papers AS SELECT * FROM papers",
    )
    cases: list[tuple[str, dict[str, str], str]] = [
        ("SELECT id::text AS id, body, lang FROM papers", {}, "is computed"),
        (
            "SELECT papers.id, body, lang FROM papers JOIN other ON other.id = papers.id",
            {},
            "reads public.other",
        ),
        ("SELECT id, body, lang FROM seen_papers", {}, "public.seen_papers is not a table"),
        ("SELECT id, body, lang FROM papers", {"table": "nothing"}, "no table 'nothing'"),
        ("SELECT id, body, lang FROM papers", {"table": "a.b.c.d"}, r"no table 'a\.b\.c\.d'"),
        ("SELECT id, body, lang FROM papers", {"table": "\0"}, "no table"),
        ("SELECT id, body, lang FROM papers", {"key_column": "nothing"}, "no column 'nothing'"),
        ("SELECT id, body FROM gone", {}, '"gone" does not exist'),
        ("SELECT 1 AS id) AS x; DROP TABLE papers; SELECT * FROM (SELECT 1 AS id", {}, "multiple commands"),
    ]
    for query, named, said in cases:
        set_source(engine, query)
        with engine.begin() as connection, pytest.raises(InvalidOption, match=said):
            follow_table(connection, "docs", **named)
        run(engine, "SELECT count(*) FROM papers")


def test_a_computed_key_and_a_join_are_followed_by_name(engine: Engine, papers: str) -> None:
    run(engine, "CREATE TABLE public.other (id bigint)", "INSERT INTO other VALUES (1)")
    set_source(
        engine,
        "SELECT papers.id::text AS id, body, lang FROM papers JOIN other ON other.id = papers.id",
    )
    assert follow(engine, table="papers", key_column="id") == FollowedTable("public", "papers", "id")
    run(engine, "INSERT INTO papers VALUES (1, 'one', 'de'), (2, 'two', 'de')")
    settle(engine)
    assert set(content(engine)) == {"1"}


def test_a_query_whose_columns_have_the_names_that_are_meant_without_any_is_followed(
    engine: Engine, papers: str
) -> None:
    run(
        engine,
        "UPDATE vectormill.sources SET options = jsonb_build_object('query', "
        "'SELECT papers.id AS key, body AS text FROM papers')",
    )
    assert follow(engine) == FollowedTable("public", "papers", "id")
    run(engine, "INSERT INTO papers VALUES (1, 'one', 'de'), (2, 'two', 'de')")
    settle(engine)
    assert set(content(engine)) == {"1", "2"}


def test_a_source_elsewhere_and_none_are_refused(engine: Engine, papers: str) -> None:
    set_source(engine, url_env="PAPERS_URL")
    for name, error in (("docs", InvalidOption), ("nothing", CollectionNotFound)):
        with engine.begin() as connection, pytest.raises(error):
            follow_table(connection, name)
    run(engine, "DELETE FROM vectormill.sources")
    with engine.begin() as connection, pytest.raises(SourceNotFound):
        follow_table(connection, "docs")


def test_a_partitioned_table_is_followed_at_its_root(engine: Engine, papers: str) -> None:
    run(
        engine,
        "CREATE TABLE public.parts (id bigint, body text, lang text) PARTITION BY HASH (id)",
        "CREATE TABLE public.parts_0 PARTITION OF parts FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
        "CREATE TABLE public.parts_1 PARTITION OF parts FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
    )
    set_source(engine, "SELECT id, body, lang FROM parts")
    assert follow(engine, table="parts") == FollowedTable("public", "parts", "id")
    run(engine, "INSERT INTO parts VALUES (1, 'one', 'de'), (2, 'two', 'de')")
    settle(engine)
    assert set(content(engine)) == {"1", "2"}
