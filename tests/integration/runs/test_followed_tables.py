"""Triggers on a user's own table: which can have them, who may, and that nothing of them is left."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, Engine, text

from indexer.follower import follow_collection
from tests.papers import (
    collection_id,
    content,
    count_changes,
    follow,
    run,
    set_source,
    settle,
)
from vectormill.collections.removals import remove_collection
from vectormill.domain.errors import CollectionNotFound, Conflict, InvalidOption, SourceNotFound
from vectormill.models.registry import Registry
from vectormill.settings import Settings
from vectormill.sources.following import (
    FollowedTable,
    follow_table,
    list_followed_tables,
    unfollow_table,
)


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
def writer(engine: Engine, papers: str, database_url: str) -> Iterator[Connection]:
    """A connection of a role that may write `papers`, and has no right on anything of ours."""
    run(
        engine,
        "DROP ROLE IF EXISTS papers_writer",
        "CREATE ROLE papers_writer",
        "GRANT USAGE ON SCHEMA public TO papers_writer",
        "GRANT ALL ON public.papers TO papers_writer",
    )
    try:
        with engine.connect() as connection:
            connection.execute(text("SET ROLE papers_writer"))
            yield connection
            connection.invalidate()
    finally:
        run(engine, "DROP OWNED BY papers_writer", "DROP ROLE papers_writer")


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


def test_without_the_right_to_make_triggers_the_owner_is_told_what_to_say(
    engine: Engine, papers: str, database_url: str
) -> None:
    run(
        engine,
        "DROP ROLE IF EXISTS mill",
        "CREATE ROLE mill",
        "GRANT USAGE ON SCHEMA vectormill TO mill",
        "GRANT ALL ON ALL TABLES IN SCHEMA vectormill TO mill",
        "GRANT SELECT ON papers TO mill",
        "GRANT EXECUTE ON FUNCTION vectormill.note_changes() TO mill",
    )
    try:
        with engine.connect() as connection:
            connection.execute(text("SET ROLE mill"))
            with pytest.raises(Conflict, match=r"GRANT TRIGGER ON public\.papers"):
                follow_table(connection, "docs")
            connection.invalidate()
    finally:
        run(engine, "DROP OWNED BY mill", "DROP ROLE mill")


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
        ("SELECT id, body, lang FROM seen_papers", {}, "public.seen_papers is no table"),
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
