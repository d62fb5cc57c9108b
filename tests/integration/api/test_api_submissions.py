"""Submissions over HTTP: what becomes a job, and what is refused and leaves nothing behind."""

import gzip
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from sqlalchemy import Engine

from tests.api_server import (
    ITEMS,
    JOB_FIELDS,
    JSON,
    NDJSON,
    SMALL,
    api_client,
    assert_problem,
    count_jobs,
    lines,
    many,
    refusing_api,
    submit,
)
from tests.models import packaged_model
from tests.waiting import wait_for
from vectormill.settings import ModelEntry

API_SETTINGS = {"chunk_max_items": 4, "max_json_bytes": 4096, "max_line_bytes": 2048}


@pytest.fixture(scope="module")
def refusing(postgres_url: str) -> Iterator[tuple[httpx.Client, Engine]]:
    with refusing_api(postgres_url, **API_SETTINGS) as client_and_engine:
        yield client_and_engine


@pytest.fixture
def refusing_client(refusing: tuple[httpx.Client, Engine]) -> httpx.Client:
    return refusing[0]


@pytest.fixture
def empty_engine(refusing: tuple[httpx.Client, Engine]) -> Engine:
    return refusing[1]


def long_items(count: int) -> list[dict[str, Any]]:
    """Enough bytes for more than one block of a stream, in few chunks."""
    return [{"key": f"k{number}", "text": "word " * 300} for number in range(count)]


def test_a_job_is_accepted_with_its_place_and_reads_the_same_there(client: httpx.Client) -> None:
    body = {
        "items": ITEMS,
        "collection": "docs",
        "priority": 3,
        "metadata": {"source": "é"},
        "options": SMALL,
    }
    answer = client.post("/v1/jobs", json=body)
    job = answer.json()
    assert answer.status_code == 202
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert answer.headers["retry-after"] == "1"
    assert set(job) >= JOB_FIELDS
    assert (job["state"], job["num_items"], job["num_chunks"], job["priority"]) == ("queued", 2, 1, 3)
    assert (job["model"], job["collection"], job["metadata"]) == ("all-MiniLM-L6-v2", "docs", {"source": "é"})
    assert job["options"]["dimensions"] == 8
    assert job["created_at"].endswith("Z")
    assert client.get(answer.headers["location"]).json() == job
    assert client.get("/v1/jobs").json() == {"data": [job], "next": None}


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_a_stream_of_lines_is_the_same_job_as_the_json_object(client: httpx.Client, encoding: str) -> None:
    content = lines(ITEMS)
    parameters: dict[str, str | int] = {
        "collection": "docs",
        "priority": 3,
        "dimensions": 8,
        "metadata": '{"source":"é"}',
    }
    streamed = client.post(
        "/v1/jobs",
        content=gzip.compress(content) if encoding == "gzip" else content,
        headers=NDJSON | {"Content-Encoding": encoding},
        params=parameters,
    ).json()
    sent = submit(client, ITEMS, collection="docs", priority=3, metadata={"source": "é"})
    differing = {"id", "created_at"}
    assert {k: v for k, v in streamed.items() if k not in differing} == {
        k: v for k, v in sent.items() if k not in differing
    }


def test_every_option_of_a_stream_is_read_as_its_own_type(client: httpx.Client) -> None:
    parameters = (
        "normalize=false&dimensions=16&prompt=query%3A%20&max_tokens=32&truncate=false&model=all-MiniLM-L6-v2"
    )
    answer = client.post(f"/v1/jobs?{parameters}", content=lines(ITEMS), headers=NDJSON)
    options = answer.json()["options"]
    assert answer.status_code == 202
    assert (options["normalize"], options["dimensions"], options["truncate"]) == (False, 16, False)
    assert (options["prompt"], options["max_tokens"]) == ("query: ", 32)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("truncate", 0, True)),  # the default
        ({"truncate": True}, ("truncate", 0, True)),
        ({"truncate": False}, ("fail", 0, False)),
        ({"truncate": False, "long_texts": "fail"}, ("fail", 0, False)),
        ({"long_texts": "passages"}, ("passages", 32, True)),  # an eighth of the model's 256 tokens
        ({"long_texts": "passages", "max_tokens": 64}, ("passages", 8, True)),
        ({"long_texts": "passages", "passage_overlap": 0}, ("passages", 0, True)),
        ({"long_texts": "passages", "passage_overlap": 127}, ("passages", 127, True)),
        ({"long_texts": "late"}, ("late", 32, True)),
    ],
)
def test_what_becomes_of_long_texts_is_said_by_either_name(
    client: httpx.Client, options: dict[str, Any], expected: tuple[str, int, bool]
) -> None:
    job = submit(client, ITEMS, options=options)
    streamed = client.post(
        "/v1/jobs",
        params={
            name: str(value).lower() if isinstance(value, bool) else value for name, value in options.items()
        },
        content=lines(ITEMS),
        headers=NDJSON,
    ).json()
    shown = job["options"]
    assert (shown["long_texts"], shown["passage_overlap"], shown["truncate"]) == expected
    assert streamed["options"] == shown


