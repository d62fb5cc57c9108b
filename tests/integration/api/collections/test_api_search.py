"""Search over HTTP: by vector, and by a text that a worker encodes."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Engine, text

from tests.api_server import (
    JSON,
    api_client,
    assert_problem,
    count_jobs,
    encode_waiting,
    many,
    submit,
)
from tests.database import ask
from tests.protocol import vector_of
from tests.queries import listening
from vectormill.broker.queries import name_space
from vectormill.collections.collections import find_generation
from vectormill.models.registry import Registry, find_packaged_model
from vectormill.settings import Settings

SEARCH = "/v1/collections/docs/search"


@pytest.fixture
def client(engine: Engine, redis_url: str) -> Iterator[httpx.Client]:
    with api_client(engine, search_timeout_seconds=60, redis_url=redis_url) as client:
        items = [*many(20), {"key": "page", "text": "a page", "metadata": {"page": 7}}]
        submit(client, items, collection="docs")
        encode_waiting(engine)
        yield client


def test_the_row_of_the_same_text_is_the_nearest_and_the_query_leaves_no_job(
    client: httpx.Client, engine: Engine, redis_url: str
) -> None:
    with listening(redis_url):
        answer = client.post(SEARCH, json={"text": "a page", "limit": 3})
    assert answer.status_code == 200, answer.text
    best, *others = answer.json()["data"]
    assert best == {"key": "page", "score": pytest.approx(1, abs=1e-3), "metadata": {"page": 7}}
    assert len(others) == 2
    assert all(match["score"] < 0.999 and match["metadata"] is None for match in others)
    assert count_jobs(engine) == 1


def test_a_vector_finds_its_own_row(client: httpx.Client) -> None:
    answer = client.post(SEARCH, json={"embedding": vector_of(b"text 4").tolist()})
    assert answer.json()["data"][0]["key"] == "k4"
    assert len(answer.json()["data"]) == 10


@pytest.mark.parametrize("vector_type", ["float32", "float16", "binary"])
def test_a_vector_of_any_length_finds_what_lies_in_its_direction(engine: Engine, vector_type: str) -> None:
    query = vector_of(b"text 4").astype(float)
    with api_client(engine) as client:
        options = {"dimensions": 8, "vector_type": vector_type}
        submit(client, many(20), collection="docs", options=options)
        encode_waiting(engine)
        near, *far = [
            client.post(SEARCH, json={"embedding": (query * length).tolist(), "limit": 3}).json()["data"]
            for length in (1, 1e-300, 1e-20, 7e4, 1e30, 1e300)
        ]
    assert near[0]["key"] == "k4"
    for found in far:
        assert [match["key"] for match in found] == [match["key"] for match in near]
        scores = [match["score"] for match in near]
        assert [match["score"] for match in found] == pytest.approx(scores, abs=1e-3)


def test_searches_that_cannot_be_are_refused_with_the_reason(client: httpx.Client) -> None:
    cases = [
        ({"embedding": [1.0, 2.0]}, "invalid-option", "2 dimensions", "has 8"),
        ({"embedding": [0] * 8}, "invalid-option", "no direction"),
        ({"embedding": [1] * 8, "text": "both"}, "invalid-option", "exactly one"),
        ({}, "invalid-option", "exactly one"),
        ({"text": ""}, "invalid-item", "empty"),
        ({"text": "a\0b"}, "invalid-item", "NUL"),
        ({"text": "t", "limit": 0}, "invalid-request", "limit"),
        ({"text": "t", "limit": 1001}, "invalid-request", "limit"),
        ({"text": "t", "top": 3}, "invalid-request", "top"),
    ]
    for body, code, *said in cases:
        assert_problem(client.post(SEARCH, json=body), 422, str(code), *map(str, said))
    assert_problem(client.post(SEARCH, content=b"{", headers=JSON), 400, "invalid-json")
    assert_problem(
        client.post("/v1/collections/other/search", json={"text": "t"}), 404, "collection-not-found"
    )


@pytest.mark.usefixtures("client")
def test_without_a_worker_a_search_gives_up_in_time_and_leaves_no_job(engine: Engine, redis_url: str) -> None:
    with api_client(engine, search_timeout_seconds=0.3, redis_url=redis_url) as client:
        answer = client.post(SEARCH, json={"text": "a page"})
    assert_problem(answer, 503, "encoding-timeout", "0.3 s", "No live worker serves all-MiniLM-L6-v2")
    assert answer.headers["retry-after"]
    assert count_jobs(engine) == 1


def test_a_query_gets_the_prompt_that_its_model_has_for_queries(
    engine: Engine, redis_url: str, tmp_path: Path
) -> None:
    packaged = find_packaged_model()
    assert packaged is not None
    shutil.copytree(packaged, tmp_path, ignore=lambda *_: ["model.safetensors"], dirs_exist_ok=True)
    (tmp_path / "model.safetensors").symlink_to(packaged / "model.safetensors")
    config = tmp_path / "config_sentence_transformers.json"
    config.unlink(missing_ok=True)
    config.write_text(json.dumps({"prompts": {"query": "query: ", "passage": "passage: "}}))
    models = {"e5": {"path": str(tmp_path)}}
    card = Registry(Settings.model_validate({"models": models}).models).card("e5")
    space = name_space(card.name, card.revision, "+".join(card.pooling))
    with api_client(engine, models=models, search_timeout_seconds=60, redis_url=redis_url) as client:
        submit(client, many(2), model="e5", collection="docs", options={"dimensions": 8, "prompt": "passage"})
        encode_waiting(engine)
        seen: list[str | None] = []
        with listening(redis_url, lambda request: seen.append(request.spec.prompt), space):
            assert client.post(SEARCH, json={"text": "text 1"}).status_code == 200
    assert seen == ["query: "]


def test_a_search_that_takes_too_long_is_ended_and_says_what_helps(
    client: httpx.Client, engine: Engine
) -> None:
    table = ask(engine, find_generation, "docs").table_name
    # Whoever reads the table waits for us.
    with engine.begin() as connection, api_client(engine, search_timeout_seconds=0.3) as impatient:
        connection.execute(text(f"LOCK TABLE vectormill.{table} IN ACCESS EXCLUSIVE MODE"))
        answer = impatient.post(SEARCH, json={"embedding": vector_of(b"text 4").tolist()})
    assert_problem(answer, 503, "search-timeout", "more than 0.3 s", "`vectormill collections index docs`")
    answer = client.post(SEARCH, json={"embedding": vector_of(b"text 4").tolist()})
    assert answer.json()["data"][0]["key"] == "k4"


def test_collections_come_in_pages_by_name(client: httpx.Client, engine: Engine) -> None:
    for name in ("bees", "ants", "eels"):
        submit(client, many(1), collection=name)
    found, after, num_pages = [], None, 0
    while num_pages == 0 or after is not None:
        parameters = {"limit": 3} | ({"after": after} if after else {})
        page = client.get("/v1/collections", params=parameters).json()
        found += [collection["name"] for collection in page["data"]]
        after, num_pages = page["next"], num_pages + 1
    assert (found, num_pages) == (["ants", "bees", "docs", "eels"], 2)
    assert_problem(client.get("/v1/collections", params={"limit": 0}), 422, "invalid-request")
