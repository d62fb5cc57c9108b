"""Every failure leaves the application as problem details, with its status, its type and no internals."""

import asyncio
from typing import Any

import httpx
import psycopg
import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from api.cursors import decode_cursor, encode_cursor
from api.problems import Place, Problem, describe_invalid_request, register_handlers
from vectormill.domain import errors


def call(app: FastAPI, path: str, method: str = "GET") -> httpx.Response:
    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            return await client.request(method, path)

    return asyncio.run(request())


def app_that_raises(error: Exception) -> FastAPI:
    app = FastAPI()
    register_handlers(app)

    @app.get("/thing/{number}")
    def get_thing(number: int) -> None:
        raise error

    return app


def answer_to(error: Exception) -> httpx.Response:
    return call(app_that_raises(error), "/thing/1")


def database_error(kind: type[Any]) -> Exception:
    error: Exception = kind("SELECT secret", {}, psycopg.Error("password"))
    return error


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
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
    ],
)
def test_an_error_becomes_a_problem_with_a_stable_type(error: Exception, status: int, code: str) -> None:
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


def test_the_detail_is_the_sentence_of_the_error() -> None:
    assert answer_to(errors.DuplicateKey("Item 3 and item 17.")).json()["detail"] == "Item 3 and item 17."


def test_a_problem_names_its_places_and_leaves_out_what_is_unknown() -> None:
    problem = Problem(422, "invalid-item", "Line 3.", errors=[Place("missing", pointer="/text", line=3)])
    assert answer_to(problem).json()["errors"] == [{"detail": "missing", "pointer": "/text", "line": 3}]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not-found"),
        ("POST", "/thing/1", 405, "method-not-allowed"),
        ("GET", "/thing/one", 422, "invalid-request"),
    ],
)
def test_what_the_framework_refuses_is_a_problem_too(method: str, path: str, status: int, code: str) -> None:
    answer = call(app_that_raises(RuntimeError()), path, method)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"].endswith(f"/{code}")


def test_a_parameter_that_is_refused_is_named() -> None:
    error = RequestValidationError(
        [
            {"loc": ("query", "sate"), "type": "extra_forbidden", "msg": "Extra inputs are not permitted"},
            {"loc": ("header", "idempotency-key"), "type": "string_too_long", "msg": "too long"},
            {"loc": ("body", "items", 0), "type": "missing", "msg": "missing"},
        ]
    )
    problem = describe_invalid_request(error)
    assert problem.errors == (
        Place("unknown query parameter", parameter="sate"),
        Place("too long", header="idempotency-key"),
        Place("missing", pointer="/items/0"),
    )
    assert problem.detail.startswith("sate: unknown query parameter.")


@pytest.mark.parametrize("position", [0, 7, 2**63 - 1])
def test_a_cursor_comes_back_as_the_position_it_was(position: int) -> None:
    cursor = encode_cursor(position)
    assert decode_cursor(cursor) == position
    assert cursor != str(position), "clients must not be tempted to compute with it"


@pytest.mark.parametrize("cursor", ["", "7", "!!!", "LTE", "ü", "x" * 100])
def test_a_cursor_that_is_none_is_refused(cursor: str) -> None:
    with pytest.raises(Problem, match="after must be the next"):
        decode_cursor(cursor)


def test_no_cursor_is_the_first_page() -> None:
    assert decode_cursor(None) is None
