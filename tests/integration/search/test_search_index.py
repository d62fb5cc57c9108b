"""Search beside an index and without one: as many rows as were asked for, and word of it when every row was read."""

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from sqlalchemy import Engine, text

from tests.database import execute
from tests.protocol import SPEC
from vectormill.collections.collections import open_collection
from vectormill.collections.generation_tables import upsert_rows
from vectormill.jobs.item import Item
from vectormill.vectors.vector_types import make_rows

NUM_ROWS = 4000
LIMIT = 200


@pytest.fixture
def vectors() -> npt.NDArray[np.float32]:
    """Unit vectors float32 [NUM_ROWS, 8] without any order, the hardest case of an index."""
    drawn = np.random.default_rng(7).standard_normal((NUM_ROWS, SPEC.dimensions)).astype(np.float32)
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    return drawn


@pytest.fixture
def table(engine: Engine, vectors: npt.NDArray[np.float32]) -> str:
    kind = SPEC.kept_type
    items = [Item(str(number), b"text %d" % number) for number in range(NUM_ROWS)]
    with engine.begin() as connection:
        generation = open_collection(connection, "docs", SPEC)
        rows = make_rows(vectors, kind, None)
        upsert_rows(connection, generation.id, 1, items, rows, SPEC)
    execute(engine, f"ANALYZE vectormill.{generation.table_name}")
    return generation.table_name


def search(client: httpx.Client, query: npt.NDArray[np.float32], limit: int) -> dict[str, object]:
    answer = client.post("/v1/collections/docs/search", json={"embedding": query.tolist(), "limit": limit})
    assert answer.status_code == 200, answer.text
    body: dict[str, object] = answer.json()
    return body


@pytest.mark.parametrize("limit", [LIMIT, 1000])  # 1,000 is the most that an index is told to keep in view
def test_with_an_index_a_search_gives_as_many_rows_as_were_asked_for_in_the_order_of_an_exact_one(
    client: httpx.Client, engine: Engine, vectors: npt.NDArray[np.float32], table: str, limit: int
) -> None:
    execute(engine, f"CREATE INDEX ON vectormill.{table} USING hnsw (embedding halfvec_cosine_ops)")
    with (
        engine.begin() as connection
    ):  # the planner may rightly read so small a table whole: it is kept from it
        name = connection.execute(text("SELECT quote_ident(current_database())")).scalar_one()
        connection.execute(text(f"ALTER DATABASE {name} SET enable_seqscan = off"))
    engine.dispose()  # connections from now on have the setting
    query = vectors[11]
    body = search(client, query, limit)
    matches = body["data"]
    assert isinstance(matches, list)
    assert len(matches) == limit
    assert body["num_rows_read"] is None
    scores = [match["score"] for match in matches]
    assert scores == sorted(scores, reverse=True)
    exact = np.argsort(-(vectors @ query))[:limit]
    found = {match["key"] for match in matches}
    assert len(found & {str(number) for number in exact}) >= 0.95 * limit
    # Place for place nearly the score of an exact search: 16 bits, and the few that an index misses.
    np.testing.assert_allclose(scores, (vectors @ query)[exact], atol=0.02)


def test_without_an_index_a_search_says_that_it_read_every_row(
    client: httpx.Client, vectors: npt.NDArray[np.float32], table: str
) -> None:
    body = search(client, vectors[11], LIMIT)
    assert body["num_rows_read"] == NUM_ROWS
    matches = body["data"]
    assert isinstance(matches, list)
    exact = np.argsort(-(vectors @ vectors[11]))[:LIMIT]
    np.testing.assert_allclose(
        [match["score"] for match in matches], (vectors @ vectors[11])[exact], atol=1e-3
    )


def test_an_index_serves_every_search_of_a_connection_and_not_only_the_first_ones(
    client: httpx.Client, engine: Engine, vectors: npt.NDArray[np.float32], table: str
) -> None:
    # A driver prepares a statement that comes often, and Postgres then may plan it once for every limit.
    execute(engine, f"CREATE INDEX ON vectormill.{table} USING hnsw (embedding halfvec_cosine_ops)")
    lengths = {len(search(client, vectors[number], LIMIT)["data"]) for number in range(15)}  # type: ignore[arg-type]
    assert lengths == {LIMIT}
