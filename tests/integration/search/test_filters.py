"""A filter means the same to Postgres as it does to Python, whatever the metadata and with any index."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from tests.database import execute
from tests.metadata_filters import fits
from vectormill.db.session import driver_of
from vectormill.search.filter import parse_filter
from vectormill.search.filter_sql import ANY_FIELD, compile_filter, define_filter_indexes

SCANS = ("seqscan", "indexscan", "bitmapscan")
FIELDS = ("a", "b", "a.a", "a.b", "b.a", "b.b")
NAMES = st.sampled_from("ab")
NUMBERS = [*range(-3, 4), 0.5, -0.0, 1.0, 1e20, -1e-20, 5e-324, -1e300]
# Of characters whose order is that of their code points in every collation.
STRINGS = ["", "a", "b", "ab", "1", "null"]
# An index has no value of more than 2,000 bytes, which include a sign and quotation marks. A filter of as few
# characters may have six times as many bytes, since JSON may escape each.
LONG_STRINGS = [
    character * (size // len(character.encode()))
    for character in ("a", "ä", "中")
    for size in (999, 1998, 1999, 9000)
]
LONG_NUMBERS = [sign * 10**size for sign in (1, -1) for size in (299, 1998, 1999, 2000, 4000)]
# Each of them is the value of some row, as an index has it and as it has not.
KINDS = [
    None,
    True,
    False,
    *NUMBERS,
    *STRINGS,
    *LONG_STRINGS,
    *LONG_NUMBERS,
    [],
    {},
    [1] * 1000,
    ["a" * 2001],
]
EVERY_KIND = [None, {}, *({"a": kind} for kind in KINDS), *({"a": {"b": kind}} for kind in KINDS)]


def draw_one(values: list[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy whose examples have short names, unlike those of `sampled_from` for long values."""
    return st.integers(0, len(values) - 1).map(lambda place: values[place])


ORDERED = draw_one([*NUMBERS, *STRINGS, *LONG_STRINGS])
SCALARS = draw_one([None, True, False, *NUMBERS, *STRINGS, *LONG_STRINGS])
VALUES = st.recursive(
    draw_one(KINDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=4,
)
ROWS = st.lists(st.dictionaries(NAMES, VALUES, min_size=1), max_size=5)
COMPARED = {
    **dict.fromkeys(("eq", "ne", "contains"), SCALARS),
    **dict.fromkeys(("gt", "gte", "lt", "lte"), ORDERED),
    "in": st.lists(SCALARS, max_size=3),
    "exists": st.booleans(),
}
CONDITIONS = st.sets(st.sampled_from(list(COMPARED)), max_size=2).flatmap(
    lambda names: (
        st.fixed_dictionaries({name: COMPARED[name] for name in sorted(names)}) if names else SCALARS
    )
)
FILTERS = st.recursive(
    st.dictionaries(st.sampled_from(["a", "a", *FIELDS]), CONDITIONS, max_size=2),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"not": inner}),
        *(
            st.fixed_dictionaries({name: st.lists(inner, min_size=1, max_size=3)}, optional={"a": SCALARS})
            for name in ("and", "or")
        ),
    ),
    max_leaves=4,
)


FILL = text("""
    INSERT INTO rows
    SELECT row.number - 1, row.metadata
      FROM unnest(CAST(CAST(:rows AS text[]) AS jsonb[])) WITH ORDINALITY AS row (metadata, number)
""")


@pytest.fixture
def indexed(engine: Engine) -> Engine:
    """A database with a table `rows` of metadata, on each field of which there is an index."""
    execute(engine, "CREATE TABLE rows (number bigint, metadata jsonb)")
    with engine.begin() as connection:
        driver = driver_of(connection)
        for name, definition in define_filter_indexes(1, [*FIELDS, ANY_FIELD]).items():
            driver.execute(f"CREATE INDEX {name} ON rows {definition.as_string(driver)}")
    return engine


@settings(
    max_examples=300,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(written=FILTERS, drawn=ROWS)
def test_postgres_finds_what_python_finds(
    indexed: Engine, written: dict[str, Any], drawn: list[dict[str, Any]]
) -> None:
    condition = parse_filter(written)
    compiled = compile_filter(condition, "metadata")
    rows = [*EVERY_KIND, *drawn]
    expected = {number for number, row in enumerate(rows) if fits(condition, row or {})}
    with indexed.connect() as connection:  # rolled back at the end
        connection.execute(FILL, {"rows": [None if row is None else json.dumps(row) for row in rows]})
        connection.execute(text("SET LOCAL plan_cache_mode = force_custom_plan"))
        for served_by in SCANS:
            for scan in SCANS:
                connection.execute(text(f"SET LOCAL enable_{scan} = {scan == served_by}"))
            statement = text(f"SELECT number FROM rows WHERE {compiled.sql}")
            assert set(connection.execute(statement, compiled.values).scalars()) == expected, served_by
    assert compiled.fits_nothing is fits(condition, {})
