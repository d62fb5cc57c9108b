"""Pairs over HTTP, judged by StructBERT in a real worker's engine, and their scores back, in every format."""

import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine, text

from tests.api_server import JSON, api_client, assert_problem, lines
from tests.chunk_work import encode_all, working
from tests.classifiers import STRUCTBERT
from tests.indexers import KeptSource, indexing
from tests.models import DEVICE
from vectormill.client import Client
from vectormill.models.registry import Registry
from vectormill.settings import ModelEntry
from worker.engine.engine import Engine as EncodingEngine
from worker.settings import WorkerSettings

MODEL = "structbert"
MODELS = {MODEL: ModelEntry(path=str(STRUCTBERT / "model"))}
CASES = [
    case
    for case in json.loads((STRUCTBERT / "cases.json").read_text(encoding="utf-8"))["cases"]
    if case["text_b"] is not None and case["text_a"].strip() and case["text_b"].strip()
][:9]
ITEMS = [{"key": case["id"], "text": case["text_a"], "text_pair": case["text_b"]} for case in CASES]
PROBABILITIES = np.array([case["max_length_512"]["probs"] for case in CASES])
BLANK = {"key": "blank", "text": "a", "text_pair": " "}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EncodingEngine]:
    settings = WorkerSettings(backend="torch", precision="fp32", threads=1)
    card = Registry(MODELS).card(MODEL, weights=True)
    engine = EncodingEngine(card, DEVICE, settings, tmp_path_factory.mktemp("cache"))
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def client(engine: Engine) -> Iterator[httpx.Client]:
    with api_client(engine, models=MODELS, chunk_max_items=4) as client:
        yield client


