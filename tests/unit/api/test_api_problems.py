"""Every failure leaves the application as problem details, in the shape of other APIs' clients too, under an id."""

import asyncio
import re
from typing import Any, Final

import httpx
import psycopg
import pytest
from fastapi import FastAPI
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.types import Message, Receive, Scope, Send

from api.door.admission import AdmissionControl
from api.door.hosts import parse_allowed_hosts
from api.door.keys import KeyGuard
from api.door.machine import MachineUsers
from api.door.observer import RequestObserver
from api.limits.gates import Gates
from api.metrics import ApiMetrics
from api.problems import Place, Problem, describe_for_client, name_parameter, register_handlers
from api.serving import decode_cursor, encode_cursor
from vectormill.domain import errors
from vectormill.settings import Settings

ENGINE: Final = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")


def answer_to(
    error: Exception | None,
    path: str = "/thing/1",
    method: str = "GET",
    headers: dict[str, str] | None = None,
    template: str = "",
) -> httpx.Response:
    """Ask an application whose only route, of the template or of the path itself, raises the error."""
    app = FastAPI()
    register_handlers(app)
    app.add_middleware(RequestObserver, metrics=ApiMetrics(ENGINE))

    def answer() -> None:
        if error is not None:
            raise error

    def answer_number(number: int) -> None:
        answer()

    app.add_api_route(template or path, answer_number if "{number}" in template else answer)

    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(request())


def database_error(kind: type[Any]) -> Exception:
    error: Exception = kind("SELECT secret", {}, psycopg.Error("password"))
    return error


PROBLEMS: Final[tuple[tuple[Exception, int, str], ...]] = (
    (errors.DuplicateKey("Item 3 and item 17 have the same key."), 422, "duplicate-key"),
    (errors.EmptyJob(), 422, "empty-job"),
    (errors.UnknownModel(), 422, "unknown-model"),
    (errors.InvalidOption(), 422, "invalid-option"),
    (errors.SubmissionTooLarge(), 413, "submission-too-large"),
    (errors.JobNotFound(), 404, "job-not-found"),
    (errors.CollectionNotFound(), 404, "collection-not-found"),
    (errors.IdempotencyMismatch(), 422, "idempotency-mismatch"),
    (errors.SubmissionInProgress(), 409, "submission-in-progress"),
    (errors.UploadRemoved(), 409, "upload-removed"),
    (errors.SpecMismatch(), 409, "spec-mismatch"),
    (errors.WrongJobState(), 409, "wrong-job-state"),
    (errors.EncodingTimeout(), 503, "encoding-timeout"),
    (errors.ModelError(), 503, "model-error"),
    (database_error(OperationalError), 503, "database-unavailable"),
    (PoolTimeout(), 503, "database-unavailable"),
    (psycopg.OperationalError("password"), 503, "database-unavailable"),
    (database_error(ProgrammingError), 500, "internal-error"),
    (RuntimeError("password"), 500, "internal-error"),
    (Problem(400, "invalid-json", "Line 3 is not valid JSON."), 400, "invalid-json"),
)


def test_an_error_becomes_a_problem_with_a_stable_type() -> None:
    for error, status, code in PROBLEMS:
        answer = answer_to(error)
        problem = answer.json()
        assert answer.status_code == problem["status"] == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert problem["type"] == f"https://vectormill.dev/problems/{code}"
        assert problem["title"] == code.replace("-", " ").capitalize()
        assert problem["instance"] == "/thing/1"
        assert problem["detail"]
        assert ("retry-after" in answer.headers) == (status == 503)
        assert "password" not in answer.text
        assert "SELECT" not in answer.text
    assert answer_to(PROBLEMS[0][0]).json()["detail"] == str(PROBLEMS[0][0])
    problem = Problem(422, "invalid-item", "Line 3.", errors=[Place("missing", pointer="/text", line=3)])
    assert answer_to(problem).json()["errors"] == [{"detail": "missing", "pointer": "/text", "line": 3}]


def test_what_the_framework_refuses_is_a_problem_too() -> None:
    for method, path, status, code in (
        ("GET", "/nothing", 404, "not-found"),
        ("POST", "/thing/1", 405, "method-not-allowed"),
        ("GET", "/thing/one", 422, "invalid-request"),
    ):
        answer = answer_to(None, path, method, template="/thing/{number}")
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["type"].endswith(f"/{code}")
    answer = answer_to(None, "/thing/one", template="/thing/{number}")
    (place,) = answer.json()["errors"]
    assert place["parameter"] == "number"
    assert answer.json()["detail"] == f"number: {place['detail']}."


