"""Searches by an index of sparse weights, which cannot have all rows: it is used, and the others are found too."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine, text

from indexer.indexing import build_indexes
from tests.api_server import api_client
from tests.database import ask
from tests.indexed import indexes_of, start_run, wish
from tests.kinds import MANY
from tests.services import connected_engine, migrated_database
from vectormill.client import Client
from vectormill.collections.collection import Generation
from vectormill.collections.collections import open_collection
from vectormill.collections.generation_tables import upsert_rows
from vectormill.collections.indexes import find_record, name_weights_index
from vectormill.db.session import walk_plan
from vectormill.domain.task import DENSE, MULTI_VECTOR, SPARSE
from vectormill.jobs.item import Item
from vectormill.results.kind import take_objects
from vectormill.search.matches import Finder, find_matches, make_queries
from vectormill.search.rankings import Depth, Plans, Ranking
from vectormill.search.search import Deadline, Search
from vectormill.vectors.representations import Representations

NUM_WORDS = 3000
NUM_ROWS = 4000
NUM_LONG = 20  # rows with more weights than pgvector indexes
RARE = 2999  # a word of three rows alone
SPEC = replace(MANY, sparse_dimensions=NUM_WORDS)


FORCE_INDEX = text("""
    SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true)
""")


@dataclass(frozen=True)
class Weighed:
    """A collection `docs` with indexes, whose row `k<n>` has row n of `weights`, float32 [NUM_ROWS, NUM_WORDS]."""

    engine: Engine
    generation: Generation
    weights: np.ndarray[Any, np.dtype[np.float32]]

    def search(self, query: Representations, **options: Any) -> Any:
        """Search by the indexes that there are, although Postgres rightly reads all of so few rows for many of them."""
        with self.engine.connect() as connection:
            connection.execute(FORCE_INDEX)
            (found,) = find_matches(connection, self.generation, [(Search(**options), query)])
        return found

    def best(self, query: Representations, limit: int) -> list[str]:
        products = self.weights[:, query.indices] @ query.weights
        return [f"k{number}" for number in np.argsort(-products, kind="stable")[:limit] if products[number]]


def draw_rows() -> list[Representations]:
    """Return rows of some forty words of two of fifty topics, as SPLADE has them, and long rows of half the words."""
    numbers = np.random.default_rng(25)
    topics = [numbers.choice(RARE, 80, replace=False) for _ in range(50)]
    rows = []
    for row in range(NUM_ROWS):
        of_topics = np.concatenate([topics[topic] for topic in numbers.choice(50, 2, replace=False)])
        words = np.unique(numbers.choice(of_topics, 50))
        if row < NUM_LONG:
            words = np.unique(np.concatenate([words, numbers.choice(RARE, 1400, replace=False)]))
        if row in (7, 1000, 2000):
            words = np.append(words, RARE)
        rows.append(
            Representations(
                numbers.standard_normal(8).astype(np.float32),
                words.astype(np.uint32),
                (numbers.gamma(2, 0.5, len(words)) + 0.05).astype(np.float32),
                numbers.standard_normal((2, 4)).astype(np.float16),
            )
        )
    return rows


@pytest.fixture(scope="module")
def weighed(postgres_url: str) -> Iterator[Weighed]:
    rows = draw_rows()
    weights = np.zeros((NUM_ROWS, NUM_WORDS), np.float32)
    for number, row in enumerate(rows):
        weights[number, row.indices] = row.weights
    with migrated_database(postgres_url) as url, connected_engine(url) as engine:
        with engine.begin() as connection:
            generation = open_collection(connection, "docs", SPEC)
            items = [Item(f"k{number}", b"text %d" % number) for number in range(NUM_ROWS)]
            packed = take_objects([row.pack() for row in rows])
            upsert_rows(connection, generation.id, 1, items[20:], packed[20:], SPEC)
        context, report = start_run(engine)
        build_indexes(context, generation)
        assert report["plan"]["operator_class"] == "halfvec_cosine_ops"
        with engine.begin() as connection:  # a row that cannot be indexed can be written
            upsert_rows(connection, generation.id, 1, items[:20], packed[:20], SPEC)
            connection.execute(text(f"ANALYZE vectormill.{generation.table_name}"))
        yield Weighed(engine, generation, weights)


def draw_query(number: int) -> Representations:
    """Return a query of some of the words of a row, with other weights."""
    row, numbers = draw_rows_once()[number], np.random.default_rng(number)
    chosen = np.sort(numbers.choice(len(row.indices), 12, replace=False))
    return replace(row, indices=row.indices[chosen], weights=numbers.gamma(2, 0.5, 12).astype(np.float32))


ROWS: list[Representations] = []


def draw_rows_once() -> list[Representations]:
    ROWS[:] = ROWS or draw_rows()
    return ROWS


def explain(
    weighed: Weighed, query: Representations, num_ranked: int, **options: Any
) -> list[dict[str, Any]]:
    """Return the nodes of the plan of a search's first attempt which read rows with vectors."""
    search = Search(**options)
    with weighed.engine.connect() as connection:
        if num_ranked > 10:
            connection.execute(FORCE_INDEX)
        queries = make_queries(connection, weighed.generation, search, query, None)
        assert queries is not None
        Finder(connection, weighed.generation, Deadline(30))._prepare(search)
        ranking = Ranking(weighed.generation, search, queries, None)
        statement, _ = Plans(connection, weighed.generation).choose(ranking.write_page, Depth(num_ranked))
        explained = text(f"EXPLAIN (FORMAT JSON) {statement.sql}")
        (plan,) = connection.execute(explained, statement.values).scalar_one()
    of_table = (weighed.generation.table_name, None)
    return [dict(node) for node in walk_plan(plan["Plan"]) if node.get("Relation Name") in of_table]