def test_only_with_late_chunking_may_a_text_to_embed_be_a_passage_of_another(client: httpx.Client) -> None:
    pairs = [{"key": "a", "text": "the city", "text_pair": "Berlin is old, and the city grows."}]
    job = submit(client, pairs, options={"long_texts": "late"})
    assert (job["num_items"], job["options"]["pooling"]) == (1, "mean/late")
    refused = client.post("/v1/jobs", json={"items": pairs, "options": {"long_texts": "passages"}})
    assert_problem(
        refused, 422, "invalid-item", "text_pair is only for items of the task score or with long_texts=late"
    )


def test_options_for_long_texts_that_cannot_be_meant_are_refused(refusing_client: httpx.Client) -> None:
    for options, code, said in (
        ({"truncate": True, "long_texts": "passages"}, "invalid-option", "truncate=true means"),
        ({"truncate": False, "long_texts": "truncate"}, "invalid-option", "leave out truncate, the older"),
        ({"long_texts": "split"}, "invalid-request", "long_texts"),
        ({"passage_overlap": 8}, "invalid-option", "requires long_texts='passages'"),
        ({"long_texts": "passages", "passage_overlap": 128}, "invalid-option", "from 0 to 127; got 128"),
        ({"long_texts": "passages", "passage_overlap": -1}, "invalid-option", "from 0 to 127"),
    ):
        answer = refusing_client.post("/v1/jobs", json={"items": ITEMS, "options": options})
        assert_problem(answer, 422, code, said)


def test_the_name_that_contradicts_is_pointed_at(refusing_client: httpx.Client) -> None:
    both = {"truncate": False, "long_texts": "passages"}
    document = refusing_client.post("/v1/jobs", json={"items": ITEMS, "options": both}).json()
    assert document["errors"][0]["pointer"] == "/options/truncate"
    query = "truncate=false&long_texts=passages"
    stream = refusing_client.post(f"/v1/jobs?{query}", content=lines(ITEMS), headers=NDJSON).json()
    assert stream["errors"][0]["parameter"] == "truncate"


def test_a_collection_of_passages_and_one_of_cut_texts_are_never_mixed(client: httpx.Client) -> None:
    submit(client, ITEMS, collection="docs")
    submit(client, ITEMS, collection="docs", options=SMALL | {"long_texts": "fail"})
    body = {"items": ITEMS, "collection": "docs", "options": SMALL | {"long_texts": "passages"}}
    answer = client.post("/v1/jobs", json=body)
    assert_problem(answer, 409, "spec-mismatch", "long_texts is 'truncate', not 'passages'")


def test_a_long_stream_becomes_many_chunks(client: httpx.Client) -> None:
    items = many(5000)
    answer = client.post(
        "/v1/jobs",
        content=iter([lines(items[:1]), lines(items[1:2500]), b"\n\n", lines(items[2500:])]),
        headers=NDJSON,
    )
    assert answer.status_code == 202
    assert (answer.json()["num_items"], answer.json()["num_chunks"]) == (5000, 1250)


def test_a_wrong_query_parameter_is_refused_by_name(refusing_client: httpx.Client) -> None:
    for query, place, said in (
        ("colection=docs", "colection", "unknown query parameter"),
        ("priority=10", "priority", "<= 9"),
        ("priority=high", "priority", "Expected `int`"),
        ("truncate=maybe", "truncate", "Expected `bool"),
        ("long_texts=cut", "long_texts", "expected one of: fail, late, passages, truncate"),
        ("model=a&model=b", "model", "more than once"),
        ("metadata=[1]", "metadata", "must be a JSON object"),
        ("metadata={", "metadata", "must be a JSON object"),
    ):
        problem = refusing_client.post(f"/v1/jobs?{query}", content=lines(ITEMS), headers=NDJSON).json()
        assert (problem["status"], problem["errors"][0]["parameter"]) == (422, place)
        assert said in problem["detail"]


