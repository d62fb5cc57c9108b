"""Searches of collections of every vector type, with the client; and what is removed while it is searched."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine, event

from tests.api_server import api_client
from tests.database import ask, execute
from tests.protocol import SPEC, claim_next, complete, make_items, submit, vector_of
from vectormill.client import Client
from vectormill.collections.collections import find_generation
from vectormill.collections.generation_tables import keep_ranges
from vectormill.domain.errors import Conflict
from vectormill.domain.vector_type import VECTOR_TYPES
from vectormill.problems import ApiError
from vectormill.search.matches import find_matches
from vectormill.search.search import Search
from vectormill.vectors.quantization import Ranges
from vectormill.vectors.vector_types import make_rows

RANGES = Ranges(np.full(8, -0.9, dtype=np.float32), np.full(8, 0.9, dtype=np.float32))
ITEMS = make_items(40)


def fill(engine: Engine, **options: Any) -> None:
    spec = replace(SPEC, **options)
    ask(engine, keep_ranges, spec, RANGES)
    submit(engine, ITEMS, collection="docs", spec=spec, chunk_max_items=len(ITEMS))
    complete(engine, claim_next(engine))


@pytest.mark.parametrize("vector_type", VECTOR_TYPES)
def test_a_row_s_own_vector_finds_what_is_like_it(engine: Engine, vector_type: str) -> None:
    fill(engine, vector_type=vector_type)
    with api_client(engine) as api, Client(str(api.base_url)) as client:
        (own,) = client.search(
            "docs", embedding=vector_of(ITEMS[3].text).tolist(), limit=1, include=["vector"]
        )
        alike = client.search("docs", more_like="k3", limit=5)
        asked = client.search("docs", embedding=vector_of(ITEMS[3].text).tolist(), limit=6)
    assert own["key"] == "k3"
    assert own["score"] == pytest.approx(1, abs=1e-3)
    rows = make_rows(vector_of(ITEMS[3].text)[None], VECTOR_TYPES[vector_type], RANGES)
    # The digits tell the very numbers that an export gives.
    assert np.array_equal(np.array(own["embedding"], dtype=rows.dtype), rows[0])
    expected = [match["score"] for match in asked][1:]
    np.testing.assert_allclose([match["score"] for match in alike], expected, atol=0.02)
    assert "k3" not in [match["key"] for match in alike]
    if vector_type == "binary":
        assert all(match["score"] * 4 == int(match["score"] * 4) for match in alike)  # of 8 bits


def test_the_client_asks_many_queries_at_once_and_pages_through(engine: Engine) -> None:
    fill(engine)
    with api_client(engine) as api, Client(str(api.base_url)) as client:
        first, second = client.search_many(
            "docs", [{"more_like": "k1"}, {"more_like": "k2", "limit": 3}], limit=5
        )
        whole = client.search("docs", more_like="k1", limit=10)
        rest = client.search("docs", more_like="k1", limit=5, offset=first.next_offset)
        assert (len(first), len(second)) == (5, 3)
        assert [*first, *rest] == whole
        assert client.search("docs", more_like="k1", filter={"a": 1}) == []
        with pytest.raises(ApiError, match=r"filter\.a\.above"):
            client.search("docs", more_like="k1", filter={"a": {"above": 1}})
        with pytest.raises(ApiError, match="8 dimensions"):
            client.search("docs", more_like="k1", fingerprint="0" * 16)


def test_a_generation_that_is_removed_while_it_is_searched_is_said_so(engine: Engine) -> None:
    fill(engine)
    generation = ask(engine, find_generation, "docs")
    execute(engine, f"DROP TABLE vectormill.{generation.table_name} CASCADE")
    query = vector_of(ITEMS[0].text)
    with engine.connect() as connection, pytest.raises(Conflict, match="search again"):
        find_matches(connection, generation, [(Search(), query)])


def test_a_search_takes_three_statements_and_two_of_the_same_kind_no_more(engine: Engine) -> None:
    fill(engine)
    statements: list[str] = []
    query = vector_of(ITEMS[0].text)
    with engine.connect() as connection:
        generation = find_generation(connection, "docs")
        find_matches(connection, generation, [(Search(), query)])  # what is looked up once per connection
        event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
        find_matches(connection, generation, [(Search(), query)])
        assert len(statements) == 3  # settings, plan, rows
        find_matches(connection, generation, [(Search(), query), (Search(), -query)])
        assert len(statements) == 3 + 3