def submit(client: httpx.Client, items: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    body = {"items": items, "model": MODEL, "options": options}
    answer = client.post("/v1/jobs", content=json.dumps(body), headers=JSON)
    assert answer.status_code == 202, answer.text
    job: dict[str, Any] = answer.json()
    return job


def read_scores(client: httpx.Client, job: dict[str, Any]) -> list[dict[str, Any]]:
    answer = client.get(f"/v1/jobs/{job['id']}/results")
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def test_scores_are_those_of_the_reference_in_every_format(
    client: httpx.Client, engine: Engine, model: EncodingEngine
) -> None:
    job = submit(client, [*ITEMS, BLANK])
    assert (job["options"]["task"], job["options"]["labels"]) == ("score", ["0", "1"])
    assert set(encode_all(engine, model, MODEL)) == {"done"}
    rows = read_scores(client, job)
    assert [row["key"] for row in rows] == [item["key"] for item in ITEMS]
    found = np.array([[row["probabilities"][label] for label in ("0", "1")] for row in rows])
    assert np.abs(found - PROBABILITIES).max() < 2e-5
    assert [row["score"] for row in rows] == found[:, 1].tolist()
    assert [row["label"] for row in rows] == [str(best) for best in PROBABILITIES.argmax(axis=1)]

    answer = client.get(f"/v1/jobs/{job['id']}/results", params={"format": "parquet"})
    table = pq.read_table(io.BytesIO(answer.content)).to_pylist()
    assert [row["key"] for row in table] == [row["key"] for row in rows]
    assert np.allclose([row["score"] for row in table], found[:, 1], atol=1e-7)
    assert [row["label"] for row in table] == [row["label"] for row in rows]
    assert np.allclose([list(row["probabilities"].values()) for row in table], found, atol=1e-7)

    errors = client.get(f"/v1/jobs/{job['id']}/errors").json()["data"]
    assert [(error["key"], error["code"]) for error in errors] == [("blank", "empty_text")]
    assert errors[0]["detail"].startswith("text_pair: ")


def test_a_stream_of_pairs_and_of_texts_alone(
    client: httpx.Client, engine: Engine, model: EncodingEngine
) -> None:
    items = [*ITEMS[:3], {"key": "alone", "text": CASES[0]["text_a"]}]
    answer = client.post(
        "/v1/jobs",
        params={"model": MODEL, "activation": "raw"},
        content=lines(items),
        headers={"Content-Type": "application/x-ndjson"},
    )
    assert answer.status_code == 202, answer.text
    assert set(encode_all(engine, model, MODEL)) == {"done"}
    rows = read_scores(client, answer.json())
    assert [row["key"] for row in rows] == [item["key"] for item in items]
    logits = np.array([list(row["probabilities"].values()) for row in rows[:3]])
    assert np.abs(logits - [case["max_length_512"]["logits"] for case in CASES[:3]]).max() < 1e-5


def test_a_pair_that_nobody_reads_is_refused(client: httpx.Client) -> None:
    embed = {"items": [{"key": "a", "text": "b"}, ITEMS[0]]}
    answer = client.post("/v1/jobs", json=embed)
    problem = assert_problem(answer, 422, "invalid-item", "items[1].text_pair", "task score")
    assert problem["errors"][0]["pointer"] == "/items/1/text_pair"
    body = lines([{"key": "a", "text": "b"}, ITEMS[0]])
    stream = client.post("/v1/jobs", content=body, headers={"Content-Type": "application/x-ndjson"})
    assert_problem(stream, 422, "invalid-item", "Line 2", "task score")
    put = client.put("/v1/collections/docs/items/a", json={"text": "b", "text_pair": "c"})
    assert put.status_code == 422


def test_results_are_asked_for_where_they_are(
    client: httpx.Client, engine: Engine, model: EncodingEngine
) -> None:
    scores = submit(client, ITEMS[:2])
    too_early = client.get(f"/v1/jobs/{scores['id']}/results")
    assert_problem(too_early, 409, "wrong-job-state", "partial=true")
    assert set(encode_all(engine, model, MODEL)) == {"done"}
    elsewhere = client.get(f"/v1/jobs/{scores['id']}/vectors")
    assert_problem(elsewhere, 409, "wrong-job-state", f"/v1/jobs/{scores['id']}/results")


def test_documents_are_ranked_by_how_they_answer_a_query(
    client: httpx.Client, engine: Engine, model: EncodingEngine
) -> None:
    documents = [case["text_b"] for case in CASES]
    body = {"model": MODEL, "query": CASES[0]["text_a"], "documents": [*documents, {"text": documents[0]}]}
    with working(engine, model, MODEL):
        whole = client.post("/v1/rerank", json=body)
        assert whole.status_code == 200, whole.text
        best = client.post("/v1/rerank", json={**body, "top_n": 2, "return_documents": True}).json()[
            "results"
        ]
    ranked = whole.json()["results"]
    scores = [each["relevance_score"] for each in ranked]
    assert scores == sorted(scores, reverse=True)
    assert sorted(each["index"] for each in ranked) == list(range(len(documents) + 1))
    by_index = {each["index"]: each["relevance_score"] for each in ranked}
    assert abs(by_index[0] - PROBABILITIES[0][1]) < 2e-5
    assert by_index[0] == by_index[len(documents)]
    assert [each["index"] for each in best] == [each["index"] for each in ranked[:2]]
    assert best[0]["document"] == {"text": documents[best[0]["index"] % len(documents)]}


def test_a_reranking_that_cannot_be_is_refused(client: httpx.Client) -> None:
    body = {"model": MODEL, "query": "a", "documents": ["b"]}
    for change, code, said in (
        ({"documents": []}, "invalid-option", "1 to 1,000"),
        ({"documents": ["b", " "]}, "invalid-item", "documents[1]"),
        ({"query": ""}, "invalid-item", "empty"),
        ({"top_n": 0}, "invalid-request", "top_n"),
        ({"model": "none"}, "unknown-model", "none"),
    ):
        assert_problem(client.post("/v1/rerank", json={**body, **change}), 422, code, said)


def test_the_scores_of_a_table_of_pairs_are_kept_in_step(
    client: httpx.Client, engine: Engine, model: EncodingEngine
) -> None:
    def ask(statement: str, values: dict[str, Any] | None = None) -> list[Any]:
        with engine.begin() as connection:
            result = connection.execute(text(statement), values or {})
            return list(result) if result.returns_rows else []

    def reindex(ours: Client, **options: Any) -> dict[str, Any]:
        run = ours.wait_run(ours.reindex("answers", **options)["id"], timeout_seconds=60, poll_seconds=0.05)
        assert (run["state"], run["error"]) == ("completed", None)
        return run

    ask("CREATE TABLE tickets (id text PRIMARY KEY, question text, answer text)")
    for item in ITEMS:
        ask("INSERT INTO tickets VALUES (:key, :text, :text_pair)", item)
    body = {"name": "answers", "model": MODEL, "keep_text": True}
    assert client.post("/v1/collections", json=body).status_code == 201
    options = {"query": "SELECT * FROM tickets", "key": "id", "text": "question", "text_pair": "answer"}
    source = KeptSource()
    with (
        Client(str(client.base_url)) as ours,
        working(engine, model, MODEL),
        indexing(engine, source, source.open),
    ):
        shown = ours.set_source("answers", "sql", options)["check"]["rows"][0]
        assert shown["text_pair"] == ITEMS[0]["text_pair"]
        assert reindex(ours)["counts"]["num_new"] == len(ITEMS)
        found = {row.key: row.score for row in ask("SELECT key, score FROM answers")}
        scores = np.array([found[item["key"]] for item in ITEMS])
        assert np.abs(scores - PROBABILITIES[:, 1]).max() < 2e-5
        # The second text alone is another: one pair is judged again, and one that is renamed is not.
        ask("UPDATE tickets SET answer = answer || '?' WHERE id = :key", ITEMS[0])
        ask("UPDATE tickets SET id = 'renamed' WHERE id = :key", ITEMS[1])
        counts = reindex(ours)["counts"]
        assert (counts["num_changed"], counts["num_moved"], counts["num_deleted"]) == (1, 1, 1)
        ((renamed,),) = ask("SELECT score FROM answers WHERE key = 'renamed'")
        assert renamed == found[ITEMS[1]["key"]]
        run = reindex(ours, activation="raw")
        assert run["report"]["checking"]["texts"]["num_compared"] == len(ITEMS)
        assert run["report"]["checking"]["scores"]["num_broken"] == 0
        # What the collection keeps itself is pairs too.
        ours.set_source("answers", "own_texts")
        again = reindex(ours, activation="softmax")
        assert again["counts"]["num_seen"] == len(ITEMS)
        ((renamed,),) = ask("SELECT score FROM answers WHERE key = 'renamed'")
        assert renamed == pytest.approx(found[ITEMS[1]["key"]], abs=1e-6)