@pytest.mark.parametrize(
    ("body", "status", "code", "pointer"),
    [
        ('{"items": [{"key": "a", "text": "t"}', 400, "invalid-json", None),
        ('{"items": [], "itmes": []}', 422, "invalid-request", None),
        ('{"collection": "docs"}', 422, "invalid-option", None),
        ('{"items": [{"key": "a", "text": "t"}, {"text": "b"}]}', 422, "invalid-item", "/items/1"),
        ('{"items": [{"key": "a", "text": 7}]}', 422, "invalid-item", "/items/0/text"),
        ('{"items": [{"key": "", "text": "t"}]}', 422, "invalid-item", "/items/0/key"),
        ('{"items": [{"key": "\\ud800", "text": "t"}]}', 422, "invalid-item", "/items/0/key"),
        ('{"items": [{"key": "a", "text": "t"}], "priority": 11}', 422, "invalid-request", "/priority"),
        (
            '{"items": [{"key": "a", "text": "t"}], "options": {"pool": "cls"}}',
            422,
            "invalid-request",
            "/options",
        ),
        ('{"items": [{"key": "a", "text": "t"}], "options": {"dimensions": 0}}', 422, "invalid-option", None),
        (
            '{"items": [{"key": "a", "text": "t"}], "options": {"prompt": "\\u0000"}}',
            422,
            "invalid-option",
            None,
        ),
        ('{"items": [{"key": "a", "text": "t"}], "metadata": {"a": "\\u0000"}}', 422, "invalid-option", None),
        (
            '{"items": [{"key": "a", "text": "t"}], "metadata": {"a": %s}}' % ("[" * 300 + "]" * 300),
            422,
            "invalid-option",
            None,
        ),
        ('{"items": [{"key": "a", "text": "\\ud800"}], "metadata": {"a": 1e999}}', 400, "invalid-json", None),
        ('{"items": [{"key": "a", "text": "t"}], "collection": "No Name"}', 422, "invalid-option", None),
        ('{"items": [{"key": "a", "text": "t"}], "model": "nothing"}', 422, "unknown-model", None),
        ('{"items": []}', 422, "empty-job", None),
    ],
)
def test_a_wrong_body_is_refused_with_the_place_and_nothing_is_kept(
    refusing_client: httpx.Client,
    empty_engine: Engine,
    body: str,
    status: int,
    code: str,
    pointer: str | None,
) -> None:
    answer = refusing_client.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    problem = assert_problem(answer, status, code)
    if pointer:
        assert problem["errors"][0]["pointer"] == pointer
    assert count_jobs(empty_engine) == 0


def test_two_equal_keys_are_both_named(refusing_client: httpx.Client) -> None:
    items = [*many(16), {"key": "k2", "text": "again"}]
    answer = refusing_client.post("/v1/jobs", content=lines(items), headers=NDJSON)
    assert_problem(answer, 422, "duplicate-key", "3", "17")


def test_a_bad_line_late_in_a_stream_is_named_and_takes_the_parts_before_it_away(
    refusing_client: httpx.Client, empty_engine: Engine
) -> None:
    content = lines(long_items(400)) + b'{"text": "x"}\n' + lines(many(10))
    answer = refusing_client.post("/v1/jobs", content=content, headers=NDJSON)
    problem = assert_problem(answer, 422, "invalid-item", "Line 401")
    assert problem["errors"][0]["line"] == 401
    assert count_jobs(empty_engine) == 0


