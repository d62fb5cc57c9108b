"""Batches with the official client: a file of requests becomes a job, and the job a file of answers."""

import base64
from uuid import UUID

import httpx
import numpy as np
import openai
import pytest
from sqlalchemy import Engine, text

from tests.api_server import api_client, delete, encode_waiting
from tests.database import ask, execute
from tests.protocol import make_items, submit, vector_of
from tests.request_batches import MODEL, create, finish, keep_all, line, load_file, official_client, write
from vectormill.jobs.deletion import discard_expired_jobs
from vectormill.jobs.jobs import find_job, pause_job, resume_job


def test_every_line_has_its_answer_under_its_id_in_the_order_of_the_file(
    client: openai.OpenAI, engine: Engine
) -> None:
    batch = create(
        client,
        write(
            line("one", "a text"),
            line("many", ["b", "c"]),
            line("packed", "d", encoding_format="base64", user="me"),
        ),
        metadata={"purpose": "test"},
    )
    assert (batch.status, batch.object, batch.endpoint) == ("validating", "batch", "/v1/embeddings")
    assert batch.expires_at == batch.created_at + 86400
    finish(engine)
    batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.model, batch.metadata) == ("completed", MODEL, {"purpose": "test"})
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 3, "completed": 3, "failed": 0}
    assert batch.usage is not None
    assert batch.usage.total_tokens == 40
    assert batch.error_file_id is None
    one, many, packed = load_file(client, batch.output_file_id)
    assert [each["custom_id"] for each in (one, many, packed)] == ["one", "many", "packed"]
    assert one["error"] is None
    assert one["response"]["status_code"] == 200
    body = openai.types.CreateEmbeddingResponse.model_validate(many["response"]["body"])
    assert (body.model, body.usage.total_tokens) == (MODEL, 20)
    for data, given in zip(body.data, (b"b", b"c"), strict=True):
        assert np.array_equal(np.array(data.embedding, dtype=np.float32), vector_of(given))
    coded = packed["response"]["body"]["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(coded), dtype="<f4"), vector_of(b"d"))


REFUSED = {
    b"no json": ("invalid_json_line", None),
    b'{"custom_id": "half"': ("invalid_json_line", None),
    write(line("unknown", "x", colour="red")).strip(): ("invalid_request", "unknown"),
    write(line("other", "x", model="no-such-model")).strip(): ("mismatched_model", "other"),
    write(line("wide", "x", dimensions=7)).strip(): ("mismatched_options", "wide"),
    write(line("elsewhere", "x", url="/v1/chat/completions")).strip(): ("mismatched_endpoint", "elsewhere"),
    write(line("good", "again")).strip(): ("duplicate_custom_id", "good"),
    write(line("none", [])).strip(): ("invalid_request", "none"),
    write(line("", "x")).strip(): ("invalid_custom_id", None),
    write({**line("got", "x"), "method": "GET"}).strip(): ("invalid_method", "got"),
    write(line("x" * 3000, "x")).strip(): ("invalid_custom_id", None),
}


def test_a_line_that_is_wrong_is_told_of_in_the_error_file_and_takes_no_other_with_it(
    client: openai.OpenAI, engine: Engine
) -> None:
    refused = list(REFUSED)
    batch = create(
        client, write(line("good", "x"), *refused[:6], b"", line("empty", ["y", "  "]), *refused[6:])
    )
    finish(engine)
    batch = client.batches.retrieve(batch.id)
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 13, "completed": 1, "failed": 12}
    assert [each["custom_id"] for each in load_file(client, batch.output_file_id)] == ["good"]
    errors = load_file(client, batch.error_file_id)
    empty = errors.pop(6)
    assert (empty["custom_id"], empty["response"]["body"]["error"]["code"]) == ("empty", "empty_text")
    for given, error in zip(refused, errors, strict=True):
        code, custom_id = REFUSED[given]
        assert error["response"]["status_code"] == 400
        told = error["response"]["body"]["error"]
        assert (told["code"], error["custom_id"]) == (code, custom_id), told
        assert told["message"].startswith("Line ")
    assert execute(engine, "SELECT count(*) FROM vectormill.request_refusals").scalar_one() == 0


