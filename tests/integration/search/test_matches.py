"""Searches of 20,000 rows: filters that starve no limit, words and vectors fused, documents; and their plans."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import pytest
from sqlalchemy import Connection, Engine, event, text

from tests.architecture.sources import ROOT
from tests.database import execute
from tests.metadata_filters import fits
from tests.searched import LONG_DOCUMENT, NUM_ROWS, Searched, describe_row, searched_collection
from tests.services import connected_engine
from vectormill.db.session import walk_plan
from vectormill.domain.errors import InvalidOption, ItemNotFound, TextsNotKept
from vectormill.search.filter import parse_filter
from vectormill.search.filter_sql import compile_filter, name_filter_index, name_text_index
from vectormill.search.matches import Finder, find_matches
from vectormill.search.rankings import Statement
from vectormill.search.search import Deadline, Search

ONE_PERCENT = {"part": 7}
FILL_ARTICLES = """
    INSERT INTO articles
    SELECT 'k' || number, 'title of k' || number, DATE '2026-01-01' - number % 2
      FROM generate_series(0, 19999) AS number
"""
VECTORS_INDEX = "generation_1_embedding_idx"


@pytest.fixture(scope="module")
def searched(postgres_url: str) -> Iterator[Searched]:
    with searched_collection(postgres_url) as searched:
        yield searched


@pytest.fixture
def by_index_alone(searched: Searched) -> Iterator[Searched]:
    """Without an index on the field, and kept from reading so small a table whole."""
    name = execute(searched.engine, "SELECT quote_ident(current_database())").scalar_one()
    execute(searched.engine, f"ALTER DATABASE {name} SET enable_seqscan = off")
    execute(searched.engine, f"ALTER DATABASE {name} SET enable_sort = off")
    searched.engine.dispose()
    yield searched
    execute(searched.engine, f"ALTER DATABASE {name} RESET ALL")
    searched.engine.dispose()


def find_numbers(written: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    condition = parse_filter(written)
    return np.array([number for number in range(NUM_ROWS) if fits(condition, describe_row(number))])


def keys_of(found: Any) -> list[str]:
    return [match["key"] for match in found["data"]]


@pytest.mark.parametrize(
    "written",
    [
        ONE_PERCENT,
        {"shelf": 7},  # the same without an index
        {"year": {"gte": 2020, "lt": 2022}},
        {"lang": "de", "tags": {"contains": "harbour"}},
        {"part": {"in": [1, 2, 3]}, "not": {"lang": "de"}},
    ],
    ids=str,
)
def test_a_filtered_search_finds_the_nearest_of_the_rows_that_fit(
    searched: Searched, written: dict[str, Any]
) -> None:
    numbers, num_found = find_numbers(written), 0
    for query in searched.vectors[3:2000:100]:
        found = searched.search(query, condition=parse_filter(written))
        assert len(found["data"]) == 10
        num_found += len(set(keys_of(found)) & set(searched.nearest(query, numbers, 10)))
    assert num_found >= 0.95 * 200


def test_the_vectors_index_goes_on_until_enough_rows_fit(by_index_alone: Searched) -> None:
    numbers, num_found = find_numbers({"shelf": 7}), 0
    nodes = by_index_alone.explain(by_index_alone.vectors[3], condition=parse_filter({"shelf": 7}))
    assert VECTORS_INDEX in {node.get("Index Name") for node in nodes}
    for query in by_index_alone.vectors[3:4000:100]:
        found = by_index_alone.search(query, condition=parse_filter({"shelf": 7}))
        assert len(found["data"]) == 10
        num_found += len(set(keys_of(found)) & set(by_index_alone.nearest(query, numbers, 10)))
    assert num_found >= 0.95 * 400


def test_when_the_index_gives_up_the_search_is_repeated_exactly_and_says_so(
    by_index_alone: Searched, postgres_url: str
) -> None:
    name = execute(by_index_alone.engine, "SELECT quote_ident(current_database())").scalar_one()
    with connected_engine(postgres_url) as admin:
        execute(admin, f"ALTER DATABASE {name} SET hnsw.max_scan_tuples = 200")
    by_index_alone.engine.dispose()
    query = by_index_alone.vectors[3]
    found = by_index_alone.search(query, condition=parse_filter({"shelf": 7}))
    assert keys_of(found) == by_index_alone.nearest(query, find_numbers({"shelf": 7}), 10)
    assert " of 10 rows that satisfy the filter" in found.get("repeated_because")
    everywhere = by_index_alone.search(query)
    assert len(everywhere["data"]) == 10
    assert everywhere.get("repeated_because") is None


def test_a_field_that_no_row_has_is_named_where_nothing_was_found(by_index_alone: Searched) -> None:
    query = by_index_alone.vectors[3]
    nothing = {"and": [{"nosuch": 4}, {"shelf": {"gte": 0}}, {"not": {"neither.nor": 1}}]}
    found = by_index_alone.search(query, condition=parse_filter(nothing))
    assert (found["data"], found.get("missing_fields")) == ([], ["neither", "nosuch"])
    for known in ({"shelf": -1}, {"not": {"nosuch": 4}}):
        assert "missing_fields" not in by_index_alone.search(query, condition=parse_filter(known))


def test_plans_use_the_indexes_that_are_there(searched: Searched) -> None:
    query = searched.vectors[17]
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, VECTORS_INDEX),
        ({"like": "k17"}, VECTORS_INDEX),
        ({"by_document": True}, VECTORS_INDEX),
        ({"condition": parse_filter(ONE_PERCENT)}, name_filter_index(1, "part")),
        ({"condition": parse_filter({"part": {"in": [3, 5]}})}, name_filter_index(1, "part")),
        ({"condition": parse_filter({"year": {"gt": 2023}})}, name_filter_index(1, "year")),
        ({"condition": parse_filter({"tags": {"contains": "tag 77"}})}, name_filter_index(1, "*")),
        ({"condition": parse_filter({"rare": {"exists": True}})}, name_filter_index(1, "*")),
        ({"mode": "text", "words": "harbour lantern"}, name_text_index(1)),
        ({"mode": "hybrid", "words": "harbour lantern"}, name_text_index(1)),
        ({"mode": "hybrid", "words": "harbour lantern"}, VECTORS_INDEX),
    ]
    for options, index in cases:
        nodes = searched.explain(None if "like" in options else query, **options)
        assert index in {node.get("Index Name") for node in nodes}, (options, nodes)


@pytest.mark.parametrize(
    ("written", "indexes"),
    [
        ({"year": {"gt": 2023}}, {"year"}),
        ({"year": {"gte": 2020, "lt": 2022}}, {"year"}),
        ({"and": [{"year": {"gte": 2020}}, {"year": {"lt": 2022}}]}, {"year"}),
        ({"or": [{"year": {"lt": 2001}}, {"part": {"gt": 98}}]}, {"year", "part"}),
        ({"not": {"year": {"lt": 2023}}}, set()),
    ],
    ids=["above", "between", "both ends", "either field", "not below"],  # a set is written in any order
)
def test_a_range_is_served_by_the_indexes_of_its_field_and_its_rows_are_estimated(
    searched: Searched, written: dict[str, Any], indexes: set[str]
) -> None:
    condition = compile_filter(parse_filter(written), "metadata")
    statement = f"EXPLAIN (FORMAT JSON) SELECT FROM vectormill.generation_1_attributes WHERE {condition.sql}"
    with searched.engine.connect() as connection:
        connection.execute(text("SET LOCAL plan_cache_mode = force_custom_plan"))
        (plan,) = connection.execute(text(statement), condition.values).scalar_one()
    nodes = list(walk_plan(plan["Plan"]))
    names = {name_filter_index(1, field) for field in indexes}
    used = {node["Index Name"] for node in nodes if "Index Name" in node}
    assert names | {f"{name}_long" for name in names} <= used or not indexes
    assert nodes[0]["Plan Rows"] == pytest.approx(len(find_numbers(written)), rel=0.2)


def test_the_nearest_to_a_row_are_found_without_the_row_itself(searched: Searched) -> None:
    expected = searched.nearest(searched.vectors[17], np.arange(NUM_ROWS), 11)[1:]
    assert len(set(keys_of(searched.search(like="k17"))) & set(expected)) >= 9
    with pytest.raises(ItemNotFound, match="'k-1'"):
        searched.search(like="k-1")


def test_a_fused_list_is_longer_than_the_page_in_both_rankings(searched: Searched) -> None:
    # The 40th nearest is first by its words: of lists as long as the page it would be in one only.
    query = searched.vectors[17]
    nearest = searched.search(query, limit=40)["data"][-1]
    number = nearest["key"].removeprefix("k")
    found = searched.search(query, mode="hybrid", words=f"number {number}", limit=2)
    assert found["data"][0]["key"] == nearest["key"]
    assert (found["data"][0]["vector_rank"], found["data"][0]["text_rank"]) == (40, 1)


def test_a_collection_without_texts_is_not_searched_by_words(searched: Searched) -> None:
    execute(searched.engine, "UPDATE vectormill.collections SET keep_text = false")
    try:
        with pytest.raises(TextsNotKept, match="--keep-text"):
            searched.search(mode="text", words="harbour")
    finally:
        execute(searched.engine, "UPDATE vectormill.collections SET keep_text = true")


def test_every_document_gives_its_best_passage_and_there_are_as_many_as_were_asked_for(
    searched: Searched,
) -> None:
    query = searched.vectors[0]  # the nearest 1,200 rows are passages of one document
    plain = searched.search(query, limit=100)
    assert {match["document"] for match in plain["data"]} == {"d0"}
    found = searched.search(query, limit=10, by_document=True)
    documents = [match["document"] if match.get("passage") else match["key"] for match in found["data"]]
    assert len(set(documents)) == 10
    assert documents[0] == "d0"
    assert found["data"][0]["key"] == "k0"
    others = np.setdiff1d(np.arange(NUM_ROWS), np.arange(LONG_DOCUMENT) * 5)
    assert found["data"][1]["key"] == searched.nearest(query, others, 1)[0]
    assert "fewer documents" in found.get("repeated_because")
    unlike = searched.search(like="k0", limit=5, by_document=True)
    assert "d0" not in [match["document"] for match in unlike["data"] if match.get("passage")]


def test_only_what_is_asked_for_is_given(searched: Searched) -> None:
    query = searched.vectors[17]
    (bare,) = searched.search(query, limit=1, include=())["data"]
    assert bare.keys() == {"key", "score"}
    (full,) = searched.search(query, limit=1, include=("vector", "text", "metadata"))["data"]
    assert full["text"] == "number 17 meadow lantern"
    assert full["metadata"] == describe_row(17)
    np.testing.assert_allclose(full["embedding"], query, atol=1e-3)
    scores = [match["score"] for match in searched.search(query, min_score=0.9)["data"]]
    assert 0 < len(scores) < 10
    assert min(scores) >= 0.9


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "text"}, "needs a text"),
        ({"mode": "hybrid", "words": "a", "like": "k1"}, "more_like compares vectors"),
        ({"mode": "hybrid", "words": "a", "min_score": 0.5}, "min_score is a similarity"),
        ({"mode": "text", "words": "a", "ef_search": 9}, "ef_search applies to the vector index"),
        ({"vector_weight": 0, "text_weight": 0}, "above 0"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    searched: Searched, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidOption, match=said):
        searched.search(searched.vectors[0], **options)


def test_the_documented_join_of_the_view_is_served_by_the_index(searched: Searched) -> None:
    (shown,) = re.findall(
        r"```sql\n(.*?);\n```", (ROOT / "docs/SEARCH.md").read_text(encoding="utf-8"), re.DOTALL
    )
    statement = shown.replace("'42'", "'k17'").replace("::bigint", "")
    with searched.engine.connect() as connection:  # rolled back at the end
        connection.execute(text("CREATE TABLE articles (id text PRIMARY KEY, title text, published date)"))
        connection.execute(text(FILL_ARTICLES))
        connection.execute(text("ANALYZE articles"))
        connection.execute(text("SET LOCAL hnsw.iterative_scan = relaxed_order"))
        rows = connection.execute(text(statement)).all()
        (plan,) = connection.execute(text(f"EXPLAIN (FORMAT JSON) {statement}")).scalar_one()
    newer = np.arange(0, NUM_ROWS, 2)
    expected = searched.nearest(searched.vectors[17], newer, 10)
    assert len({row.title for row in rows} & {f"title of {key}" for key in expected}) >= 9
    assert VECTORS_INDEX in {node.get("Index Name") for node in walk_plan(plan["Plan"])}


@contextmanager
def counting_pages(engine: Engine) -> Iterator[list[tuple[str, Any]]]:
    """Collect the statements of pages with their values."""
    pages: list[tuple[str, Any]] = []

    def note(_: Any, __: Any, statement: str, values: Any, *others: Any) -> None:
        if "AS passage" in statement and "EXPLAIN" not in statement:
            pages.append((statement, values))

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield pages
    finally:
        event.remove(engine, "before_cursor_execute", note)


def explain_again(connection: Connection, statement: str, values: Any) -> list[Mapping[str, Any]]:
    """Return the nodes of the plan with which Postgres runs a statement, and what each did."""
    (plan,) = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", values).scalar_one()
    return list(walk_plan(plan["Plan"]))


FORCE_INDEX = ("enable_seqscan = off", "enable_sort = off")
SHELF = {"condition": parse_filter({"shelf": 7})}
HINTED: Final[list[tuple[dict[str, Any], tuple[str, ...]]]] = [
    (options, settings)
    for options in (
        {},
        {"condition": parse_filter(ONE_PERCENT)},
        SHELF,
        {"condition": parse_filter({"nosuch": 4})},
        {"by_document": True},
        {"offset": 40, **SHELF},
        {"mode": "text", "words": "harbour -lantern"},
        {"mode": "hybrid", "words": "harbour lantern"},
    )
    for settings in (
        (),
        ("enable_indexscan = off",),
        ("enable_indexscan = off", "enable_bitmapscan = off"),
        (*FORCE_INDEX, "hnsw.max_scan_tuples = 200"),
    )
]


@pytest.mark.parametrize(("options", "settings"), HINTED, ids=range(len(HINTED)))
def test_what_an_answer_tells_of_its_search_is_what_the_plans_of_postgres_did(
    searched: Searched, options: dict[str, Any], settings: tuple[str, ...]
) -> None:
    search, query = Search(**options), searched.vectors[0]
    with searched.engine.connect() as connection:
        for setting in settings:
            connection.execute(text(f"SET LOCAL {setting}"))
        with counting_pages(searched.engine) as pages:
            (told,) = find_matches(connection, searched.generation(), [(search, query)])
        ran = [explain_again(connection, *page) for page in pages]
    table = f"{searched.generation().table_name}"
    by_index = [[node for node in nodes if "Order By" in node] for nodes in ran]
    read = [
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for node in ran[-1]
        if node["Node Type"] == "Seq Scan" and node["Relation Name"].startswith(table)
    ]
    if told["num_rows_read"] is None:
        names = {node.get("Index Name", "") for node in ran[-1]}
        is_served = any(name.startswith(f"{table}_attributes_") and "pkey" not in name for name in names)
        assert by_index[-1] or not read or (is_served and search.mode != "hybrid")
    else:
        assert not by_index[-1]
        assert told["num_rows_read"] == pytest.approx(max(read), rel=0.2)
    if "repeated_because" in told:
        assert len(ran) > 1
        assert not by_index[-1] or search.by_document
        if "the index returned only" in told["repeated_because"]:
            found = [node["Actual Rows"] for node in ran[-2] if node["Node Type"] == "Limit"][-1]
            assert f"the index returned only {found:,.0f} of" in told["repeated_because"]
    elif len(ran) > 1:
        assert search.by_document, "more candidates were read, and no search was repeated"
    is_other_way = bool(by_index[0]) != bool(by_index[-1])
    assert ("pages_differ_because" in told) >= (is_other_way and search.offset > 0)
    known = {"nosuch"} if search.condition == parse_filter({"nosuch": 4}) else set()
    assert set(told.get("missing_fields", ())) == known
    assert "incomplete_because" not in told


def test_what_an_attempt_found_is_kept_when_the_next_one_is_ended(
    searched: Searched, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def run(self: Finder, search: Search, statement: Statement) -> Any:
        runs.append(statement)
        return run_one(self, search, statement if len(runs) == 1 else Statement("SELECT pg_sleep(60)", {}))

    run_one = Finder._run
    monkeypatch.setattr(Finder, "_run", run)
    with searched.engine.connect() as connection:
        for setting in (*FORCE_INDEX, "hnsw.max_scan_tuples = 200"):
            connection.execute(text(f"SET LOCAL {setting}"))
        searches = [(Search(limit=40, condition=SHELF["condition"]), searched.vectors[3])]
        (told,) = find_matches(connection, searched.generation(), searches, Deadline(1.0))
    assert len(runs) == 2
    assert 0 < len(told["data"]) < 40
    assert "the index returned only" in told["incomplete_because"]
    assert "no time" in told["incomplete_because"]