@pytest.mark.parametrize(
    ("headers", "content", "status", "code"),
    [
        ({"Content-Type": "text/csv"}, b"a,b", 415, "unsupported-media-type"),
        (NDJSON | {"Content-Encoding": "br"}, b"", 415, "unsupported-encoding"),
        (NDJSON | {"Content-Encoding": "gzip"}, b"plain", 400, "invalid-gzip"),
        (NDJSON, b"", 422, "empty-job"),
        (NDJSON, b"\n \n", 422, "empty-job"),
        (NDJSON, b"x" * 3000, 413, "submission-too-large"),
        (JSON, b"x" * 5000, 413, "submission-too-large"),
        (
            JSON | {"Content-Encoding": "gzip"},
            gzip.compress(b" " * 5000, mtime=0),
            413,
            "submission-too-large",
        ),
        (NDJSON | {"Idempotency-Key": "k" * 256}, b"", 422, "invalid-request"),
    ],
)
def test_a_body_that_cannot_be_a_job_is_refused(
    refusing_client: httpx.Client, headers: dict[str, str], content: bytes, status: int, code: str
) -> None:
    assert_problem(refusing_client.post("/v1/jobs", headers=headers, content=content), status, code)


def test_a_json_body_whose_length_is_not_declared_is_bounded_too(refusing_client: httpx.Client) -> None:
    answer = refusing_client.post("/v1/jobs", content=iter([b" " * 3000, b" " * 3000]), headers=JSON)
    assert_problem(answer, 413, "submission-too-large", "4096 bytes")


def test_the_same_idempotency_key_answers_the_same_job_and_counts_once(
    client: httpx.Client, engine: Engine
) -> None:
    key = {"Idempotency-Key": "nightly-2026-11-21"}
    first = client.post("/v1/jobs", json={"items": ITEMS}, headers=key)
    again = client.post("/v1/jobs", json={"items": ITEMS}, headers=key)
    other = client.post("/v1/jobs", json={"items": ITEMS[:1]}, headers=key)
    assert first.status_code == again.status_code == 202
    assert first.json()["id"] == again.json()["id"]
    assert_problem(other, 422, "idempotency-mismatch")
    assert count_jobs(engine) == 1
    assert "vectormill_submitted_jobs_total 1.0" in client.get("/metrics").text


def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(
    refusing_client: httpx.Client, empty_engine: Engine
) -> None:
    address = urlsplit(str(refusing_client.base_url))
    head = (
        b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
        b"Content-Length: 100000000\r\n\r\n"
    )
    with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
        connection.sendall(head + lines(long_items(400)))
        wait_for(lambda: count_jobs(empty_engine) == 1)
        assert refusing_client.get("/v1/jobs").json()["data"][0]["state"] == "uploading"
    wait_for(lambda: count_jobs(empty_engine) == 0)


def test_query_parameters_count_before_what_a_json_body_says(client: httpx.Client) -> None:
    body = {
        "items": ITEMS,
        "priority": 7,
        "metadata": {"from": "body"},
        "options": {"dimensions": 16, "prompt": ""},
    }
    query: dict[str, str | int] = {
        "priority": 2,
        "dimensions": 8,
        "metadata": json.dumps({"from": "query"}),
        "collection": "docs",
    }
    answer = client.post("/v1/jobs", params=query, json=body)
    assert answer.status_code == 202, answer.text
    job = answer.json()
    assert (job["priority"], job["collection"], job["metadata"]) == (2, "docs", {"from": "query"})
    assert (job["options"]["dimensions"], job["options"]["prompt"]) == (8, "")
    assert_problem(
        client.post("/v1/jobs", params={"priorty": 2}, json=body), 422, "invalid-request", "priorty"
    )


@pytest.mark.parametrize(
    ("name", "architecture", "words"),
    [
        ("bert-base-uncased", "BertForMaskedLM", "a masked language model"),
        ("my-reranker", "Qwen3ForCausalLM", "a generative reranker"),
        ("tagger", "BertForTokenClassification", "a model that labels tokens"),
    ],
)
def test_a_model_that_nothing_says_how_to_encode_is_refused_by_what_it_is_and_makes_no_job(
    engine: Engine, tmp_path: Path, name: str, architecture: str, words: str
) -> None:
    model = Path(shutil.copytree(packaged_model(), tmp_path / name))
    (model / "modules.json").unlink()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    with api_client(engine, models={name: ModelEntry(path=str(model))}) as client:
        answer = client.post("/v1/jobs", json={"items": [{"key": "a", "text": "a"}], "model": name})
        assert_problem(answer, 422, "unsupported-model")
        assert words in answer.json()["detail"]
        assert words in client.get(f"/v1/models/{name}").json()["problem"]
    assert count_jobs(engine) == 0
