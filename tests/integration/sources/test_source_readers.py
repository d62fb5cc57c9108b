"""Sources that Postgres itself is asked for: queries, pushes, and what a collection keeps."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text

from tests.database import execute
from tests.protocol import claim_next, complete, make_items, submit
from vectormill.domain.errors import InvalidOption, SourceFailed, SourceInterrupted
from vectormill.jobs.item import Item
from vectormill.models.registry import Registry
from vectormill.settings import Settings
from vectormill.sources.opening import find_present, open_source
from vectormill.sources.reader import Reader, SourcePlace
from vectormill.sources.source import OWN_TEXTS, PUSH, SQL, Source
from vectormill.sources.sources import save_source
from vectormill.sources.sql import SqlReader

QUERY = {"key": "id", "text": "body"}


@pytest.fixture
def place(engine: Engine) -> SourcePlace:
    return SourcePlace(engine, Settings(), Registry({}), collection="docs")


def read_all(reader: Reader) -> list[Item]:
    return [item for batch in reader.read() for item in batch]


def open_query(place: SourcePlace, query: str, **options: object) -> Reader:
    return open_source(Source(SQL, {"query": query, **QUERY, **options}), place)


def test_a_query_of_our_own_postgres_gives_its_rows_in_order_with_canonical_metadata(
    place: SourcePlace,
) -> None:
    reader = open_query(
        place,
        """
        SELECT 7 AS id, 'one: 100 % of \\"it\\"' AS body, 'de' AS lang, 1.50::numeric AS price,
               '2026-01-02 03:04:05+00'::timestamptz AS at, '{"b": 1, "a": [true]}'::jsonb AS more, NULL AS none,
               '5c5f7d1e-0000-4000-8000-000000000000'::uuid AS owner;
        """,
        metadata=["price", "lang", "at", "more", "none", "owner"],
    )
    (item,) = read_all(reader)
    assert item.key == "7"
    assert item.text == b'one: 100 % of \\"it\\"'
    assert item.metadata == (
        b'{"at":"2026-01-02T03:04:05Z","lang":"de","more":{"a":[true],"b":1},"none":null,'
        b'"owner":"5c5f7d1e-0000-4000-8000-000000000000","price":1.50}'
    )
    assert not reader.complaints


def test_a_column_of_json_is_the_metadata_itself_whether_json_or_text(place: SourcePlace) -> None:
    as_json = open_query(
        place, """SELECT 'a' AS id, 'x' AS body, '{"b":2,"a":1}'::jsonb AS m""", metadata_json="m"
    )
    as_text = open_query(
        place, """SELECT 'a' AS id, 'x' AS body, '{"b": 2, "a": 1}' AS m""", metadata_json="m"
    )
    assert read_all(as_json) == read_all(as_text) == [Item("a", b"x", b'{"a":1,"b":2}')]


def test_a_number_that_json_has_no_word_for_is_null_in_the_metadata(place: SourcePlace) -> None:
    reader = open_query(
        place,
        """
        SELECT 'a' AS id, 'x' AS body, 'NaN'::numeric AS price, '-Infinity'::float8 AS heat, 'NaN' AS word,
               ARRAY[1.5, 'Infinity']::numeric[] AS range
        """,
        metadata=["price", "heat", "word", "range"],
    )
    (item,) = read_all(reader)
    assert item.metadata == b'{"heat":null,"price":null,"range":[1.5,null],"word":"NaN"}'


def test_a_query_that_fails_midway_says_so_in_the_words_of_the_database(place: SourcePlace) -> None:
    query = "SELECT n AS id, (1 / (5000 - n))::text AS body FROM generate_series(1, 10000) AS n"
    batches = open_query(place, query).read()
    assert len(next(batches)) == 256
    with pytest.raises(SourceFailed, match="division by zero"):
        list(batches)


def test_what_cannot_be_read_is_refused_with_its_reason(place: SourcePlace) -> None:
    cases: list[tuple[str, str]] = [
        ("SELECT 1 AS id", "no column 'body'; its columns are 'id'"),
        ("SELECT NULL AS id, 'x' AS body", "row 1: the key is null"),
        ("SELECT 1.5::float8 AS id, 'x' AS body", "the key must be text or a whole number"),
        ("SELECT 'a' AS id, 'x' AS body FROM generate_series(1, 2)", "duplicate key 'a'"),
        ("SELECT * FROM nowhere", 'relation "nowhere" does not exist'),
        ("DELETE FROM vectormill.jobs RETURNING id, state AS body", "read-only transaction|syntax error"),
        (
            "SELECT 1 AS id, 'x' AS body; COMMIT; DROP TABLE vectormill.jobs",
            "cannot insert multiple commands",
        ),
    ]
    for query, said in cases:
        with pytest.raises(SourceFailed, match=said):
            read_all(open_query(place, query))
        assert execute(place.engine, "SELECT to_regclass('vectormill.jobs')").scalar_one() is not None


ESCAPES = {
    "after": "SELECT 'a' AS id, 'b' AS body; COMMIT; DROP TABLE victim; SELECT 1",
    "from within": "SELECT 'a' AS id, 'b' AS body) AS source; COMMIT; DROP TABLE victim; "
    "SELECT source.id, source.body FROM (SELECT 'a' AS id, 'b' AS body",
}
WAYS: dict[str, Callable[[SqlReader], object]] = {
    "read": read_all,
    "columns": lambda reader: list(reader.read_columns(10)),
    "type of the key": SqlReader.describe_key,
    "planned rows": SqlReader.count_rows,
    "sample": lambda reader: reader.thin(1),
}


def test_no_way_of_asking_a_query_runs_a_second_statement(place: SourcePlace) -> None:
    execute(place.engine, "CREATE TABLE victim AS SELECT 1 AS a")
    for (way, ask), (escape, query), pages in product(WAYS.items(), ESCAPES.items(), (False, True)):
        reader = open_query(place, query, pages=pages)
        assert isinstance(reader, SqlReader)
        with pytest.raises(SourceFailed, match=r"cannot insert multiple commands|syntax error"):
            ask(reader)
        found = execute(place.engine, "SELECT to_regclass('victim')").scalar_one()
        assert found == "victim", (way, escape, pages)


def test_pairs_that_share_their_first_text_are_counted_as_different(place: SourcePlace) -> None:
    query = """
        SELECT n AS id, 'question ' || n % 50 AS body, nullif(n / 50 % 90, 0) AS answer
          FROM generate_series(0, 4999) AS n
    """
    for options, num_distinct in (({}, 50), ({"text_pair": "answer"}, 50 * 90)):
        reader = open_query(place, query, **options)
        assert isinstance(reader, SqlReader)
        assert reader.thin(10) == (5000, num_distinct)


ARTICLES = """
    CREATE TABLE articles (
        id {type}, body text GENERATED ALWAYS AS ('text ' || id::text) STORED, lang text DEFAULT 'de'
    )
