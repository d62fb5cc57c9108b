"""Words ranked by BM25, compared with the scan of all rows, on a server that has pg_textsearch; elsewhere as before.

With `--postgres-url` the tests run on a given server.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

from indexer.indexing import PhaseProgress, build_attribute_indexes
from tests.api_server import api_client
from tests.database import ask, execute
from tests.indexed import names_of, start_run, wish
from tests.protocol import SPEC
from tests.searched import LANGUAGE, Searched, searched_collection
from tests.services import connected_engine, of_database
from vectormill.client import Client
from vectormill.collections.collection import CollectionOptions, Generation
from vectormill.collections.collections import change_collection, create_collection
from vectormill.problems import ApiError
from vectormill.search.filter import parse_filter
from vectormill.search.matches import Found, find_language, find_matches
from vectormill.search.rankings import Depth, PlannedReading, Plans, Ranking
from vectormill.search.search import BY_TEXT, HYBRID, Search

INDEX = "vectormill.generation_1_attributes_search_simple"
QUESTIONS = (
    "harbour",
    "harbour meadow",
    '"meadow harbour"',
    "harbour -meadow",
    "lantern or granite or thistle",
    "number",
    "number 17",
    "compass or 19999",
    "compass compass lantern",
    "nothing",
)
EXACT = """
    SELECT key, -(text <@> to_bm25query(:words, CAST(:index AS text))) AS score FROM vectormill.generation_1_attributes
     WHERE search @@ websearch_to_tsquery('pg_catalog.simple', :words) AND {condition}
     ORDER BY (text <@> to_bm25query(:words, CAST(:index AS text))) + 0, key COLLATE "C"
