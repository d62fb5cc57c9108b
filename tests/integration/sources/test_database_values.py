"""Every value of a database arrives: as its driver reads it, or as the database itself writes it."""

import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql
from psycopg.types.json import set_json_loads
from sqlalchemy import Connection, Engine

from tests.database import execute
from vectormill.db.session import driver_of
from vectormill.models.registry import Registry
from vectormill.settings import Settings
from vectormill.sources.opening import open_source
from vectormill.sources.reader import SourcePlace
from vectormill.sources.source import SQL, Source
from vectormill.sources.sql import streaming

DAYS = st.one_of(
    st.sampled_from(
        ["infinity", "-infinity", "4713-01-01 BC", "0044-03-15 BC", "0001-01-01", "9999-12-31", "10000-01-01"]
    ),
    st.dates().map(str),
)
TIMES = st.one_of(st.sampled_from(["24:00:00", "00:00:00", "23:59:59.999999"]), st.times().map(str))
ZONES = st.sampled_from(["+00", "-12", "+14", "+05:45", "+01:23:45"])
MOMENTS = st.one_of(DAYS, st.datetimes().map(str))
INTERVALS = st.one_of(
    st.sampled_from(
        ["infinity", "1 mon", "-1 year", "178000000 years", "1 day -00:00:01", "2000000000 days"]
    ),
    st.timedeltas().map(
        lambda length: f"{length.days} days {length.seconds} seconds {length.microseconds} us"
    ),
)
NUMBERS = st.one_of(
    st.sampled_from(["NaN", "Infinity", "-Infinity", "1e300", "-0", "1.50"]),
    st.decimals(allow_nan=False, allow_infinity=False).map(str),
)
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
JSON = st.one_of(
    st.sampled_from(
        ["1e400", '{"a": 1e999}', '"\\ud800"', "[" * 3000 + "]" * 3000, "123456789012345678901234567890"]
    ),
    st.sampled_from(['{"b": 1, "a": [null, true]}', "null", '"x"']),
)
LITERALS: dict[str, st.SearchStrategy[str]] = {
    "date": DAYS,
    "time": TIMES,
    "timetz": st.tuples(TIMES, ZONES).map("".join),
    "timestamp": MOMENTS,
    "timestamptz": MOMENTS,
    "interval": INTERVALS,
    "numeric": NUMBERS,
    "float8": st.floats().map(str),
    "json": JSON,
    "jsonb": st.sampled_from(['{"b": 1, "a": [null, true]}', "[1e400]", "null"]),
    "money": st.sampled_from(["0", "-92233720368547758.08", "12.34"]),
    "text": WORDS,
    "bytea": st.binary(max_size=8).map(lambda held: "\\x" + held.hex()),
    "inet": st.one_of(st.ip_addresses().map(str), st.sampled_from(["::ffff:1.2.3.4", "10.0.0.1/24"])),
    "cidr": st.sampled_from(["10.0.0.0/8", "::/0", "::ffff:1.2.3.0/120"]),
    "macaddr": st.sampled_from(["08:00:2b:01:02:03"]),
    "point": st.sampled_from(["(1,2)", "(NaN,Infinity)"]),
    "bit(4)": st.sampled_from(["0101"]),
    "mood": st.sampled_from(["glad", "sad"]),
    "pair": st.sampled_from(["(1,x)", '(,"a ""b"", c")']),
    "int4range": st.sampled_from(["empty", "[1,5)", "(,)", "[3,]"]),
    "tstzrange": st.tuples(MOMENTS).map(lambda ends: f'["{ends[0]}",)'),
    "datemultirange": st.sampled_from(["{}", "{[0044-03-15 BC,2000-01-01),[9999-12-31,infinity)}"]),
    "hstore": st.sampled_from(["a=>1, b=>NULL"]),
}  # fmt: skip
# Where Postgres writes more than psycopg's value holds, or otherwise.
SAID_BY_POSTGRES = {"inet", "cidr", "int4range", "tstzrange", "datemultirange"}


@pytest.fixture
def types(engine: Engine) -> Engine:
    for statement in (
        "CREATE TYPE mood AS ENUM ('glad', 'sad')",
        "CREATE TYPE pair AS (number int, word text)",
        "CREATE EXTENSION IF NOT EXISTS hstore",
    ):
        execute(engine, statement)
    return engine


def open_query(engine: Engine, query: str, **options: object) -> Any:
    place = SourcePlace(engine, Settings(), Registry({}), collection="docs")
    return open_source(Source(SQL, {"query": query, "key": "id", "text": "body", **options}), place)


