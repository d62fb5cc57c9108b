"""A filter means the same to Postgres as it does to Python, whatever the metadata."""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from vectormill.search.filter import fits, parse_filter
from vectormill.search.filters import compile_filter

NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=2).map(".".join)
NUMBERS = st.integers(-3, 3) | st.sampled_from([0.5, -0.0, 1.0, 1e20, -1e-20])
# Of characters whose order is that of their code points in every collation.
STRINGS = st.sampled_from(["", "a", "b", "ab", "1", "null"])
SCALARS = st.none() | st.booleans() | NUMBERS | STRINGS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=4,
)
METADATA = st.none() | st.dictionaries(NAMES, VALUES, max_size=3)
CONDITIONS = st.one_of(
    SCALARS,
    *(st.fixed_dictionaries({name: SCALARS}) for name in ("eq", "ne", "contains")),
    st.dictionaries(st.sampled_from(["gt", "gte", "lt", "lte"]), NUMBERS | STRINGS, min_size=1, max_size=2),
    st.fixed_dictionaries({"in": st.lists(SCALARS, max_size=3)}),
    st.fixed_dictionaries({"exists": st.booleans()}),
)
FILTERS = st.recursive(
    st.dictionaries(PATHS, CONDITIONS, max_size=2),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"not": inner}),
        *(
            st.fixed_dictionaries({name: st.lists(inner, min_size=1, max_size=3)}, optional={"a": SCALARS})
            for name in ("and", "or")
        ),
    ),
    max_leaves=4,
)


@settings(
    max_examples=300,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(written=FILTERS, rows=st.lists(METADATA, min_size=1, max_size=20))
def test_postgres_finds_what_python_finds(
    engine: Engine, written: dict[str, Any], rows: list[dict[str, Any] | None]
) -> None:
    condition = parse_filter(written)
    compiled = compile_filter(condition, "row.metadata")
    statement = text(f"""
        SELECT row.number - 1
          FROM unnest(CAST(CAST(:rows AS text[]) AS jsonb[])) WITH ORDINALITY AS row (metadata, number)
         WHERE {compiled.sql}
    """)
    values = {"rows": [None if row is None else json.dumps(row) for row in rows], **compiled.values}
    with engine.connect() as connection:
        found = set(connection.execute(statement, values).scalars())
    assert found == {number for number, row in enumerate(rows) if fits(condition, row or {})}
    assert compiled.fits_nothing is fits(condition, {})
