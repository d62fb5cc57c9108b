"""Pairs over HTTP, judged by StructBERT in a real worker's engine, and their scores back, in every format."""

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine, text

from tests.api_server import JSON, api_client, assert_problem, lines
from tests.chunk_work import encode_all, working
from tests.classifiers import STRUCTBERT
from tests.commands import run
from tests.database import execute
from tests.indexers import KeptSource, indexing
from tests.models import DEVICE
from tests.queries import listening
from vectormill.broker.queries import name_space
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
def client(engine: Engine, redis_url: str) -> Iterator[httpx.Client]:
    with api_client(engine, models=MODELS, chunk_max_items=4, redis_url=redis_url) as client:
        yield client


@pytest.fixture
def answers_queries(redis_url: str, model: EncodingEngine) -> Iterator[None]:
    """A worker of the model that takes queries."""
    card = Registry(MODELS).card(MODEL)
    space = name_space(card.name, card.revision, "+".join(card.pooling))
    with listening(redis_url, lambda _: None, space, engine=model):
        yield


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


def test_scores_are_kept_in_a_collection_and_told_by_sql_items_and_exports(
    client: httpx.Client, engine: Engine, model: EncodingEngine
) -> None:
    made = client.post("/v1/collections", json={"name": "duplicates", "model": MODEL, "keep_text": True})
    assert made.status_code == 201, made.text
    body = {"items": [*ITEMS, BLANK], "model": MODEL, "collection": "duplicates"}
    job = client.post("/v1/jobs", content=json.dumps(body), headers=JSON).json()
    assert set(encode_all(engine, model, MODEL)) == {"done"}
    rows = read_scores(client, job)
    found = np.array([[row["probabilities"][label] for label in ("0", "1")] for row in rows])
    assert np.abs(found - PROBABILITIES).max() < 2e-5

    by_key = {row["key"]: row for row in rows}
    kept = execute(engine, "SELECT key, score, label, text, text_pair FROM duplicates").all()
    assert {row.key: (row.label, row.text, row.text_pair) for row in kept} == {
        item["key"]: (by_key[item["key"]]["label"], item["text"], item["text_pair"]) for item in ITEMS
    }
    assert {row.key: row.score for row in kept} == pytest.approx({row["key"]: row["score"] for row in rows})

    item = client.get(f"/v1/collections/duplicates/items/{rows[0]['key']}").json()
    assert {name: item[name] for name in ("score", "label", "probabilities")} == {
        name: rows[0][name] for name in ("score", "label", "probabilities")
    }
    assert (item["text"], item["text_pair"]) == (ITEMS[0]["text"], ITEMS[0]["text_pair"])
    assert "embedding" not in item

    export = "/v1/collections/duplicates/export"
    exported = [json.loads(line) for line in client.get(export).text.splitlines()]
    assert exported == [{**by_key[row["key"]], "metadata": None} for row in exported]
    assert {row["key"] for row in exported} == by_key.keys()
    answer = client.get(export, params={"format": "parquet", "include": "score,text"})
    table = pq.read_table(io.BytesIO(answer.content))
    assert table.column_names == ["key", "score", "label", "probabilities", "text", "text_pair"]
    assert [row["label"] for row in table.to_pylist()] == [row["label"] for row in exported]
    refused = client.get(export, params={"include": "vector"})
    assert_problem(refused, 409, "wrong-kind", "include 'score' instead of 'vector'")

    told = client.get("/v1/collections/duplicates").json()
    assert (told["kind"], told["options"]["labels"]) == ("scores", ["0", "1"])
    search = client.post("/v1/collections/duplicates/search", json={"text": "a"})
    assert_problem(search, 409, "wrong-kind", "collection 'duplicates' contains scores")
    index = client.put("/v1/collections/duplicates/index", json={"policy": "hnsw"})
    assert_problem(index, 409, "wrong-kind", "An HNSW index needs vectors")
    assert client.put("/v1/collections/duplicates/index", json={"filters": ["page"]}).status_code == 202
    plan = client.get("/v1/collections/duplicates/index").json()["plan"]
    assert (plan["method"], plan["reasons"]) == (
        None,
        ["An HNSW index needs vectors, but the collection contains scores."],
    )