def test_a_file_without_a_line_that_can_be_answered_fails_with_its_reasons(
    client: openai.OpenAI, engine: Engine
) -> None:
    for content, code in (
        (b"", "empty_file"),
        (b"\n\n", "empty_file"),
        (b"nonsense\n", "invalid_json_line"),
        (write(line("a", "b", model="no-such-model")), "model_not_found"),
        (write(line("a", "b", dimensions=9999)), "invalid_request"),
    ):
        batch = create(client, content)
        finish(engine)
        batch = client.batches.retrieve(batch.id)
        assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [fault.code for fault in batch.errors.data] == [code]


def test_a_rerank_batch_orders_the_documents_of_each_line(client: openai.OpenAI, engine: Engine) -> None:
    def rank(custom_id: str, **more: object) -> dict[str, object]:
        body = {"model": MODEL, "query": "q", "documents": ["a", {"text": "b"}, "c"]} | more
        return {"custom_id": custom_id, "method": "POST", "url": "/v1/rerank", "body": body}

    batch = create(
        client, write(rank("all"), rank("two", top_n=2, return_documents=True)), endpoint="/v1/rerank"
    )
    finish(engine)
    batch = client.batches.retrieve(batch.id)
    everything, two = (each["response"]["body"] for each in load_file(client, batch.output_file_id))
    scores = [result["relevance_score"] for result in everything["results"]]
    assert scores == sorted(scores, reverse=True)
    assert sorted(result["index"] for result in everything["results"]) == [0, 1, 2]
    best = everything["results"][0]
    assert two["results"][0]["index"] == best["index"]
    assert two["results"][0]["document"] == {"text": "abc"[best["index"]]}
    assert (len(two["results"]), two["usage"]["total_tokens"]) == (2, 30)


def test_a_batch_is_cancelled_before_its_lines_are_read_and_not_when_it_has_ended(
    client: openai.OpenAI, engine: Engine
) -> None:
    early = create(client, write(line("a", "b")))
    assert client.batches.cancel(early.id).status == "cancelling"
    keep_all(engine)
    early = client.batches.retrieve(early.id)
    assert (early.status, early.output_file_id) == ("cancelled", None)
    late = create(client, write(line("a", "b")), metadata={"another": "one"})
    finish(engine)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(late.id)


def test_a_batch_cancelled_in_progress_keeps_what_is_done_and_tells_of_the_rest(
    client: openai.OpenAI, engine: Engine
) -> None:
    batch = create(client, write(*(line(n, "text " * 400 + str(n)) for n in range(100))))
    keep_all(engine)
    job_id = get_job_id(client, batch.id)
    with engine.begin() as connection:  # all but one chunk wait
        connection.execute(
            text("UPDATE vectormill.chunks SET available_at = now() + interval '1 day' WHERE seq > 0")
        )
    encode_waiting(engine)
    running = client.batches.retrieve(batch.id)
    assert running.request_counts is not None
    assert 0 < running.request_counts.completed < 100
    assert client.batches.cancel(batch.id).status == "cancelling"
    assert client.batches.cancel(batch.id).status == "cancelling"
    keep_all(engine)
    batch = client.batches.retrieve(batch.id)
    assert batch.status == "cancelled"
    assert batch.cancelled_at is not None
    assert batch.request_counts is not None
    answers, errors = (load_file(client, each) for each in (batch.output_file_id, batch.error_file_id))
    assert (len(answers), len(errors)) == (batch.request_counts.completed, batch.request_counts.failed)
    assert [each["custom_id"] for each in answers + errors] == [str(n) for n in range(100)]
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    assert ask(engine, find_job, job_id).state == "cancelled"


def get_job_id(client: openai.OpenAI, batch_id: str) -> UUID:
    told = client.batches.retrieve(batch_id).to_dict()["job_id"]
    assert isinstance(told, str)
    return UUID(told)


def test_a_batch_whose_window_is_over_expires_with_the_answers_that_are_there(
    client: openai.OpenAI, engine: Engine
) -> None:
    batch = create(client, write(line("a", "b")), completion_window="1m")
    keep_all(engine)
    execute(engine, "UPDATE vectormill.request_batches SET expires_at = now()")
    keep_all(engine)
    batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.output_file_id) == ("expired", None)
    (error,) = load_file(client, batch.error_file_id)
    assert (error["custom_id"], error["response"], error["error"]["code"]) == ("a", None, "batch_expired")