"""


@pytest.mark.parametrize(
    ("type", "made"),
    [
        ("bigint", "n - 300"),
        ("text", "'k' || n"),
        ("uuid", "CAST(md5(CAST(n AS text)) AS uuid)"),
        ("numeric", "n * 1.5"),
    ],
)
def test_pages_have_the_rows_of_the_query_in_the_order_of_their_keys(
    place: SourcePlace, type: str, made: str
) -> None:
    execute(place.engine, ARTICLES.format(type=type))
    execute(place.engine, f"INSERT INTO articles SELECT {made} FROM generate_series(1, 700) AS n")
    paged, whole = (
        open_query(place, "SELECT * FROM articles -- all", metadata=["lang"], pages=pages)
        for pages in (True, False)
    )
    items = read_all(paged)
    assert len(items) == 700
    assert {item.key: item for item in items} == {item.key: item for item in read_all(whole)}
    ordered = (
        execute(place.engine, "SELECT CAST(id AS text) FROM articles ORDER BY articles.id").scalars().all()
    )
    assert [item.key for item in items] == ordered


NUMBERS = "CREATE TABLE articles AS SELECT n AS id, 'x' AS body FROM generate_series(1, {count}) AS n"
HELD_BACK = text("""
    SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND pid <> pg_backend_pid()
       AND (backend_xmin IS NOT NULL OR xact_start IS NOT NULL)