def test_a_cursor_comes_back_as_the_position_it_was_and_any_other_text_is_refused() -> None:
    assert decode_cursor(None) is None
    for position in (0, 7, 2**63 - 1):
        cursor = encode_cursor(position)
        assert decode_cursor(cursor) == position
        assert cursor != str(position), "clients must not be tempted to compute with it"
    for cursor in ("", "7", "!!!", "LTE", "ü", "x" * 100):
        with pytest.raises(Problem, match="after must be the `next`"):
            decode_cursor(cursor)


REFUSALS: Final[tuple[tuple[Exception, int, str, str | None, str], ...]] = (
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
)  # fmt: skip


def test_a_refusal_is_told_to_openai_s_clients_and_to_ours() -> None:
    for error, status, kind, parameter, code in REFUSALS:
        answer = answer_to(error, "/v1/embeddings")
        told = answer.json()
        assert answer.status_code == told["status"] == status
        assert told["error"] == {"message": "No.", "type": kind, "param": parameter, "code": code}
        assert told["detail"] == "No."
        assert told["type"].startswith("https://vectormill.dev/problems/")
        assert ("retry-after" in answer.headers) == (status in (429, 503))
    elsewhere = answer_to(errors.UnknownModel(), "/v1/jobs")
    assert (elsewhere.status_code, "error" in elsewhere.json()) == (422, False)
    told_by_path: dict[str, tuple[int, set[str]]] = {
        "/v1/files": (400, {"error"}),
        "/v1/files/file-1/content": (400, {"error"}),
        "/v1/batches/batch_1/cancel": (400, {"error"}),
        "/embed": (400, {"error", "error_type"}),
        "/v2/embed": (400, {"message"}),
        "/v1/filesystem": (422, set()),
        "/v1/jobs": (422, set()),
    }
    for path, expected in told_by_path.items():
        found, members = describe_for_client(path, 422, "invalid-option", "No.")
        assert (found, set(members)) == expected, path
    names = {pointer: name_parameter(pointer) for pointer in ("/input", "/input/3", "/a/0/b")}
    assert names == {"/input": "input", "/input/3": "input[3]", "/a/0/b": "a[0].b"}


def test_every_answer_has_an_id_of_its_own_or_a_sane_one_of_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for error in (None, errors.JobNotFound(), RuntimeError()):
        ids = {answer_to(error).headers["x-request-id"] for _ in range(2)}
        assert len(ids) == 2
        assert all(re.fullmatch("req_[0-9a-f]{32}", each) for each in ids)
    for given, is_kept in (
        ("a1-b2", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a b", False),
        ("", False),
    ):
        answer = answer_to(None, headers={"X-Request-ID": given})
        assert (answer.headers["x-request-id"] == given) == is_kept
        assert len(answer.headers.get_list("x-request-id")) == 1
    assert answer_to(RuntimeError(), headers={"X-Request-ID": "mine"}).status_code == 500
    assert "Request mine, GET '/thing/1'" in caplog.text


IMPATIENT: Final = Settings(body_idle_seconds=0.001)


def test_a_client_that_has_sent_its_body_is_waited_for_without_an_end() -> None:
    received: list[Message] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        received.extend([await receive(), await receive()])

    async def serve() -> None:
        leaves = asyncio.Event()
        messages: list[Message] = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"all"}]

        async def receive() -> Message:
            if len(messages) == 1:
                await leaves.wait()
            return messages.pop()

        async def send(message: Message) -> None:
            raise AssertionError(message)

        no_keys: Any = None
        admission = AdmissionControl(
            application,
            settings=IMPATIENT,
            gates=Gates.of(IMPATIENT),
            hosts=parse_allowed_hosts("127.0.0.1", ""),
            keys=KeyGuard(no_keys, MachineUsers(IMPATIENT), IMPATIENT),
            pages=lambda app: app,
            is_for_people=lambda scope: False,
        )
        scope = {"type": "http", "method": "GET", "path": "/livez", "headers": []}  # which needs no key
        served = asyncio.create_task(admission(scope, receive, send))
        # Twenty times the limit: were it counted, the task would have ended with a Problem.
        await asyncio.wait([served], timeout=0.02)
        leaves.set()
        await served

    asyncio.run(serve())
    assert [message["type"] for message in received] == ["http.request", "http.disconnect"]
