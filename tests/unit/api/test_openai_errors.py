"""On the paths of OpenAI's clients a refusal is told in their shape too; every answer says which request it is of."""

import asyncio
import re

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import create_engine

from api.door.observer import RequestObserver
from api.metrics import ApiMetrics
from api.openai.errors import name_parameter, tell_refusal
from api.problems import Place, Problem, register_handlers
from vectormill.domain import errors

ENGINE = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")


def ask(
    error: Exception | None, path: str = "/v1/embeddings", headers: dict[str, str] | None = None
) -> httpx.Response:
    app = FastAPI()
    register_handlers(app)
    app.add_middleware(RequestObserver, metrics=ApiMetrics(ENGINE))

    @app.get(path)
    def answer() -> None:
        if error is not None:
            raise error

    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(request())


@pytest.mark.parametrize(
    ("error", "status", "kind", "parameter", "code"),
    [
        (errors.UnknownModel("No."), 404, "invalid_request_error", "model", "model_not_found"),
        (errors.InvalidOption("No."), 400, "invalid_request_error", None, "invalid_option"),
        (Problem(401, "key-unknown", "No."), 401, "invalid_request_error", None, "invalid_api_key"),
        (Problem(429, "limit-reached", "No."), 429, "rate_limit_error", None, "rate_limit_exceeded"),
        (errors.EncodingTimeout("No."), 503, "server_error", None, "encoding_timeout"),
        (
            Problem(422, "invalid-item", "No.", errors=[Place("no", pointer="/input/3")]),
            400, "invalid_request_error", "input[3]", "invalid_item",
        ),
        (
            Problem(422, "invalid-request", "No.", errors=[Place("no", parameter="limit")]),
            400, "invalid_request_error", "limit", "invalid_request",
        ),
    ],
)  # fmt: skip
def test_a_refusal_is_told_to_openai_s_clients_and_to_ours(
    error: Exception, status: int, kind: str, parameter: str | None, code: str
) -> None:
    answer = ask(error)
    told = answer.json()
    assert answer.status_code == told["status"] == status
    assert told["error"] == {"message": "No.", "type": kind, "param": parameter, "code": code}
    assert told["detail"] == "No."
    assert told["type"].startswith("https://vectormill.dev/problems/")
    assert ("retry-after" in answer.headers) == (status in (429, 503))


def test_elsewhere_a_refusal_stays_what_it_was() -> None:
    answer = ask(errors.UnknownModel(), "/v1/jobs")
    assert answer.status_code == 422
    assert "error" not in answer.json()


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("/v1/files", 400, {"error"}),
        ("/v1/files/file-1/content", 400, {"error"}),
        ("/v1/batches/batch_1/cancel", 400, {"error"}),
        ("/embed", 400, {"error", "error_type"}),
        ("/v2/embed", 400, {"message"}),
        ("/v1/filesystem", 422, set()),
        ("/v1/jobs", 422, set()),
    ],
)
def test_their_paths_are_told_from_ours(path: str, status: int, told: set[str]) -> None:
    found, members = tell_refusal(path, 422, "invalid-option", "No.")
    assert (found, set(members)) == (status, told)


@pytest.mark.parametrize(
    ("pointer", "name"), [("/input", "input"), ("/input/3", "input[3]"), ("/a/0/b", "a[0].b")]
)
def test_a_place_is_named_as_in_their_errors(pointer: str, name: str) -> None:
    assert name_parameter(pointer) == name


@pytest.mark.parametrize("error", [None, errors.JobNotFound(), RuntimeError()])
def test_every_answer_has_an_id_of_its_own(error: Exception | None) -> None:
    ids = {ask(error).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(re.fullmatch("req_[0-9a-f]{32}", each) for each in ids)


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [("a1-b2", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False)],
)
def test_a_sane_id_of_the_client_goes_on(given: str, is_kept: bool) -> None:
    answer = ask(None, headers={"X-Request-ID": given})
    assert (answer.headers["x-request-id"] == given) == is_kept
    assert len(answer.headers.get_list("x-request-id")) == 1


def test_an_error_that_nobody_knows_is_logged_under_its_id(caplog: pytest.LogCaptureFixture) -> None:
    answer = ask(RuntimeError(), headers={"X-Request-ID": "mine"})
    assert answer.status_code == 500
    assert "Request mine, GET '/v1/embeddings'" in caplog.text
