"""Options of a search over HTTP: filters, words, many queries, a row to be like, pages, documents, fingerprints."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from tests.api_server import (
    JSON,
    api_client,
    assert_problem,
    count_jobs,
    encode_waiting,
    submit,
)
from tests.database import execute
from tests.protocol import vector_of
from tests.queries import listening
from vectormill.collections.collections import find_generation

SEARCH = "/v1/collections/docs/search"
TEXTS = ["a red apple", "a green apple", "the red sea", "a long road", "apple pie", "pie"]


def describe(number: int) -> dict[str, Any]:
    span = {"document": f"d{number // 2}", "index": number % 2, "start": 0, "end": len(TEXTS[number])}
    return {"number": number, "lang": ("de", "en")[number % 2], "_passage": span}


@pytest.fixture
def client(engine: Engine, redis_url: str) -> Iterator[httpx.Client]:
    with api_client(engine, max_search_queries=3, redis_url=redis_url) as client:
        items = [
            {"key": f"k{number}", "text": content, "metadata": describe(number)}
            for number, content in enumerate(TEXTS)
        ]
        submit(client, [{"key": "first", "text": "first"}], collection="docs")
        encode_waiting(engine)
        execute(engine, "UPDATE vectormill.collections SET keep_text = true")
        submit(client, items, collection="docs")
        encode_waiting(engine)
        yield client


def ask(client: httpx.Client, **query: Any) -> dict[str, Any]:
    answer = client.post(SEARCH, json=query)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def keys_of(answer: dict[str, Any]) -> list[str]:
    return [match["key"] for match in answer["data"]]


def embed(content: str) -> list[float]:
    values: list[float] = vector_of(content.encode()).tolist()
    return values


def test_only_rows_that_fit_the_filter_are_found(client: httpx.Client) -> None:
    found = ask(client, embedding=embed("pie"), filter={"lang": "de", "number": {"gte": 2}})
    assert set(keys_of(found)) == {"k2", "k4"}
    without = ask(client, embedding=embed("pie"), filter={"number": {"exists": False}})
    assert keys_of(without) == ["first"]
    answer = client.post(SEARCH, json={"text": "pie", "filter": {"number": {"above": 2}}})
    assert_problem(answer, 422, "invalid-option", "filter.number.above: unknown operator")


def test_words_need_no_worker_and_both_rankings_are_told_apart(
    client: httpx.Client, engine: Engine, redis_url: str
) -> None:
    found = ask(client, text='"red apple" or pie or road -long', mode="text")
    assert set(keys_of(found)) == {"k0", "k4", "k5"}
    assert count_jobs(engine) == 2
    fused = ask(client, text="apple", embedding=embed("pie"), hybrid=True, weights={"text": 0.5})
    places = {match["key"]: (match["vector_rank"], match["text_rank"]) for match in fused["data"]}
    assert places["k5"] == (1, None)
    assert {key for key, (_, by_words) in places.items() if by_words} == {"k0", "k1", "k4"}
    with listening(redis_url):
        encoded = ask(client, text="pie", mode="hybrid", limit=1)
    assert encoded["data"][0] | {"metadata": None} == {
        "key": "k5", "score": pytest.approx(2 / 61), "metadata": None, "vector_rank": 1, "text_rank": 1,
        "document": "d2", "passage": {"index": 1, "start": 0, "end": 3},
    }  # fmt: skip


def test_weights_are_refused_where_there_is_one_ranking(client: httpx.Client) -> None:
    for mode in ({}, {"mode": "vector"}, {"hybrid": False}):
        answer = client.post(SEARCH, json={"embedding": embed("pie"), "weights": {"text": 2}, **mode})
        assert_problem(answer, 422, "invalid-option", "use mode hybrid")
    by_words = client.post(SEARCH, json={"text": "pie", "mode": "text", "weights": {"text": 2}})
    assert_problem(by_words, 422, "invalid-option", "omit weights")


def test_a_collection_without_texts_says_what_a_search_by_words_needs(
    client: httpx.Client, engine: Engine
) -> None:
    execute(engine, "UPDATE vectormill.collections SET keep_text = false")
    answer = client.post(SEARCH, json={"text": "pie", "mode": "text"})
    assert_problem(answer, 409, "texts-not-kept", "--keep-text")


def test_many_queries_go_to_a_worker_in_one_message_and_are_answered_in_their_order(
    client: httpx.Client, engine: Engine, redis_url: str
) -> None:
    seen: list[int] = []
    queries = [
        {"text": "pie", "limit": 1},
        {"more_like": "k5", "limit": 2},
        {"text": "the red sea", "limit": 1},
    ]
    with listening(redis_url, lambda request: seen.append(len(request.texts))):
        answer = ask(client, queries=queries)
    assert [keys_of(one)[:1] for one in (answer["data"][0], answer["data"][2])] == [["k5"], ["k2"]]
    assert len(keys_of(answer["data"][1])) == 2
    assert seen == [2]
    assert count_jobs(engine) == 2
    alone = ask(client, more_like="k5", limit=2)
    assert alone == answer["data"][1]


def test_a_fault_of_one_query_is_told_with_its_place(client: httpx.Client) -> None:
    cases: list[tuple[dict[str, Any], int, str, str]] = [
        (
            {"queries": [{"text": "a"}, {"text": ""}]},
            422,
            "invalid-item",
            "queries[1].text cannot be encoded: ",
        ),
        ({"queries": [{"text": "a"}, {}]}, 422, "invalid-option", "queries[1]: A search needs"),
        ({"queries": [{"text": "a"}] * 4}, 422, "invalid-option", "VECTORMILL_MAX_SEARCH_QUERIES allows 3"),
        ({"queries": [{"text": "a"}], "limit": 3}, 422, "invalid-option", "one query or `queries`"),
        ({"queries": []}, 422, "invalid-request", "queries"),
        (
            {"queries": [{"text": "a", "limit": 1000, "include": ["vector"]}] * 2},
            422,
            "invalid-option",
            "add up to",
        ),
        ({"more_like": "nobody"}, 404, "item-not-found", "'nobody'"),
        ({"more_like": "a\0"}, 404, "item-not-found", "NUL"),
        ({"text": "a", "hybrid": True, "mode": "text"}, 422, "invalid-option", "hybrid=true"),
        (
            {"text": "a", "embedding": [1] * 8, "mode": "text"},
            422,
            "invalid-option",
            "does not compare vectors",
        ),
        ({"text": "a", "mode": "words"}, 422, "invalid-request", "mode"),
        ({"text": "a", "offset": 1001}, 422, "invalid-request", "offset"),
        ({"text": "a", "ef_search": 0}, 422, "invalid-request", "ef_search"),
        ({"text": "a", "fingerprint": "x"}, 422, "invalid-request", "fingerprint"),
        ({"text": "a", "include": ["keys"]}, 422, "invalid-request", "include"),
    ]
    for body, status, code, said in cases:
        assert_problem(client.post(SEARCH, json=body), status, code, said)
    surrogate = client.post(SEARCH, content=b'{"more_like": "\\ud800"}', headers=JSON)
    assert_problem(surrogate, 404, "item-not-found", "surrogate")
    surrogate = client.post(
        SEARCH, content=b'{"text": "a", "mode": "text", "filter": {"\\ud800": 1}}', headers=JSON
    )
    assert_problem(surrogate, 422, "invalid-option", "surrogate")


def test_what_is_included_is_what_was_asked_for(client: httpx.Client) -> None:
    (bare,) = ask(client, embedding=embed("pie"), limit=1, include=[])["data"]
    assert set(bare) == {"key", "score", "document", "passage"}
    (full,) = ask(client, embedding=embed("pie"), limit=1, include=["vector", "text", "metadata"])["data"]
    assert (full["text"], full["metadata"]) == ("pie", describe(5))
    assert full["embedding"] == pytest.approx(embed("pie"), abs=1e-3)


def test_pages_lead_to_the_end(client: httpx.Client) -> None:
    found: list[str] = []
    offset: int | None = 0
    while offset is not None:
        page = ask(client, embedding=embed("pie"), limit=3, offset=offset)
        found += keys_of(page)
        offset = page.get("next_offset")
    assert len(found) == len(set(found)) == 7
    assert found == keys_of(ask(client, embedding=embed("pie"), limit=7))


def test_each_document_is_answered_once(client: httpx.Client) -> None:
    found = ask(client, embedding=embed("pie"), group_by="document")
    documents = [match.get("document", match["key"]) for match in found["data"]]
    assert sorted(documents) == ["d0", "d1", "d2", "first"]
    assert found["data"][0]["key"] == "k5"


def test_a_search_for_another_vector_space_is_refused_with_the_difference(
    client: httpx.Client, engine: Engine
) -> None:
    with engine.connect() as connection:
        fingerprint = find_generation(connection, "docs").spec.fingerprint()
    assert ask(client, embedding=embed("pie"), fingerprint=fingerprint)["data"]
    answer = client.post(SEARCH, json={"embedding": embed("pie"), "fingerprint": "0" * 16})
    assert_problem(answer, 409, "spec-mismatch", "0000000000000000", fingerprint, "8 dimensions")
    other = submit(client, [{"key": "a", "text": "a"}], collection="other", options={"dimensions": 16})
    assert other["collection"] == "other"
    with engine.connect() as connection:
        theirs = find_generation(connection, "other").spec.fingerprint()
    answer = client.post(SEARCH, json={"embedding": embed("pie"), "fingerprint": theirs})
    assert_problem(answer, 409, "spec-mismatch", "dimensions is 8, not 16")