""")


def test_nothing_is_held_back_between_two_pages(place: SourcePlace) -> None:
    execute(
        place.engine, "CREATE TABLE articles AS SELECT n AS id, 'x' AS body FROM generate_series(1, 600) AS n"
    )
    for pages, num_held in ((True, 0), (False, 1)):
        batches = open_query(place, "SELECT * FROM articles", pages=pages).read()
        assert len(next(batches)) == 256
        assert execute(place.engine, HELD_BACK).scalar_one() == num_held
        assert sum(map(len, batches)) == 344


def test_pages_refuse_what_one_reading_refuses(
    place: SourcePlace, sqlite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = "SELECT n AS id, 'x' AS body FROM generate_series(1, 256) AS n"
    cases = [
        (f"{numbers} UNION ALL SELECT 256, 'y'", "duplicate key '256'"),  # on two pages
        (f"{numbers} UNION ALL SELECT 255, 'y'", "duplicate key '255'"),
        (f"{numbers} UNION ALL SELECT NULL, 'y'", "row 257: the key is null"),
        ("SELECT NULL::int AS id, 'x' AS body", "row 1: the key is null"),
        ("SELECT 1 AS id", "no column 'body'"),
        ("SELECT 1 AS number, 'x' AS body", "column source.id does not exist"),
        ("SELECT 'x' AS body, 1 AS id; COMMIT", "syntax error"),
    ]
    for query, said in cases:
        with pytest.raises(SourceFailed, match=said):
            read_all(open_query(place, query, pages=True))
    monkeypatch.setenv("ARTICLES_URL", f"sqlite:///{sqlite_file}")
    with pytest.raises(SourceFailed, match="Only a query on Postgres"):
        read_all(open_query(place, "SELECT id, body FROM articles", url_env="ARTICLES_URL", pages=True))


def test_a_query_that_would_be_sorted_for_each_page_is_refused(
    place: SourcePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vectormill.sources.sql.MOST_SORTED_ROWS", 500)
    execute(place.engine, NUMBERS.format(count=10_000))
    execute(place.engine, "ANALYZE articles")
    paged = open_query(place, "SELECT * FROM articles", pages=True)
    with pytest.raises(
        SourceFailed, match=r"would sort about .* rows for each page: the query needs an index by 'id'"
    ):
        read_all(paged)
    execute(place.engine, "CREATE INDEX ON articles (id)")
    assert len(read_all(paged)) == 10_000


def test_a_source_is_asked_for_keys_of_any_form(place: SourcePlace) -> None:
    execute(
        place.engine, "CREATE TABLE articles AS SELECT n AS id, 'x' AS body FROM generate_series(1, 9) AS n"
    )
    source = Source(SQL, {"query": "SELECT * FROM articles;", **QUERY, "pages": True})
    asked = {"1", "9", "10", "007", "no number", 'a "quoted" \\ key', "99999999999999999999", "1#0"}
    assert find_present(source, place, asked) == {"1", "9"}


def test_a_row_with_a_fault_does_not_end_the_reading(place: SourcePlace) -> None:
    reader = open_query(
        place,
        """
        SELECT * FROM (VALUES ('a', 'one', '{}'), ('b', NULL, '{}'), ('', 'x', '{}'), (repeat('k', 2000), 'x', '{}'),
                              ('c', 'three', '[1]'), ('d', 'four', '{"x": "\\u0000"}'), ('e', 'five', '{"y":1}'))
                   AS t (id, body, m)
        """,
        metadata_json="m",
    )
    assert read_all(reader) == [
        Item("a", b"one", b"{}"),
        Item("b", b"", b"{}"),
        Item("c", b"three"),
        Item("d", b"four"),
        Item("e", b"five", b'{"y":1}'),
    ]
    told = reader.complaints.to_json()
    assert (told["num_left_out"], told["num_without_metadata"], told["num_without_text"]) == (2, 2, 1)
    assert len(told["examples"]) == 3


@pytest.fixture
def sqlite_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "articles.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE articles (id INTEGER PRIMARY KEY, body TEXT, lang TEXT)"))
        rows = [{"id": number, "body": f"text {number}", "lang": "de"} for number in range(1, 3001)]
        connection.execute(text("INSERT INTO articles VALUES (:id, :body, :lang)"), rows)
    yield path
    engine.dispose()


def test_another_database_is_reached_by_the_name_of_a_variable_or_file(
    place: SourcePlace, sqlite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARTICLES_URL", f"sqlite:///{sqlite_file}")
    (tmp_path / "secret").write_text(f"sqlite:///{sqlite_file}\n")
    query = "SELECT id, body, lang FROM articles ORDER BY id"
    by_name = open_query(place, query, url_env="ARTICLES_URL", metadata=["lang"])
    by_file = open_query(place, query, url_file=str(tmp_path / "secret"), metadata=["lang"])
    items = read_all(by_name)
    assert items == read_all(by_file)
    assert items[0] == Item("1", b"text 1", b'{"lang":"de"}')
    assert len(items) == 3000


def test_no_error_shows_what_opens_a_database(place: SourcePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[str | None, str]] = [
        (None, "ARTICLES_URL is not set"),
        ("pass word secret", "the variable ARTICLES_URL is not a database URL"),
        ("postgresql://u:s3cr%40t@127.0.0.1:1/x?password=s3cr%40t", "refused"),
        ("nosuch://u:s3cr%40t@h/x", "nosuch"),
        ("mysql://u:s3cr%40t@h/x", r"could write .* mysql\+pymysql"),
        ("mysql+pymysql://u:s3cr%40t@h/x", "'pymysql'"),
        ("postgresql+asyncpg://u:s3cr%40t@h/x", r"add postgresql\+asyncpg to VECTORMILL_UNGUARDED_SOURCES"),
        ("sqlite:////nowhere/secret.db", "unable to open"),
    ]
    for url, said in cases:
        monkeypatch.delenv("ARTICLES_URL", raising=False)
        if url is not None:
            monkeypatch.setenv("ARTICLES_URL", url)
        with pytest.raises(SourceFailed, match=said) as failure:
            read_all(open_query(place, "SELECT 1 AS id, 'x' AS body", url_env="ARTICLES_URL"))
        assert "s3cr" not in str(failure.value)
        assert "pass word" not in str(failure.value)
        assert failure.value.__cause__ is None


def test_options_that_do_not_fit_are_refused_before_anything_is_read(place: SourcePlace) -> None:
    cases: list[dict[str, object]] = [
        {"query": ""},
        {"query": "SELECT 1", **QUERY, "url": "postgresql://u:p@h/d"},
        {"query": "SELECT 1", **QUERY, "url_env": "A", "url_file": "b"},
        {"query": "SELECT 1", **QUERY, "metadata": ["a"], "metadata_json": "b"},
        {"query": "SELECT 1", **QUERY, "url_env": "postgresql://u:p@h/d"},
    ]
    for options in cases:
        with pytest.raises(InvalidOption):
            open_source(Source(SQL, options), place)


def make_collection(engine: Engine) -> None:
    submit(engine, make_items(1), collection="docs")
    with engine.begin() as connection:
        save_source(connection, "docs", Source(PUSH, {}))


def test_a_query_whose_connection_is_lost_may_be_read_again(place: SourcePlace, engine: Engine) -> None:
    query = "SELECT n AS id, repeat('x', 1000) AS body FROM generate_series(1, 100000) AS n"
    batches = open_query(place, query).read()
    next(batches)
    with engine.begin() as connection:
        ended = connection.execute(
            text("""
                SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity
                 WHERE datname = current_database() AND state = 'idle in transaction' AND pid <> pg_backend_pid()
            """)
        )
        assert ended.scalar_one() == 1
    with pytest.raises(SourceInterrupted):
        list(batches)


@pytest.mark.parametrize(
    ("source", "step"),
    [(Source(PUSH, {}), "pushes.load_part"), (Source(OWN_TEXTS, {}), "own_texts.read_pages")],
)
def test_what_is_kept_here_may_be_read_again_when_postgres_was_lost(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, source: Source, step: str
) -> None:
    make_collection(engine)
    execute(engine, "UPDATE vectormill.collections SET keep_text = true")

    def lose(*arguments: object, **named: object) -> None:
        raise psycopg.OperationalError("the connection is lost")

    monkeypatch.setattr(f"vectormill.sources.{step}", lose)
    here = SourcePlace(engine, Settings(), Registry({}), collection="docs", run_id=uuid4())
    with pytest.raises(SourceInterrupted, match="the connection is lost"):
        read_all(open_source(source, here))


def test_a_collection_that_keeps_no_texts_cannot_be_its_own_source(
    place: SourcePlace, engine: Engine
) -> None:
    with pytest.raises(SourceFailed, match="no collection 'docs'"):
        read_all(open_source(Source(OWN_TEXTS, {}), place))
    make_collection(engine)
    with pytest.raises(SourceFailed, match="does not store its texts"):
        read_all(open_source(Source(OWN_TEXTS, {}), place))


def test_a_collection_that_keeps_its_texts_gives_its_rows_as_they_are(
    place: SourcePlace, engine: Engine
) -> None:
    make_collection(engine)
    complete(engine, claim_next(engine))
    execute(engine, "UPDATE vectormill.collections SET keep_text = true")
    with pytest.raises(SourceFailed, match="no text for 'k0', which was written before"):
        read_all(open_source(Source(OWN_TEXTS, {}), place))
    items = [Item(f"k{number:03}", f"text {number}".encode(), b'{"n":%d}' % number) for number in range(300)]
    job = submit(engine, [Item("k0", b"again"), *items], collection="docs", chunk_max_items=1000)
    complete(engine, claim_next(engine))
    reader = open_source(Source(OWN_TEXTS, {}), place)
    assert read_all(reader) == [replace(item, place=job.seq) for item in (Item("k0", b"again"), *items)]


def test_a_collection_that_is_removed_while_its_texts_are_read_ends_the_reading(
    place: SourcePlace, engine: Engine
) -> None:
    make_collection(engine)
    with engine.begin() as connection:
        connection.execute(text("UPDATE vectormill.collections SET keep_text = true"))
        generation = connection.execute(text("SELECT id FROM vectormill.generations")).scalar_one()
        table = f"vectormill.generation_{generation}"
        numbers = "generate_series(1, 7000) AS n"
        vector = "array_fill(0.5, ARRAY[8])::halfvec"
        connection.execute(
            text(
                f"INSERT INTO {table} (key, content_hash, embedding, job_seq) "
                f"SELECT 'k' || n, ''::bytea, {vector}, 1 FROM {numbers}"
            )
        )
        connection.execute(
            text(
                f"INSERT INTO {table}_attributes (key, text, job_seq) SELECT 'k' || n, 'a text', 1 FROM {numbers}"
            )
        )
    batches = open_source(Source(OWN_TEXTS, {}), place).read()
    assert next(batches)[0] == Item("k1", b"a text", place=1)
    execute(engine, f"DROP TABLE {table} CASCADE")
    with pytest.raises(SourceFailed, match="'docs' was deleted or got a new generation"):
        list(batches)
