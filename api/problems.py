"""Problems: every failure is answered as RFC 9457 problem details with a stable `type`.

Problem details may have further members (RFC 9457, section 3.2), so the same body also has the error in the format of
OpenAI, text-embeddings-inference or Cohere, chosen by the path. Independent of routes and bodies.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Annotated, Any, Final, NotRequired, Self, TypedDict, cast

import psycopg
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from msgspec import Meta
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import compile_path

from api.door.observer import HEADER, read_request_id
from vectormill.domain.errors import (
    BodyTimeout,
    Conflict,
    DatabaseUnavailable,
    IdempotencyMismatch,
    InvalidSubmission,
    LimitReached,
    ModelError,
    NotFound,
    SubmissionTooLarge,
    Unavailable,
    UnsupportedModel,
    VectormillError,
)
from vectormill.settings import PREFIX, Settings

TYPE_PREFIX: Final = "https://vectormill.dev/problems/"
MEDIA_TYPE: Final = "application/problem+json"
JSON_TYPE: Final = "application/json"
FORM_TYPE: Final = "multipart/form-data"
# After this time Postgres is usually back from a restart, and most work that a gate counted has ended.
RETRY_AFTER_SECONDS: Final = 2

# The SQLSTATE of a write in a read-only transaction, and the class of a full disk, full memory and too many
# connections.
READ_ONLY: Final = "25006"
OUT_OF_RESOURCES: Final = "53"

# The first matching class decides.
STATUS_BY_ERROR: Final[tuple[tuple[type[VectormillError], int], ...]] = (
    (SubmissionTooLarge, 413),
    (IdempotencyMismatch, 422),  # draft-ietf-httpapi-idempotency-key-header-07, section 2.7
    (InvalidSubmission, 422),
    (NotFound, 404),
    (Conflict, 409),
    (BodyTimeout, 408),
    (LimitReached, 429),
    (Unavailable, 503),
    (UnsupportedModel, 422),  # retrying would not help
    (ModelError, 503),  # a registered model's files are unavailable
)

# Paths of OpenAI's clients; paths below them count too. A new route for these clients is added here.
OPENAI_PATHS: Final = ("/v1/embeddings", "/v1/models", "/v1/files", "/v1/batches")
# The paths of text-embeddings-inference and of Cohere.
TEI_PATHS: Final = ("/", "/embed", "/similarity", "/predict", "/rerank", "/info")
COHERE_PATHS: Final = ("/v1/embed", "/v2/embed", "/v2/rerank")
# These clients choose the exception by status: 400 is BadRequestError, 404 NotFoundError; few know 422.
STATUS_BY_STATUS: Final = {422: 400}
STATUS_BY_CODE: Final = {"unknown-model": 404}
# Codes that programs compare with. Every other code is ours, with underscores as in OpenAI's codes.
OPENAI_CODES: Final = {
    "unknown-model": "model_not_found",
    "key-missing": "invalid_api_key",
    "key-unknown": "invalid_api_key",
    "limit-reached": "rate_limit_exceeded",
}
OPENAI_PARAMETERS: Final = {"unknown-model": "model"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a fault in the request: a JSON pointer, a line of NDJSON, a parameter or a header."""

    detail: str
    pointer: str | None = None
    line: int | None = None
    parameter: str | None = None
    header: str | None = None
    code: str | None = None  # the item's error, if it has no vector

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit that was reached: the variable that sets it, and its value."""

    setting: str
    value: float

    @classmethod
    def of(cls, settings: Settings, name: str) -> Self:
        return cls(PREFIX + name.upper(), getattr(settings, name))


class OpenAIErrorBody(TypedDict):
    """An error in the format of OpenAI's clients."""

    message: str
    type: str
    param: str | None
    code: str | None


