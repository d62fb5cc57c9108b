"""Serving: a function becomes the route of an operation.

The operation's types alone decide how the body and the query parameters are read, how the answer is written,
and how all are described. Parameters in the path and in headers are read and described by FastAPI.
"""

import functools
import inspect
import json
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Final, TypeVar, get_args
from urllib.parse import quote, unquote, unquote_to_bytes

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.datastructures import QueryParams

from api.dependencies import ResourcesDependency, get_resources
from api.intake.bodies import NDJSON_TYPES, read_body
from api.intake.requests import decode_body, split_path
from api.problems import FORM_TYPE, JSON_TYPE, Place, Problem, refuse, require_json
from vectormill.operation import CONFIRMATION, CURSOR, NO_CONTENT, Operation

REFERENCE: Final = "#/components/schemas/{name}"
WRITER: Final = msgspec.json.Encoder()
PLACEHOLDER: Final = re.compile(r"{(\w+)")
CONFIRMATION_PARAMETER: Final[dict[str, Any]] = {
    "name": CONFIRMATION,
    "in": "header",
    "required": True,
    "description": "The last value of the path once more, percent-encoded.",
    "schema": {"type": "string"},
}

Handler = TypeVar("Handler", bound=Callable[..., Any])
Query = TypeVar("Query", bound=msgspec.Struct)
Row = TypeVar("Row")


def serve(
    router: APIRouter, operation: Operation[Any], *checks: Callable[..., Any]
) -> Callable[[Handler], Handler]:
    """Register the decorated function as the route of the operation.

    Its argument `body` is the decoded body, `query` the query parameters, and `connection` the transaction of
    the request, which is committed before the answer is sent. It returns the answer, or a complete response. A
    function that is not a coroutine runs on a thread. `checks` are dependencies that run before it and may raise
    Problem.
    """
    if operation.is_confirmed:
        checks = (*checks, make_confirmation(operation))

    def register(handler: Handler) -> Handler:
        router.add_api_route(
            operation.path,
            make_endpoint(operation, handler),
            methods=[operation.method],
            status_code=operation.status,
            response_class=Response,
            response_model=None,
            dependencies=[Depends(check) for check in checks],
            openapi_extra=describe_operation(operation),
            route_class_override=OperationRoute,
        )
        return handler

    return register


class OperationRoute(APIRoute):
    """A route that FastAPI analyses and describes, without its handling of a request, which takes 0.15 ms longer."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return make_caller(self.dependant)


def make_caller(dependant: Dependant) -> Callable[[Request], Coroutine[Any, Any, Any]]:
    """Return a function that calls an endpoint or a dependency with the arguments that FastAPI would read of a request.

    They come from the path, from headers and from dependencies. A dependency that is not a coroutine must not block.
    """
    assert not dependant.query_params + dependant.cookie_params + dependant.body_params
    function: Callable[..., Any] = dependant.call  # type: ignore[assignment]
    is_coroutine = inspect.iscoroutinefunction(function)
    callers = [(each.name, make_caller(each)) for each in dependant.dependencies]
    fields = [(each, "path", "path_params") for each in dependant.path_params]
    fields += [(each, "header", "headers") for each in dependant.header_params]

    async def call(request: Request) -> Any:
        arguments: dict[Any, Any] = {name: await caller(request) for name, caller in callers}
        errors: list[Any] = []
        for field, place, attribute in fields:
            given = getattr(request, attribute).get(field.alias, field.get_default())
            arguments[field.name], found = field.validate(given, loc=(place, field.alias))
            errors += found
        if errors:
            raise RequestValidationError(errors)
        arguments[dependant.request_param_name] = request
        arguments.pop(None, None)  # checks have no name, nor has a request that is not wanted
        answer = function(**arguments)
        return await answer if is_coroutine else answer

    return call


def make_endpoint(operation: Operation[Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return an endpoint that gives the handler its body, query and connection, and writes its answer."""
    signature = inspect.signature(handler)
    readers: dict[str, Callable[..., Any]] = {"connection": get_resources}
    if operation.body is not None:
        readers["body"] = make_body_reader(operation.body)
    if operation.query is not None:
        readers["query"] = make_query_reader(operation.query)
    parameters = [
        each.replace(annotation=Annotated[Any, Depends(readers[name])]) if name in readers else each
        for name, each in signature.parameters.items()
    ]

    def run(**arguments: Any) -> Response:
        if "connection" not in arguments:
            return respond(operation, handler(**arguments))
        with arguments["connection"].engine.begin() as connection:
            answer = handler(**arguments | {"connection": connection})
        return respond(operation, answer)

    @functools.wraps(handler)
    async def endpoint(**arguments: Any) -> Response:
        if inspect.iscoroutinefunction(handler):
            return respond(operation, await handler(**arguments))
        return await run_in_threadpool(run, **arguments)

    endpoint.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return endpoint