def test_a_pair_is_put_where_scores_are_kept_and_nowhere_else(
    client: httpx.Client, engine: Engine, model: EncodingEngine
) -> None:
    for body in ({"name": "duplicates", "model": MODEL}, {"name": "docs"}):
        assert client.post("/v1/collections", json=body).status_code == 201
    pair = {name: ITEMS[0][name] for name in ("text", "text_pair")}
    with working(engine, model, MODEL):
        put = client.put("/v1/collections/duplicates/items/a/b", json=pair, params={"wait_seconds": 60})
        assert put.status_code == 200, put.text
        failed = client.put("/v1/collections/duplicates/items/c", json={**pair, "text_pair": " "})
    assert_problem(failed, 422, "invalid-item", "The item was not encoded (empty_text): text_pair: ")
    item = client.get("/v1/collections/duplicates/items/a/b").json()
    found = [item["probabilities"][label] for label in ("0", "1")]
    assert np.abs(np.array(found) - PROBABILITIES[0]).max() < 2e-5
    problem = assert_problem(
        client.put("/v1/collections/docs/items/a", json=pair), 422, "invalid-item", "score"
    )
    assert problem["errors"][0]["pointer"] == "/text_pair"
    assert_problem(client.put("/v1/collections/none/items/a", json=pair), 404, "collection-not-found")
    assert client.delete("/v1/collections/duplicates/items/a/b").status_code == 204
    assert client.get("/v1/collections/duplicates/items/a/b").status_code == 404