def read_as_psycopg(connection: Connection, type_name: str, written: str) -> Any:
    """Return a value as psycopg alone reads it, or as Postgres writes it if psycopg cannot or its value holds less."""
    driver = driver_of(connection).cursor()
    set_json_loads(msgspec.json.decode, driver)
    query = sql.SQL("SELECT CAST({} AS {})").format(sql.Literal(written), sql.SQL(type_name))
    with connection.begin_nested():
        try:
            ((value,),) = driver.execute(query)
        except (psycopg.DataError, psycopg.NotSupportedError, ValueError, OverflowError, RecursionError):
            return written
    has_months = isinstance(value, timedelta) and ("mon" in written or "year" in written)
    return written if has_months or type_name in SAID_BY_POSTGRES else value


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_value_is_as_psycopg_reads_it_or_else_as_postgres_writes_it(
    types: Engine, data: st.DataObject
) -> None:
    type_name = data.draw(st.sampled_from(sorted(LITERALS)), "type")
    literals = data.draw(st.lists(LITERALS[type_name], min_size=1, max_size=5), "literals")
    rows = sql.SQL(", ").join(
        sql.SQL("({}, 'a text', CAST({} AS {}))").format(number, literal, sql.SQL(type_name))
        for number, literal in enumerate(literals)
    )
    query = sql.SQL("SELECT * FROM (VALUES {}) AS made (id, body, value)").format(rows).as_string(None)
    with types.begin() as connection:
        written = list(driver_of(connection).execute(f"SELECT concat(value) FROM ({query}) AS made"))
        expected = [read_as_psycopg(connection, type_name, each) for (each,) in written]
        with streaming(connection, query) as (_, fetch):
            values = [value for _, _, value in fetch(10)]
        whole = f"SELECT array_agg(value), concat(array_agg(value)) FROM ({query}) AS made"
        with streaming(connection, whole) as (_, fetch):
            ((array, array_text),) = fetch(1)
    assert list(map(repr, values)) == list(map(repr, expected))
    assert array == array_text or list(map(repr, array)) == list(map(repr, expected))
    keys = [item.key for batch in open_query(types, query, metadata=["value"]).read() for item in batch]
    assert keys == list(map(str, range(len(literals))))


def test_texts_of_a_database_that_knows_no_encoding_arrive(
    engine: Engine, admin: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with admin.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(
            "CREATE DATABASE no_encoding ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0"
        )
    url = admin.url.set(database="no_encoding").render_as_string(hide_password=False)
    monkeypatch.setenv("OTHER_URL", url)
    query = r"""
        SELECT id, convert_from(body, 'SQL_ASCII') AS body, body AS held
          FROM (VALUES (1, '\xff'::bytea), (2, 'ü'::bytea), (3, 'ok')) AS made (id, body)
    """
    try:
        texts = dict(read_texts(engine, query))
    finally:
        with admin.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("DROP DATABASE no_encoding WITH (FORCE)")
    assert (list(texts), texts["2"], texts["3"]) == (["1", "2", "3"], "ü".encode(), b"ok")
    assert is_broken(texts["1"])


def test_a_broken_text_of_sqlite_fails_alone(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(sqlite3.connect(tmp_path / "texts.db")) as connection:
        connection.execute("CREATE TABLE texts (id INTEGER, body TEXT)")
        connection.execute(
            "INSERT INTO texts VALUES (1, 'ü'), (2, CAST(x'6aff' AS TEXT)), (3, x'6aff'), (4, 5.5)"
        )
        connection.commit()
    monkeypatch.setenv("OTHER_URL", f"sqlite:///{tmp_path}/texts.db")
    texts = dict(read_texts(engine, "SELECT id, body FROM texts"))
    assert list(texts) == ["1", "2", "3", "4"]
    assert (texts["1"], texts["4"]) == ("ü".encode(), b"5.5")
    assert is_broken(texts["2"])
    assert is_broken(texts["3"])


def is_broken(text: bytes) -> bool:
    return "\ufffd" in text.decode("utf-8", "replace")


def read_texts(engine: Engine, query: str) -> list[tuple[str, bytes]]:
    reader = open_query(engine, query, url_env="OTHER_URL")
    return [(item.key, item.text) for batch in reader.read() for item in batch]


def test_vectors_are_read_beside_values_of_every_type(types: Engine) -> None:
    kinds = {"halfvec": ">f2", "vector": ">f4"}
    for kind, wire in kinds.items():
        query = f"""
            SELECT 1 AS id, CAST('[1,2]' AS {kind}) AS body, timestamp 'infinity' AS at, money '1.50' AS price,
                   CAST('glad' AS mood) AS mood, CAST('(1,x)' AS pair) AS pair
        """
        reader = open_query(types, query, metadata=["at", "price", "mood", "pair"])
        (values,) = reader.read_columns(10)
        assert np.frombuffer(values["body"][0][4:], wire).tolist() == [1, 2]
        assert [values[name] for name in ("at", "price", "mood", "pair")] == [
            ("infinity",), ("$1.50",), ("glad",), ("(1,x)",)
        ]  # fmt: skip


def test_moments_are_read_whatever_style_a_role_has(types: Engine) -> None:
    execute(
        types,
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET DateStyle = German', current_database()); END $$",
    )
    types.dispose()
    (batch,) = open_query(
        types, "SELECT 1 AS id, 'x' AS body, date '2026-02-01' AS day", metadata=["day"]
    ).read()
    assert batch[0].metadata == b'{"day":"2026-02-01"}'
