"""Problems: every failure is answered as RFC 9457 problem details with a stable `type`.

Independent of routes and bodies.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Annotated, Any, Final, NotRequired, Self, TypedDict, TypeVar, cast

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
from api.openai.errors import name_parameter, tell_refusal
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

E = TypeVar("E", bound=Exception)

TYPE_PREFIX: Final = "https://vectormill.dev/problems/"
MEDIA_TYPE: Final = "application/problem+json"
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
        status, told = tell_refusal(instance, self.status, self.code, self.detail, self._name_parameter())
        body = self.body(instance) | {"status": status} | told
        return JSONResponse(body, status_code=status, headers=self.headers, media_type=MEDIA_TYPE)

    def _name_parameter(self) -> str | None:
        """Return the name of the field, parameter or header at the first place; None if there is none."""
        for place in self.errors:
            return name_parameter(place.pointer) if place.pointer else place.parameter or place.header
        return None


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


def describe_invalid_request(error: RequestValidationError) -> Problem:
    """Return a Problem that names every parameter that FastAPI refused; bodies and headers are not left to it."""
    places = [Place(each["msg"], parameter=".".join(map(str, each["loc"][1:]))) for each in error.errors()]
    sentence = " ".join(f"{place.parameter}: {place.detail}." for place in places)
    return Problem(422, "invalid-request", sentence, errors=places)


def describe_http_exception(error: HTTPException, path: str) -> Problem:
    """Return the Problem for an error of the framework, such as an unknown path or a wrong method."""
    phrase = HTTPStatus(error.status_code).phrase
    detail = error.detail if error.detail != phrase else f"{phrase}; see /docs for all operations."
    if error.status_code == HTTPStatus.NOT_FOUND and path.endswith("/"):
        detail = (
            "Nothing is at a path that ends with a slash: leave the slash out. If the path was that of an item, "
            "your client has removed dots from its key: name the item by the parameter key instead, "
            "/v1/collections/NAME/items?key=…"
        )
    return Problem(error.status_code, phrase.lower().replace(" ", "-"), str(detail), headers=error.headers)


def find_methods(app: FastAPI, path: str) -> list[str]:
    """Return all methods that a path supports, sorted.

    The framework knows the methods of one route, but a path has a route for each method.
    """
    return sorted(
        method.upper()
        for template, operations in app.openapi()["paths"].items()
        if compile_path(template)[0].match(path)
        for method in operations
    )


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

    def add(kind: type[E], describe: Callable[[E], Problem]) -> None:
        async def answer(request: Request, error: Exception) -> Response:
            return describe(cast(E, error)).response(request.url.path)

        app.add_exception_handler(kind, answer)

    async def answer_http_exception(request: Request, error: Exception) -> Response:
        problem = describe_http_exception(cast(HTTPException, error), request.url.path)
        if problem.status == HTTPStatus.METHOD_NOT_ALLOWED and (
            methods := find_methods(app, request.url.path)
        ):
            problem.headers["Allow"] = ", ".join(methods)
        return problem.response(request.url.path)

    async def answer_database_error(request: Request, error: Exception) -> Response:
        problem = describe_database_error(error)
        if problem is None:
            raise error
        logger.warning("Postgres failed during %s %r: %s", request.method, request.url.path, error)
        return problem.response(request.url.path)

    async def answer_disconnect(request: Request, error: Exception) -> Response:
        # The client is gone. Status 499 is what reverse proxies log for that.
        logger.info("The client disconnected during %s %r", request.method, request.url.path)
        return Response(status_code=499)

    async def answer_unexpected(request: Request, error: Exception) -> Response:
        # The server then gets the error too, and logs it with its traceback.
        request_id = read_request_id(request.scope)
        logger.error("Request %s, %s %r, failed unexpectedly:", request_id, request.method, request.url.path)
        detail = "Unexpected error in Vectormill; see the API's log for details."
        # This response bypasses the middleware that adds the header to all others.
        headers = {HEADER.decode(): request_id} if request_id else {}
        return Problem(500, "internal-error", detail, headers=headers).response(request.url.path)

    add(Problem, lambda problem: problem)
    add(VectormillError, describe_error)
    add(RequestValidationError, describe_invalid_request)
    app.add_exception_handler(HTTPException, answer_http_exception)
    app.add_exception_handler(ClientDisconnect, answer_disconnect)
    for kind in (DBAPIError, PoolTimeout, psycopg.OperationalError):
        app.add_exception_handler(kind, answer_database_error)
    app.add_exception_handler(Exception, answer_unexpected)
