"""Searches of one statement: each is answered as alone, by the same indexes, and none is harmed by another."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import SQLAlchemyError

from api.searches import SearchPool
from tests.database import ask
from tests.protocol import SPEC, claim_next, complete, make_items, submit, vector_of
from tests.searched import Searched, make_search_pool, searched_collection
from vectormill.collections.collection import Generation
from vectormill.collections.collections import find_generation
from vectormill.collections.generation_tables import keep_ranges
from vectormill.db.session import walk_plan
from vectormill.search.filter import parse_filter
from vectormill.search.matches import MAX_BATCH_SEARCHES, Finder, SearchWithVector, find_matches
from vectormill.search.operations import SearchAnswer
from vectormill.search.query_vectors import make_query_vector
from vectormill.search.rankings import Depth, Plans, write_batch
from vectormill.search.search import TEXT, Deadline, Search
from vectormill.vectors.quantization import Ranges

VECTORS_INDEX = "generation_1_embedding_idx"
ITEMS = make_items(40)
SMALL_RANGES = Ranges(np.full(8, -0.9, dtype=np.float32), np.full(8, 0.9, dtype=np.float32))
WANTED: Sequence[tuple[list[dict[str, Any]], str]] = [
    ([{}] * 20, "all alike"),
    (
        [{"limit": 1}, {"limit": 40}, {"limit": 10, "offset": 10}, {"limit": 7}] * 5,
        "pages of several lengths, and one that is not the first",
    ),
    ([{"min_score": 0.8}, {"min_score": -1.0}, {"min_score": 1.1}], "scores of their own"),
    ([{"include": (TEXT,)}] * 3, "texts"),
    ([{"ef_search": 300}] * 3, "an ef_search of their own"),
    ([{"condition": parse_filter({"part": 7})}] * 8, "a filter with an index"),
    ([{"condition": parse_filter({"shelf": 7})}] * 8, "a filter without one"),
    ([{"condition": parse_filter({"not": {"lang": "de"}})}] * 8, "a filter that what has no metadata fits"),
    ([{"limit": 200}, {}, {"by_document": True}, {}], "some of them never in a batch"),
]


@pytest.fixture(scope="module")
def searched(postgres_url: str) -> Iterator[Searched]:
    with searched_collection(postgres_url) as searched:
        yield searched


@contextmanager
def counting_statements(engine: Engine) -> Iterator[list[str]]:
    statements: list[str] = []

    def note(*given: Any) -> None:
        statements.append(given[2])

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        event.remove(engine, "before_cursor_execute", note)


def find_alone(
    connection: Connection, generation: Generation, searches: Sequence[SearchWithVector]
) -> list[SearchAnswer]:
    return [find_matches(connection, generation, [search])[0] for search in searches]


def rank_rows(statements: Sequence[str]) -> int:
    return sum("num_vector" in statement and "EXPLAIN" not in statement for statement in statements)


@pytest.mark.parametrize("wanted", [wanted for wanted, _ in WANTED], ids=[reason for _, reason in WANTED])
def test_searches_of_one_statement_find_what_each_finds_alone(
    searched: Searched, wanted: list[dict[str, Any]]
) -> None:
    searches = [(Search(**options), searched.vectors[7 * n]) for n, options in enumerate(wanted)]
    generation = searched.generation()
    with searched.engine.connect() as connection:
        with counting_statements(searched.engine) as statements:
            together = find_matches(connection, generation, searches)
        num_together = rank_rows(statements)
        alone = find_alone(connection, generation, searches)
    assert together == alone
    assert num_together < len(searches)


def test_a_key_that_was_deleted_is_in_no_answer(searched: Searched) -> None:
    searches = [(Search(), searched.vectors[n]) for n in (17, 18)]
    with searched.engine.connect() as connection:
        generation = find_generation(connection, "docs")
        before = find_matches(connection, generation, searches)
        connection.execute(text(f"DELETE FROM vectormill.{generation.table_name} WHERE key = 'k17'"))
        after = find_matches(connection, generation, searches)
        connection.rollback()
    assert before[0]["data"][0]["key"] == "k17"
    assert all(match["key"] != "k17" for nearest in after for match in nearest["data"])
    assert [len(nearest["data"]) for nearest in after] == [10, 10]


def test_every_search_of_a_round_is_by_the_index_of_the_vectors(searched: Searched) -> None:
    generation, search = searched.generation(), Search()
    with searched.engine.connect() as connection:
        queries = make_query_vector(connection, generation, list(searched.vectors[:MAX_BATCH_SEARCHES]))
        assert queries is not None
        Finder(connection, generation, Deadline(30))._prepare(search)
        statement, reading = Plans(connection, generation).choose(
            partial(write_batch, generation, search, queries), Depth(search.limit)
        )
        explained = text(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement.sql}")
        (plan,) = connection.execute(explained, statement.values).scalar_one()
    scans = [node for node in walk_plan(plan["Plan"]) if node.get("Index Name") == VECTORS_INDEX]
    assert [(node["Actual Loops"], "Order By" in node) for node in scans] == [(MAX_BATCH_SEARCHES, True)]
    assert reading.by_index


def test_a_round_has_a_bound_and_needs_no_more_statements_than_a_search(searched: Searched) -> None:
    generation = searched.generation()
    searches = [(Search(), vector) for vector in searched.vectors[: MAX_BATCH_SEARCHES + 1]]
    with searched.engine.connect() as connection, counting_statements(searched.engine) as statements:
        find_matches(connection, generation, searches[:1])
        num_alone = len(statements)
        find_matches(connection, generation, searches[:MAX_BATCH_SEARCHES])
        assert len(statements) == 2 * num_alone
        statements.clear()
        find_matches(connection, generation, searches)
    assert rank_rows(statements) == 2


def test_where_an_index_gives_too_little_that_search_is_repeated_by_itself(searched: Searched) -> None:
    condition = parse_filter({"shelf": 7})
    # Of 200 rows that fit, the index gives 2 to 10: it is built anew in every run, and never twice the same.
    searches = [(Search(condition=condition, limit=40), vector) for vector in searched.vectors[3:400:100]]
    generation = searched.generation()
    with searched.engine.connect() as connection:
        for setting in ("enable_seqscan = off", "enable_sort = off", "hnsw.max_scan_tuples = 200"):
            connection.execute(text(f"SET LOCAL {setting}"))
        found = find_matches(connection, generation, searches)
        assert found == find_alone(connection, generation, searches)
    reasons = [nearest.get("repeated_because") for nearest in found]
    assert all(" of 40 rows" in (reason or "") for reason in reasons), (
        reasons,
        [n["num_rows_read"] for n in found],
    )


def test_a_large_table_without_an_index_is_read_for_one_search_at_a_time(searched: Searched) -> None:
    searches = [(Search(), vector) for vector in searched.vectors[:3]]
    with searched.engine.connect() as connection, counting_statements(searched.engine) as statements:
        connection.execute(text("SET LOCAL enable_indexscan = off"))
        found = find_matches(connection, searched.generation(), searches)
    assert rank_rows(statements) == 3
    assert all((nearest["num_rows_read"] or 0) > 10_000 for nearest in found)


def fill_small(engine: Engine, **options: Any) -> Generation:
    """40 rows of 8 dimensions without an index, and each of them a second time."""
    spec = replace(SPEC, **options)
    ask(engine, keep_ranges, spec, SMALL_RANGES)
    submit(engine, ITEMS, collection="docs", spec=spec, chunk_max_items=len(ITEMS))
    complete(engine, claim_next(engine))
    with engine.begin() as connection:
        generation = find_generation(connection, "docs")
        table = f"vectormill.{generation.table_name}"
        connection.execute(text(f"CREATE TEMPORARY TABLE twins ON COMMIT DROP AS TABLE {table}"))
        connection.execute(text("UPDATE twins SET key = 'twin of ' || key"))
        connection.execute(text(f"INSERT INTO {table} SELECT * FROM twins"))
    return generation


def has_tie(nearest: SearchAnswer) -> bool:
    return len({match["score"] for match in nearest["data"]}) < len(nearest["data"])


def test_a_filter_that_is_true_and_one_that_is_1_are_not_asked_together(engine: Engine) -> None:
    generation = fill_small(engine)
    searches = [
        (Search(condition=parse_filter({"a": value})), vector_of(b"text")) for value in (1, True, 1, True)
    ]
    with engine.begin() as connection:
        insert = text(
            f"INSERT INTO vectormill.{generation.table_name}_attributes (key, job_seq, metadata) "
            "VALUES (:key, 1, CAST(:metadata AS jsonb)) ON CONFLICT (key) DO UPDATE SET metadata = excluded.metadata"
        )
        for key, value in (("k1", "1"), ("k2", "true")):
            connection.execute(insert, {"key": key, "metadata": f'{{"a": {value}}}'})
        found = find_matches(connection, generation, searches)
    assert [[match["key"] for match in nearest["data"]] for nearest in found] == [
        ["k1"],
        ["k2"],
        ["k1"],
        ["k2"],
    ]


def test_of_searches_that_come_together_an_error_is_its_own_alone(engine: Engine) -> None:
    generation = fill_small(engine)
    vectors = [vector_of(item.text) for item in ITEMS[:12]]
    vectors[5] = vectors[5] * np.float32(1e30)  # which no halfvec holds

    async def ask_all(pool: SearchPool) -> list[Any]:
        asked = [pool.find(generation, [(Search(limit=1), vector)], Deadline(30)) for vector in vectors]
        return [*await asyncio.gather(*asked, return_exceptions=True)]

    pool = make_search_pool(engine)
    found = asyncio.run(ask_all(pool))
    pool.close()
    assert isinstance(found.pop(5), SQLAlchemyError)
    keys = [nearest["data"][0]["key"].removeprefix("twin of ") for (nearest,) in found]
    assert keys == [f"k{n}" for n in range(12) if n != 5]