class ProblemBody(TypedDict):
    """Problem details (RFC 9457); `type` is stable, `errors` names the places, `limit` the setting that was reached."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    errors: NotRequired[list[Place]]
    limit: NotRequired[Limit]
    error: NotRequired[
        Annotated[
            OpenAIErrorBody | str,
            Meta(
                description="The error in the format of OpenAI and text-embeddings-inference, on their routes."
            ),
        ]
    ]
    error_type: NotRequired[
        Annotated[str, Meta(description="Added to `error` for text-embeddings-inference.")]
    ]
    message: NotRequired[
        Annotated[str, Meta(description="The error in the format of Cohere, on its routes.")]
    ]


PROBLEM_EXAMPLE: Final = {
    "type": "https://vectormill.dev/problems/invalid-item",
    "title": "Invalid item",
    "status": 422,
    "detail": "Line 17: Object missing required field `text`.",
    "instance": "/v1/jobs",
    "errors": [{"detail": "Object missing required field `text`", "line": 17}],
}


class Problem(Exception):
    """A failure that the API itself finds, with its HTTP status and the places in the request that caused it."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        errors: Sequence[Place] = (),
        limit: Limit | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.errors = tuple(errors)
        self.limit = limit
        self.headers = dict(headers or {})
        if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_SECONDS))

    def body(self, instance: str) -> dict[str, Any]:
        """Return the problem details object; its title is the same for every occurrence of the type."""
        values: dict[str, Any] = {
            "type": TYPE_PREFIX + self.code,
            "title": self.code.replace("-", " ").capitalize(),
            "status": self.status,
            "detail": self.detail,
            "instance": instance,
        }
        if self.errors:
            values["errors"] = [place.to_json() for place in self.errors]
        if self.limit:
            values["limit"] = asdict(self.limit)
        return values

    def response(self, instance: str) -> Response:
        """Return the HTTP response for this problem.

        `instance` is the requested path. It decides whether members in another API's error format are added.
        """
        parameter = None
        if self.errors:
            first = self.errors[0]
            parameter = name_parameter(first.pointer) if first.pointer else first.parameter or first.header
        status, told = describe_for_client(instance, self.status, self.code, self.detail, parameter)
        body = self.body(instance) | {"status": status} | told
        return JSONResponse(body, status_code=status, headers=self.headers, media_type=MEDIA_TYPE)


def describe_for_client(
    path: str, status: int, code: str, detail: str, parameter: str | None = None
) -> tuple[int, dict[str, Any]]:
    """Return the status and the further members of an error that the clients of this path expect.

    `parameter` is the field that caused the error.
    """
    for_openai, for_tei, for_cohere = (
        any(path == prefix or path.startswith(f"{prefix}/") for prefix in paths)
        for paths in (OPENAI_PATHS, TEI_PATHS, COHERE_PATHS)
    )
    if not (for_openai or for_tei or for_cohere):
        return status, {}
    status = STATUS_BY_CODE.get(code, STATUS_BY_STATUS.get(status, status))
    is_busy, is_failure = status == HTTPStatus.TOO_MANY_REQUESTS, status >= 500
    if for_openai:
        kind = "server_error" if is_failure else "invalid_request_error"
        error = {
            "message": detail,
            "type": "rate_limit_error" if is_busy else kind,
            "param": parameter or OPENAI_PARAMETERS.get(code),
            "code": OPENAI_CODES.get(code, code.replace("-", "_")),
        }
        return status, {"error": error}
    if for_tei:
        kind = "Backend" if is_failure else "Validation"
        return status, {"error": detail, "error_type": "Overloaded" if is_busy else kind}
    return status, {"message": detail}


def name_parameter(pointer: str) -> str:
    """Return the name of the field at a JSON pointer: "input[3]" for "/input/3"."""
    first, *rest = pointer.strip("/").split("/")
    return first + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in rest)


def refuse(reason: str, *, code: str = "invalid-request", detail: str | None = None, **place: Any) -> Problem:
    """Return the Problem of a request that is refused for one place in it, which Place describes.

    `detail` is the sentence on the whole request, by default the reason as a sentence.
    """
    sentence = f"{reason.removesuffix('.')}." if detail is None else detail
    return Problem(422, code, sentence, errors=[Place(reason, **place)])


def refuse_size(limit: Limit, detail: str) -> Problem:
    """Return the Problem of a request that exceeds a limit of its own size."""
    return Problem(413, SubmissionTooLarge.code, detail, limit=limit)


def describe_error(error: VectormillError) -> Problem:
    """Return the Problem for a VectormillError; its status is 500 if STATUS_BY_ERROR has none."""
    status = next((status for kind, status in STATUS_BY_ERROR if isinstance(error, kind)), 500)
    return Problem(status, error.code, str(error))