def respond(
    operation: Operation[Any],
    answer: Any,
    *,
    status: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a response with this answer; an answer that is a Response already is returned as it is.

    With another status than the operation's own, nothing was created that could be located.
    """
    if isinstance(answer, Response):
        return answer
    if operation.status == NO_CONTENT:
        return Response(status_code=NO_CONTENT)
    is_located = operation.location is not None and status in (None, operation.status)
    told = {"Location": str(operation.location).format_map(answer)} if is_located else {}
    return Response(
        write_answer(answer), status or operation.status, told | dict(headers or {}), media_type=JSON_TYPE
    )


def write_answer(answer: Any) -> bytes:
    """Return the answer as JSON.

    Integers of more than 64 bits, which metadata may have, are written by a slower encoder.
    """
    try:
        return WRITER.encode(answer)
    except OverflowError:
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def make_confirmation(operation: Operation[Any]) -> Callable[..., Any]:
    """Return a FastAPI dependency that raises Problem unless CONFIRMATION repeats the last value of the path."""
    *_, placeholder = PLACEHOLDER.findall(operation.path)

    async def check(request: Request) -> None:
        name, given = request.path_params[placeholder], request.headers.get(CONFIRMATION)
        if given is None or unquote(given) != name:
            header = f"{CONFIRMATION}: {quote(name, safe='')}"
            raise Problem(
                428,
                "confirmation-missing",
                f"Nothing was deleted. Say once more what is to be deleted, by the header {header} "
                f"(curl: -H '{header}'); the request has {'none' if given is None else repr(given)}. A path is not "
                "enough, since clients turn some paths of items into others.",
                errors=[Place("it must repeat the last value of the path", header=CONFIRMATION)],
            )

    return check


def make_body_reader(body: type[msgspec.Struct]) -> Callable[..., Any]:
    """Return a FastAPI dependency that reads a body of this type, and raises Problem if it is invalid."""
    decoder = msgspec.json.Decoder(body)

    async def read(request: Request, resources: ResourcesDependency) -> msgspec.Struct:
        require_json(request)
        with resources.gates.json_bytes.hold() as hold:
            return await run_in_threadpool(
                decode_body, await read_body(request, resources.settings, hold), decoder
            )

    return read


def make_query_reader(query: type[msgspec.Struct]) -> Callable[..., Any]:
    """Return a FastAPI dependency that reads query parameters as this type.

    The dependency raises Problem if they are invalid.
    """

    async def read(request: Request) -> msgspec.Struct:
        try:
            # The framework replaces bytes that are not UTF-8 by U+FFFD, so that different keys would become one.
            unquote_to_bytes(request.scope["query_string"]).decode()
        except UnicodeDecodeError:
            raise Problem(
                422, "invalid-request", "The query parameters are not percent-encoded UTF-8."
            ) from None
        return parse_query(request.query_params, query)

    return read


def parse_query(given: QueryParams, query: type[Query]) -> Query:
    """Return the query parameters as an instance of `query`.

    Raise Problem for a parameter that is unknown, repeated or invalid.
    """
    values: dict[str, str] = {}
    for name, value in given.multi_items():
        if name in values:
            raise refuse_parameter(name, "it is given more than once")
        values[name] = value
    known = query.__struct_fields__
    for name in values:
        if name not in known:
            expected = f"; expected one of: {', '.join(known)}" if known else ""
            raise refuse_parameter(name, f"unknown query parameter{expected}")
    try:
        return msgspec.convert(values, query, strict=False)
    except msgspec.ValidationError as error:
        reason, name = split_path(str(error))
        choices = next(each for each in describe_query(query) if each["name"] == name)["schema"].get("enum")
        raise refuse_parameter(
            name, f"{reason}; expected one of: {', '.join(choices)}" if choices else reason
        ) from error


def refuse_parameter(name: str, reason: str) -> Problem:
    return refuse(reason, detail=f"{name}: {reason}.", parameter=name)


def describe_operation(operation: Operation[Any]) -> dict[str, Any]:
    """Return the OpenAPI description of an operation's query parameters, body and answer."""
    described: dict[str, Any] = {}
    parameters = [] if operation.query is None else describe_query(operation.query)
    if operation.is_confirmed:
        parameters.append(CONFIRMATION_PARAMETER)
    if parameters:
        described["parameters"] = parameters
    content: dict[str, dict[str, Any]] = {}
    if operation.body is not None:
        example = {"example": operation.example} if operation.example else {}
        if operation.examples:
            example = {"examples": {name: {"value": each} for name, each in operation.examples.items()}}
        content[JSON_TYPE] = {"schema": refer_to(operation.body)} | example
    if operation.line is not None:
        content[NDJSON_TYPES[0]] = {"schema": refer_to(operation.line), "example": operation.line_example}
    if operation.form is not None:
        content[FORM_TYPE] = {"schema": dict(operation.form)}
    if content:
        described["requestBody"] = {"required": True, "content": content}
    if operation.status != NO_CONTENT:
        answers: list[dict[str, Any]] = [{"content": {kind: {} for kind in operation.media_types}}]
        if not operation.media_types:
            schemas = [refer_to(kind) for kind in find_answers(operation)]
            if len(schemas) > 1 and operation.other_status is None:
                schemas = [{"anyOf": schemas}]
            others: dict[str, Any] = {kind: {} for kind in operation.other_media_types}
            answers = [{"content": {JSON_TYPE: {"schema": schema}} | others} for schema in schemas]
        described["responses"] = {str(operation.status): answers[0]}
        if operation.other_status is not None:
            described["responses"][str(operation.other_status)] = answers[-1]
    return described


def describe_query(query: type[msgspec.Struct]) -> list[dict[str, Any]]:
    """Return the OpenAPI parameters for the fields of `query`.

    Clients omit a parameter instead of sending null.
    """
    _, components = msgspec.json.schema_components([query], ref_template=REFERENCE)
    described = components[query.__name__]
    parameters = []
    for name, schema in described["properties"].items():
        (value,) = (each for each in schema.pop("anyOf", [{}]) if each.get("type") != "null")
        if schema.get("default", ...) is None:
            del schema["default"]
        told = {"description": schema.pop("description")} if "description" in schema else {}
        is_required = name in described["required"]
        parameters.append(
            {"name": name, "in": "query", "required": is_required, "schema": value | schema} | told
        )
    return parameters


def refer_to(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a type.

    That is a reference to a component, a number, or a list or union of these.
    """
    arguments = [refer_to(each) for each in get_args(kind)]
    if isinstance(kind, UnionType):
        return {"anyOf": arguments}
    if arguments:  # a list type
        return {"type": "array", "items": arguments[0]}
    return {"type": "number"} if kind is float else {"$ref": REFERENCE.format(name=kind.__name__)}


def find_types(operations: Iterable[Operation[Any]]) -> list[type]:
    """Return the types of all JSON bodies, lines and answers, each once.

    The OpenAPI document has them as components.
    """
    wanted = [kind for each in operations for kind in (each.body, each.line, *find_answers(each))]
    found: dict[type, None] = {}
    while wanted:
        kind = wanted.pop(0)
        wanted += get_args(kind)
        if isinstance(kind, type) and kind is not float and not get_args(kind):
            found[kind] = None
    return list(found)


def find_answers(operation: Operation[Any]) -> list[Any]:
    """Return the types of an operation's JSON answer; empty if it answers no JSON."""
    if operation.status == NO_CONTENT or operation.media_types:
        return []
    return [operation.answer, *([operation.other_answer] if operation.other_answer is not None else [])]


# ---- pages of lists: a page's opaque `next`, which clients send back as `after` to get the next page


def encode_cursor(position: int) -> str:
    return f"{position:016x}"


def cut_page(
    found: Sequence[Row], limit: int, position_of: Callable[[Row], int]
) -> tuple[list[Row], str | None]:
    """Return the first `limit` rows of `found`, and the cursor of the next page.

    The cursor is None on the last page.
    """
    page = list(found[:limit])
    return page, encode_cursor(position_of(page[-1])) if len(found) > limit else None


def decode_cursor(cursor: str | None) -> int | None:
    """Return the position after which the page starts; None for the first page.

    Raise Problem if it is invalid.
    """
    if cursor is None:
        return None
    if not re.fullmatch(CURSOR, cursor):
        reason = "after must be the `next` value of an earlier page, unchanged."
        raise refuse(reason, code="invalid-cursor", parameter="after")
    return int(cursor, 16)