"""


def create_extension(engine: Engine, postgres_url: str) -> None:
    """Create pg_textsearch in the database of this engine as its administrator, or skip the test."""
    available = "SELECT count(*) FROM pg_available_extensions WHERE name = 'pg_textsearch'"
    if not execute(engine, available).scalar_one():
        pytest.skip("this Postgres has no extension pg_textsearch; --postgres-url names one that has it")
    with connected_engine(of_database(postgres_url, engine.url.database or "")) as admin:
        execute(admin, "CREATE EXTENSION pg_textsearch SCHEMA public")


def build(engine: Engine, generation: Generation) -> list[str]:
    """Build the indexes of attributes as an index run does, and return those for BM25."""
    context, _ = start_run(engine)
    build_attribute_indexes(PhaseProgress(context), generation)
    return [name for name in names_of(engine, generation) if "attributes_search_" in name]


@pytest.fixture(scope="module")
def searched(postgres_url: str) -> Iterator[Searched]:
    with searched_collection(postgres_url) as searched:
        create_extension(searched.engine, postgres_url)
        wish(searched.engine, index_options="'{\"bm25\": true}'", filters='\'["part", "year", "*"]\'')
        assert [f"vectormill.{name}" for name in build(searched.engine, searched.generation())] == [INDEX]
        yield searched


def rank_exactly(searched: Searched, words: str, condition: str = "true") -> list[tuple[str, float]]:
    rows = execute(searched.engine, EXACT.format(condition=condition), words=words, index=INDEX)
    return [(row.key, row.score) for row in rows]


def read_plan(connection: Connection, generation: Generation, search: Search) -> PlannedReading:
    ranking = Ranking(generation, search, {}, *find_language(connection, generation, search))
    return Plans(connection, generation).choose(ranking.write_page, Depth(search.limit))[1]


@pytest.mark.parametrize("words", QUESTIONS)
def test_pages_are_those_of_the_scan_of_all_rows(searched: Searched, words: str) -> None:
    exact = rank_exactly(searched, words)
    for limit, offset in ((1, 0), (10, 0), (10, 10), (100, 0), (7, 693), (1000, 0), (1000, 1000)):
        found = searched.search(words=words, mode=BY_TEXT, limit=limit, offset=offset)
        assert [(match["key"], match["score"]) for match in found["data"]] == exact[offset : offset + limit]
        assert not found.keys() & {"repeated_because", "pages_differ_because", "incomplete_because"}


@pytest.mark.parametrize("words", QUESTIONS)
@pytest.mark.parametrize(
    ("filter", "condition"),
    [
        ({"part": 8}, "metadata -> 'part' = '8'"),
        ({"shelf": 8}, "metadata -> 'shelf' = '8'"),
        ({"lang": "de"}, "metadata -> 'lang' = '\"de\"'"),
    ],
)
def test_filters_hold_for_rankings_by_bm25(
    searched: Searched, words: str, filter: dict[str, Any], condition: str
) -> None:
    exact = rank_exactly(searched, words, condition)
    for limit in (10, 300):
        found = searched.search(words=words, mode=BY_TEXT, limit=limit, condition=parse_filter(filter))
        assert [(match["key"], match["score"]) for match in found["data"]] == exact[:limit]


def test_frequent_words_are_read_from_the_index_and_rare_ones_are_not(searched: Searched) -> None:
    for words, by_index in (("harbour", {"text"}), ("number 17", set())):
        search = Search(words=words, mode=BY_TEXT, limit=100)
        assert ask(searched.engine, read_plan, searched.generation(), search).by_index == by_index


def test_an_index_that_returns_too_few_rows_is_not_believed(searched: Searched) -> None:
    search = Search(words="number 17", mode=BY_TEXT)
    generation = searched.generation()
    with searched.engine.begin() as connection:
        connection.execute(text("SET LOCAL enable_bitmapscan = off"))
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        assert read_plan(connection, generation, search).by_index == {"text"}
        (found,) = find_matches(connection, generation, [(search, None)])
    assert [match["key"] for match in found["data"]] == ["k17"]


@pytest.mark.parametrize("words", ["-harbour", "harbour or -meadow", "-harbour -meadow"])
def test_words_that_only_exclude_are_ranked_as_before(searched: Searched, words: str) -> None:
    search, generation = Search(words=words, mode=BY_TEXT), searched.generation()
    assert ask(searched.engine, find_language, generation, search) == (LANGUAGE, None)
    told = searched.search(words=words, mode=BY_TEXT, limit=30)
    assert len(told["data"]) == 30
    assert all(0 <= match["score"] < 1 for match in told["data"])


@pytest.mark.parametrize("words", ["harbour meadow", "lantern or granite", "number 17"])
def test_hybrid_searches_fuse_the_ranks_by_bm25(searched: Searched, words: str) -> None:
    ranks = {key: rank for rank, (key, _) in enumerate(rank_exactly(searched, words), 1)}
    for offset in (0, 10):
        found = searched.search(searched.vectors[5], words=words, mode=HYBRID, offset=offset)["data"]
        assert len(found) == 10
        assert any(match["text_rank"] for match in found) or offset
        assert all(match["text_rank"] in (None, ranks.get(match["key"])) for match in found)


def test_documents_are_ranked_by_their_best_passages(searched: Searched) -> None:
    found = searched.search(words="harbour or meadow", mode=BY_TEXT, limit=50, by_document=True)["data"]
    documents = "SELECT key, document FROM vectormill.generation_1_attributes"
    home = {row.key: row.document or row.key for row in execute(searched.engine, documents)}
    best: dict[str, str] = {}
    for key, _ in rank_exactly(searched, "harbour or meadow"):
        best.setdefault(home[key], key)
    assert [match["key"] for match in found] == list(best.values())[:50]


def test_the_index_comes_and_goes_with_the_option_and_the_language(engine: Engine, postgres_url: str) -> None:
    create_extension(engine, postgres_url)
    generation = ask(engine, create_collection, "docs", SPEC, CollectionOptions(keep_text=True), 100)
    search = Search(words="harbour", mode=BY_TEXT)
    with api_client(engine) as api, Client(str(api.base_url)) as client:
        client.set_index("docs", bm25=True, m=8)
        assert client.index("docs")["options"] == {"bm25": True, "m": 8}
        assert build(engine, generation) == ["generation_1_attributes_search_simple"]
        assert {index["method"] for index in client.index("docs")["indexes"]} >= {"bm25"}
        assert ask(engine, find_language, generation, search)[1]
        change_collection(engine, "docs", language="english")
        assert ask(engine, find_language, generation, search) == ("pg_catalog.english", None)
        assert build(engine, generation) == ["generation_1_attributes_search_english"]
        client.set_index("docs", bm25=False)
        assert build(engine, generation) == []
        change_collection(engine, "docs", keep_text=False)
        with pytest.raises(ApiError, match="bm25 needs kept texts in collection 'docs'"):
            client.set_index("docs", bm25=True)


# ---- on every server


def test_bm25_is_refused_where_the_database_does_not_have_it(engine: Engine) -> None:
    ask(engine, create_collection, "docs", SPEC, CollectionOptions(keep_text=True), 100)
    with api_client(engine) as api, Client(str(api.base_url)) as client:
        with pytest.raises(ApiError, match="the extension pg_textsearch in its database"):
            client.set_index("docs", bm25=True)
        assert client.index("docs")["options"] == {}
        client.set_index("docs", bm25=False)
        assert client.index("docs")["options"] == {"bm25": False}


def test_without_its_index_words_are_ranked_by_cover_density(engine: Engine) -> None:
    generation = ask(engine, create_collection, "docs", SPEC, CollectionOptions(keep_text=True), 100)
    wish(engine, index_options="'{\"bm25\": true}'")
    search = Search(words="harbour", mode=BY_TEXT)
    language = ask(engine, find_language, generation, search)
    assert language == (LANGUAGE, None)
    written = Ranking(generation, search, {}, *language).write_page(Depth(10)).sql
    assert "-CAST(ts_rank_cd(attributes.search, websearch_to_tsquery(" in written
    assert "to_bm25query" not in written


def test_rankings_by_bm25_are_read_from_the_index_until_it_has_too_few_rows() -> None:
    search = Search(words="harbour", mode=BY_TEXT)
    reading = PlannedReading(frozenset({"text"}), None, None)
    assert Found(search, 10, [], reading, {"text": 3}).shortage == "the index returned only 3 of 10 rows"
    assert Found(search, 10, [], reading, {"text": 10}).shortage is None