def is_database_away(error: Exception) -> bool:
    """Return True for errors that mean a lost, refused or exhausted connection, rather than a wrong statement."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    return isinstance(error, OperationalError | InterfaceError | PoolTimeout | psycopg.OperationalError)


def describe_database_error(error: Exception) -> Problem | None:
    """Return the Problem for an error of Postgres if trying again later can help, else None."""
    diagnosis: Any = getattr(getattr(error, "orig", error), "diag", None)
    state = getattr(diagnosis, "sqlstate", None) or ""
    if state == READ_ONLY or state.startswith(OUT_OF_RESOURCES):
        # Postgres's message says what is full, and contains no values of the statement.
        return describe_error(
            DatabaseUnavailable(f"Postgres accepts no writes: {diagnosis.message_primary}.")
        )
    return describe_error(DatabaseUnavailable()) if is_database_away(error) else None


def register_handlers(app: FastAPI) -> None:
    """Register exception handlers, so that every failure of the application becomes problem details."""

    async def answer(request: Request, error: Exception) -> Response:
        problem = error if isinstance(error, Problem) else describe_error(cast(VectormillError, error))
        return problem.response(request.url.path)

    app.add_exception_handler(Problem, answer)
    app.add_exception_handler(VectormillError, answer)
    app.add_exception_handler(RequestValidationError, answer_invalid_request)
    app.add_exception_handler(HTTPException, answer_http_exception)
    app.add_exception_handler(ClientDisconnect, answer_disconnect)
    for kind in (DBAPIError, PoolTimeout, psycopg.OperationalError):
        app.add_exception_handler(kind, answer_database_error)
    app.add_exception_handler(Exception, answer_unexpected)


async def answer_invalid_request(request: Request, error: Exception) -> Response:
    """Name every parameter that FastAPI refused; bodies and headers are not left to it."""
    refused = cast(RequestValidationError, error).errors()
    places = [Place(each["msg"], parameter=".".join(map(str, each["loc"][1:]))) for each in refused]
    sentence = " ".join(f"{place.parameter}: {place.detail}." for place in places)
    return Problem(422, "invalid-request", sentence, errors=places).response(request.url.path)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer an error of the framework, such as an unknown path or a wrong method."""
    error, path = cast(HTTPException, error), request.url.path
    phrase = HTTPStatus(error.status_code).phrase
    detail = error.detail if error.detail != phrase else f"{phrase}; see /docs for all operations."
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.NOT_FOUND and path.endswith("/"):
        detail = (
            "Nothing is at a path that ends with a slash: leave the slash out. If the path was that of an item, "
            "your client has removed dots from its key: name the item by the parameter key instead, "
            "/v1/collections/NAME/items?key=…"
        )
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # The framework knows the methods of one route, but a path has a route for each method.
        methods = {
            method.upper()
            for template, operations in request.app.openapi()["paths"].items()
            if compile_path(template)[0].match(path)
            for method in operations
        }
        headers |= {"Allow": ", ".join(sorted(methods))} if methods else {}
    code = phrase.lower().replace(" ", "-")
    return Problem(error.status_code, code, str(detail), headers=headers).response(path)


async def answer_database_error(request: Request, error: Exception) -> Response:
    """Answer an error of Postgres if trying again later can help; otherwise raise it."""
    problem = describe_database_error(error)
    if problem is None:
        raise error
    logger.warning("Postgres failed during %s %r: %s", request.method, request.url.path, error)
    return problem.response(request.url.path)


async def answer_disconnect(request: Request, error: Exception) -> Response:
    """Log that the client is gone, with status 499, as reverse proxies do."""
    logger.info("The client disconnected during %s %r", request.method, request.url.path)
    return Response(status_code=499)


async def answer_unexpected(request: Request, error: Exception) -> Response:
    """Answer any other error; the server then gets it too, and logs it with its traceback."""
    request_id = read_request_id(request.scope)
    logger.error("Request %s, %s %r, failed unexpectedly:", request_id, request.method, request.url.path)
    detail = "Unexpected error in Vectormill; see the API's log for details."
    # This response bypasses the middleware that adds the header to all others.
    headers = {HEADER.decode(): request_id} if request_id else {}
    return Problem(500, "internal-error", detail, headers=headers).response(request.url.path)


# ---- the Content-Type of a body. A form on another site's page cannot send that of JSON, so the check also protects
# against CSRF.


def read_media_type(request: Request) -> str:
    """Return the media type of the body, without parameters; empty if the request names none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def require_json(request: Request) -> None:
    """Raise Problem if the Content-Type is not that of JSON."""
    media_type = read_media_type(request)
    if media_type != JSON_TYPE:
        raise unsupported_media_type(media_type, JSON_TYPE)


def unsupported_media_type(media_type: str, *wanted: str) -> Problem:
    given = f"is {media_type}" if media_type else "is missing"
    return Problem(
        415,
        "unsupported-media-type",
        f"The Content-Type must be {' or '.join(wanted)}; it {given}.",
        headers={"Accept": ", ".join(wanted)},
    )