def test_a_search_reads_the_index_and_the_rows_beside_it_alone(weighed: Weighed) -> None:
    named = {index.name: index for index in indexes_of(weighed.engine, weighed.generation)}
    hnsw = {index.operator_class: index.name for index in named.values() if index.is_vector_index}
    assert set(hnsw) == {"halfvec_cosine_ops", "sparsevec_ip_ops"}
    few = name_weights_index(weighed.generation.id)
    assert named[few].is_ours
    nodes = explain(weighed, draw_query(100), 10, outputs=(SPARSE,))
    assert {node["Index Name"] for node in nodes if "Index Name" in node} == {hnsw["sparsevec_ip_ops"], few}
    assert "Seq Scan" not in [node["Node Type"] for node in nodes]
    nodes = explain(weighed, draw_query(100), 100, outputs=(DENSE, SPARSE))
    assert {node["Index Name"] for node in nodes if "Index Name" in node} == {*hnsw.values(), few}
    found = weighed.search(draw_query(100), outputs=(SPARSE,))
    assert (found["num_rows_read"], found["num_rows_unindexed"]) == (None, NUM_LONG)
    assert "repeated_because" not in found


def test_nearly_all_of_the_ten_best_are_found_and_all_of_those_beside_the_index(weighed: Weighed) -> None:
    num_found = num_long = 0
    for number in range(30, 1030, 20):
        best = weighed.best(query := draw_query(number), 10)
        answer = weighed.search(query, outputs=(SPARSE,))
        assert answer.get("num_rows_unindexed") == NUM_LONG
        found = {match["key"] for match in answer["data"]}
        num_found += len(found & set(best))
        long = {key for key in best if int(key[1:]) < NUM_LONG}
        num_long += len(long)
        assert long <= found
    assert num_long > 20
    assert num_found >= 0.95 * 500, num_found


def test_a_query_of_rare_words_is_repeated_by_its_weights_alone(weighed: Weighed) -> None:
    rare = replace(draw_query(100), indices=np.array([RARE], np.uint32), weights=np.ones(1, np.float32))
    found = weighed.search(rare, outputs=(SPARSE,))
    assert [match["key"] for match in found["data"]] == weighed.best(rare, 10)
    assert len(found["data"]) == 3
    assert "the index returned only" in str(found.get("repeated_because"))
    fused = weighed.search(rare, outputs=(DENSE, SPARSE))
    assert {match["key"] for match in fused["data"] if match.get("sparse_rank")} == {"k7", "k1000", "k2000"}
    assert fused["num_rows_read"] is None, "dense vectors are still found by their index"


def test_other_searches_find_what_the_index_finds(weighed: Weighed) -> None:
    query = draw_query(200)
    best = [
        match["key"] for match in weighed.search(query, outputs=(SPARSE,), limit=100, ef_search=400)["data"]
    ]
    ten = [match["key"] for match in weighed.search(query, outputs=(SPARSE,))["data"]]
    fused = weighed.search(query, outputs=(DENSE, SPARSE), limit=25, ef_search=400)
    assert fused.get("repeated_because") is None
    assert fused.get("num_rows_unindexed") == NUM_LONG
    ranks = {match["key"]: match.get("sparse_rank") for match in fused["data"] if match.get("sparse_rank")}
    assert len(ranks) > 10
    assert all(best[rank - 1] == key for key, rank in ranks.items())
    ordered = weighed.search(query, outputs=(SPARSE, MULTI_VECTOR), limit=10)
    assert {match["key"] for match in ordered["data"]} <= set(best)
    assert ordered.get("num_rows_unindexed") == NUM_LONG
    with api_client(weighed.engine, index_rows=100) as api, Client(str(api.base_url)) as client:
        weights = dict(zip(query.indices, query.weights, strict=True))
        assert [match["key"] for match in client.search("docs", sparse=weights)] == ten
        answer = client.index("docs")
    plan = answer["sparse_plan"]
    assert plan is not None
    assert plan["operator_class"] == "sparsevec_ip_ops"
    assert any("more than 1,000 weights" in reason for reason in plan["reasons"])


def test_without_the_index_all_rows_are_read_once_and_a_rebuild_counts_the_others(weighed: Weighed) -> None:
    engine, generation = weighed.engine, weighed.generation
    assert ask(engine, find_record, generation.id)[SPARSE]["num_unindexed"] == 0
    wish(engine, index_policy="'none'")
    build_indexes(start_run(engine)[0], generation)
    assert indexes_of(engine, generation) == []
    nodes = explain(weighed, draw_query(100), 10, outputs=(SPARSE,))
    assert [node["Node Type"] for node in nodes if "Relation Name" in node] == ["Seq Scan"]
    found = weighed.search(query := draw_query(100), outputs=(SPARSE,))
    assert [match["key"] for match in found["data"]] == weighed.best(query, 10)
    assert found.get("num_rows_unindexed") is None
    assert found["num_rows_read"] == pytest.approx(NUM_ROWS, rel=0.2)
    wish(engine, index_policy="'auto'")
    build_indexes(start_run(engine)[0], generation)
    record = ask(engine, find_record, generation.id)
    assert record[SPARSE]["num_unindexed"] == NUM_LONG
    assert record["name"] != record[SPARSE]["name"]
    context, report = start_run(engine)
    build_indexes(context, generation)
    assert sorted(report["kept"]) == sorted([record["name"], record[SPARSE]["name"]])