def test_a_job_that_somebody_cancels_ends_its_batch(
    client: openai.OpenAI, http: httpx.Client, engine: Engine
) -> None:
    batch = create(client, write(line("a", "b")))
    keep_all(engine)
    http.post(f"/v1/jobs/{get_job_id(client, batch.id)}/cancel").raise_for_status()
    keep_all(engine)
    assert client.batches.retrieve(batch.id).status == "cancelled"


def test_the_job_of_a_batch_is_steered_like_any_other_and_the_batch_shows_it(
    client: openai.OpenAI, http: httpx.Client, engine: Engine
) -> None:
    batch = create(client, write(line("a", "b")))
    keep_all(engine)
    job_id = get_job_id(client, batch.id)
    job = http.get(f"/v1/jobs/{job_id}").json()
    assert (job["metadata"], job["collection"], job["num_items"]) == ({"batch": batch.id}, None, 1)
    ask(engine, pause_job, job_id)
    assert client.batches.retrieve(batch.id).to_dict()["job_state"] == "paused"
    keep_all(engine)
    assert client.batches.retrieve(batch.id).status == "in_progress"
    ask(engine, resume_job, job_id)
    finish(engine)
    batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    for refused in (
        delete(http, f"/v1/jobs/{job_id}"),
        http.post(f"/v1/jobs/{job_id}/retry"),
    ):
        assert (refused.status_code, batch.id in refused.text) == (409, True)
    # Until nothing is made of it any more.
    assert batch.output_file_id is not None
    client.files.delete(batch.output_file_id)
    assert delete(http, f"/v1/jobs/{job_id}").status_code == 204


def test_the_job_of_a_batch_stays_as_long_as_its_answers(client: openai.OpenAI, engine: Engine) -> None:
    batch = create(client, write(line("a", "b")))
    keep_all(engine)
    encode_waiting(engine)
    assert ask(engine, discard_expired_jobs, retention_seconds=-1.0) == 0, "the batch has not ended"
    keep_all(engine)
    output = client.batches.retrieve(batch.id).output_file_id
    assert ask(engine, discard_expired_jobs, retention_seconds=-1.0) == 0, "its answers are read from the job"
    assert len(load_file(client, output)) == 1
    assert output is not None
    client.files.delete(output)
    assert ask(engine, discard_expired_jobs, retention_seconds=-1.0) == 1


def test_batches_are_listed_in_pages_newest_first(client: openai.OpenAI) -> None:
    names = [create(client, write(line(n, "b"))).id for n in range(3)][::-1]
    assert [batch.id for batch in client.batches.list(limit=2)] == names
    page = client.batches.list(limit=2)
    assert page.has_more
    assert [batch.id for batch in page.data] == names[:2]
    for missing in ("batch_of_nobody", f"batch_{'0' * 32}"):
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve(missing)


def test_what_no_batch_can_be_is_refused(client: openai.OpenAI) -> None:
    wrong: tuple[dict[str, object], ...] = (
        {"completion_window": "soon"},
        {"completion_window": "40d"},
        {"endpoint": "/v1/chat/completions"},
        {"metadata": {str(n): "x" for n in range(17)}},
        {"metadata": {"x": "\0"}},
    )
    for wanted in wrong:
        with pytest.raises(openai.BadRequestError):
            create(client, write(line("a", "b")), **wanted)


def test_no_batch_is_taken_while_more_waits_than_may(engine: Engine) -> None:
    submit(engine, make_items(3))
    with api_client(engine, max_pending_items=2) as http, official_client(http) as client:
        with pytest.raises(openai.RateLimitError, match="VECTORMILL_MAX_PENDING_ITEMS") as refused:
            create(client.with_options(max_retries=0), write(line("one", "a text")))
        assert int(refused.value.response.headers["retry-after"]) > 0
        assert client.batches.list().data == []


def test_a_file_that_is_being_read_is_not_deleted(client: openai.OpenAI, engine: Engine) -> None:
    batch = create(client, write(line("a", "b")))
    with pytest.raises(openai.ConflictError, match="cancel the batch"):
        client.files.delete(batch.input_file_id)
    keep_all(engine)
    assert client.files.delete(batch.input_file_id).deleted
    finish(engine)
    batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.batches.create(
            input_file_id=str(batch.output_file_id), endpoint="/v1/embeddings", completion_window="24h"
        )
    with pytest.raises(openai.NotFoundError):
        client.batches.create(
            input_file_id=batch.input_file_id,
            endpoint="/v1/embeddings",
            completion_window="24h",
            metadata={"again": "yes"},
        )