def test_commands_fill_a_collection_of_scores_and_tell_of_it(
    client: httpx.Client,
    engine: Engine,
    model: EncodingEngine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = ("--api-url", str(client.base_url))
    pairs, out = tmp_path / "pairs.jsonl", tmp_path / "scores.jsonl"
    pairs.write_bytes(lines(ITEMS))
    with working(engine, model, MODEL):
        assert (
            run("score", str(pairs), "-o", str(out), "--model", MODEL, "--collection", "duplicates", *place)
            == 0
        )
        put = ("items", "put", "duplicates", "put", ITEMS[0]["text"], "--pair", ITEMS[0]["text_pair"])
        assert run(*put, "--wait", "60", *place) == 0
    scored = {row["key"]: row for row in map(json.loads, out.read_text(encoding="utf-8").splitlines())}
    assert scored.keys() == {item["key"] for item in ITEMS}
    capsys.readouterr()

    assert run("items", "get", "duplicates", "put", *place) == 0
    assert json.loads(capsys.readouterr().out)["probabilities"] == pytest.approx(
        scored[ITEMS[0]["key"]]["probabilities"], abs=1e-6
    )
    assert run("collections", "show", "duplicates", *place) == 0
    assert f"{MODEL}, scores of 0, 1" in capsys.readouterr().out
    assert run("collections", "list", *place) == 0
    assert f"\nduplicates\tscores\t{MODEL}\t" in capsys.readouterr().out
    exported = tmp_path / "exported.jsonl"
    assert run("collections", "export", "duplicates", "-o", str(exported), "--include", "score", *place) == 0
    rows = list(map(json.loads, exported.read_text(encoding="utf-8").splitlines()))
    assert [row for row in rows if row["key"] != "put"] == [
        scored[row["key"]] for row in rows if row["key"] != "put"
    ]
    found = execute(engine, "SELECT key, score, label FROM duplicates").all()
    assert {row.key for row in found} == {*scored, "put"}


def test_results_are_asked_for_where_they_are(
    client: httpx.Client, engine: Engine, model: EncodingEngine
) -> None:
    scores = submit(client, ITEMS[:2])
    too_early = client.get(f"/v1/jobs/{scores['id']}/results")
    assert_problem(too_early, 409, "wrong-job-state", "partial=true")
    assert set(encode_all(engine, model, MODEL)) == {"done"}
    elsewhere = client.get(f"/v1/jobs/{scores['id']}/vectors")
    assert_problem(elsewhere, 409, "wrong-job-state", f"/v1/jobs/{scores['id']}/results")


@pytest.mark.usefixtures("answers_queries")
def test_documents_are_ranked_by_how_they_answer_a_query(client: httpx.Client) -> None:
    documents = [case["text_b"] for case in CASES]
    body = {"model": MODEL, "query": CASES[0]["text_a"], "documents": [*documents, {"text": documents[0]}]}
    whole = client.post("/v1/rerank", json=body)
    assert whole.status_code == 200, whole.text
    best = client.post("/v1/rerank", json={**body, "top_n": 2, "return_documents": True}).json()["results"]
    ranked = whole.json()["results"]
    scores = [each["relevance_score"] for each in ranked]
    assert scores == sorted(scores, reverse=True)
    assert sorted(each["index"] for each in ranked) == list(range(len(documents) + 1))
    by_index = {each["index"]: each["relevance_score"] for each in ranked}
    assert abs(by_index[0] - PROBABILITIES[0][1]) < 2e-5
    assert by_index[0] == by_index[len(documents)]
    assert [each["index"] for each in best] == [each["index"] for each in ranked[:2]]
    assert best[0]["document"] == {"text": documents[best[0]["index"] % len(documents)]}


@pytest.mark.usefixtures("answers_queries")
def test_predictions_are_labels_of_the_reference_best_first(client: httpx.Client) -> None:
    pairs = [[case["text_a"], case["text_b"]] for case in CASES]
    many = client.post("/predict", json={"inputs": [*pairs, [pairs[0][0]]], "model": MODEL}).json()
    one = client.post("/predict", json={"inputs": pairs[0], "model": MODEL}).json()
    raw = client.post("/predict", json={"inputs": pairs[0], "model": MODEL, "raw_scores": True}).json()
    alone = client.post("/predict", json={"inputs": pairs[0][0], "model": MODEL}).json()
    found = [{each["label"]: each["score"] for each in row} for row in many]
    assert np.abs([[row["0"], row["1"]] for row in found[:-1]] - PROBABILITIES).max() < 2e-5
    assert all(row[0]["score"] >= row[1]["score"] for row in many)
    assert (one, alone) == (many[0], many[-1])
    logits = {each["label"]: each["score"] for each in raw}
    assert np.allclose([logits["0"], logits["1"]], CASES[0]["max_length_512"]["logits"], atol=1e-5)
    for body, said in (
        ({"inputs": "a", "model": "all-MiniLM-L6-v2"}, "no labels"),
        ({"inputs": [["a", "b", "c"]], "model": MODEL}, "lists of one or two texts"),
        ({"inputs": [], "model": MODEL}, "lists of one or two texts"),
        ({"inputs": [["a"], ["b", " "]], "model": MODEL}, "inputs[1][1]"),
    ):
        refused = client.post("/predict", json=body)
        assert (refused.status_code, said in refused.json()["error"]) == (400, True), refused.text


@pytest.mark.usefixtures("answers_queries")
def test_a_text_that_is_too_long_to_predict_is_cut_where_that_is_asked_for_and_refused_else(
    client: httpx.Client,
) -> None:
    body = {"inputs": [["a"], ["word " * 600]], "model": MODEL}
    refused = client.post("/predict", json=body)
    cut = client.post("/predict", json={**body, "truncate": True})
    assert (refused.status_code, "inputs[1] cannot be encoded" in refused.json()["error"]) == (400, True)
    assert [{each["label"] for each in row} for row in cut.json()] == [{"0", "1"}] * 2


def test_a_reranking_that_cannot_be_is_refused(client: httpx.Client) -> None:
    body = {"model": MODEL, "query": "a", "documents": ["b"]}
    for change, code, said in (
        ({"documents": []}, "invalid-option", "1 to 1,000"),
        ({"documents": ["b", " "]}, "invalid-item", "documents[1]"),
        ({"query": ""}, "invalid-item", "empty"),
        ({"query": "q" * 1_000_000, "documents": ["b"] * 1000}, "invalid-option", "Shorten the query"),
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

    def reindex(ours: Client, **options: Any) -> Mapping[str, Any]:
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
        looked = ours.set_source("answers", "sql", options)["check"]
        assert looked is not None
        shown = looked["rows"][0]
        assert shown["text_pair"] == ITEMS[0]["text_pair"]
        assert reindex(ours)["counts"]["num_new"] == len(ITEMS)
        found = {row.key: row.score for row in ask("SELECT key, score FROM answers")}
        scores = np.array([found[item["key"]] for item in ITEMS])
        assert np.abs(scores - PROBABILITIES[:, 1]).max() < 2e-5
        # The second text alone is another: one pair is judged again, and one that is renamed is not.
        ask("UPDATE tickets SET answer = answer || '?' WHERE id = :key", ITEMS[0])
        ask("UPDATE tickets SET id = 'renamed' WHERE id = :key", ITEMS[1])
        counts = reindex(ours)["counts"]
        assert (counts["num_changed"], counts["num_moved"], counts["num_deleted"]) == (1, 1, 0)
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
