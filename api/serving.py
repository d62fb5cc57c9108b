"""Serving: a function becomes the route of an operation. Its body and its query parameters are read, its answer is
written, and all are described by the types of that operation alone; parameters of path and header are the framework's.
"""

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, Final, TypeVar, get_args

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from starlette.datastructures import QueryParams

from api.dependencies import ResourcesDependency
from api.door.media_types import FORM_TYPE, JSON_TYPE, require_json
from api.intake.requests import decode_body, split_path
from api.intake.submissions import NDJSON_TYPES, read_body
from api.problems import Place, Problem
from vectormill.operation import NO_CONTENT, Operation

REFERENCE: Final = "#/components/schemas/{name}"
WRITER: Final = msgspec.json.Encoder()

Handler = TypeVar("Handler", bound=Callable[..., Any])
Query = TypeVar("Query", bound=msgspec.Struct)


def serve(router: APIRouter, operation: Operation[Any]) -> Callable[[Handler], Handler]:
    """Make the decorated function the route of the operation.

    An argument `body` is the decoded body, `query` the query parameters; what it returns is the answer, or the response
    itself. A function that is not a coroutine runs in a thread.
    """

    def register(handler: Handler) -> Handler:
        router.add_api_route(
            operation.path,
            make_endpoint(operation, handler),
            methods=[operation.method],
            status_code=operation.status,
            response_class=Response,
            response_model=None,
            openapi_extra=describe_operation(operation),
        )
        return handler

    return register


def make_endpoint(operation: Operation[Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its body and query as dependencies and its answer as a response."""
    signature = inspect.signature(handler)
    parameters = dict(signature.parameters)
    for name, kind, make_reader in (
        ("body", operation.body, make_body_reader),
        ("query", operation.query, make_query_reader),
    ):
        if name in parameters:
            assert kind is not None, f"{operation.path} has no {name}"
            parameters[name] = parameters[name].replace(
                annotation=Annotated[kind, Depends(make_reader(kind))]
            )

    def endpoint(**arguments: Any) -> Response:
        return respond(operation, handler(**arguments))

    async def async_endpoint(**arguments: Any) -> Response:
        return respond(operation, await handler(**arguments))

    chosen = functools.wraps(handler)(async_endpoint if inspect.iscoroutinefunction(handler) else endpoint)
    chosen.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
    return chosen


def respond(
    operation: Operation[Any],
    answer: Any,
    *,
    status: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return the response with this answer, which may be one already."""
    if isinstance(answer, Response):
        return answer
    if operation.status == NO_CONTENT:
        return Response(status_code=NO_CONTENT)
    told = {} if operation.location is None else {"Location": operation.location.format_map(answer)}
    return Response(
        write_answer(answer), status or operation.status, told | dict(headers or {}), media_type=JSON_TYPE
    )


def write_answer(answer: Any) -> bytes:
    """Return the answer as JSON. An integer of more than 64 bits, as metadata may have, takes the slower way."""
    try:
        return WRITER.encode(answer)
    except OverflowError:
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def make_body_reader(body: type[msgspec.Struct]) -> Callable[..., Any]:
    """Return the dependency that reads a body of this type. It raises Problem."""
    decoder = msgspec.json.Decoder(body)

    async def read(request: Request, resources: ResourcesDependency) -> msgspec.Struct:
        require_json(request)
        with resources.gates.json_bytes.hold() as hold:
            return await run_in_threadpool(
                decode_body, await read_body(request, resources.settings, hold), decoder
            )

    return read


def make_query_reader(query: type[msgspec.Struct]) -> Callable[..., Any]:
    """Return the dependency that reads query parameters as this type. It raises Problem."""

    async def read(request: Request) -> msgspec.Struct:
        return parse_query(request.query_params, query)

    return read


def parse_query(given: QueryParams, query: type[Query]) -> Query:
    """Return the query parameters. Raise Problem naming one that is unknown, repeated or wrong."""
    values: dict[str, str] = {}
    for name, value in given.multi_items():
        if name in values:
            raise refuse_parameter(name, "it is given more than once")
        values[name] = value
    known = query.__struct_fields__
    for name in values:
        if name not in known:
            raise refuse_parameter(name, f"there is no such query parameter; there are {', '.join(known)}")
    try:
        return msgspec.convert(values, query, strict=False)
    except msgspec.ValidationError as error:
        reason, name = split_path(str(error))
        choices = next(each for each in describe_query(query) if each["name"] == name)["schema"].get("enum")
        raise refuse_parameter(
            name, f"{reason}; it is one of {', '.join(choices)}" if choices else reason
        ) from error


def refuse_parameter(name: str, reason: str) -> Problem:
    return Problem(422, "invalid-request", f"{name}: {reason}.", errors=[Place(reason, parameter=name)])


def describe_operation(operation: Operation[Any]) -> dict[str, Any]:
    """Return what the OpenAPI document says of the query parameters, the body and the answer."""
    described: dict[str, Any] = {}
    if operation.query is not None:
        described["parameters"] = describe_query(operation.query)
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
        answer: dict[str, Any] = {"content": {media_type: {} for media_type in operation.media_types}}
        if not operation.media_types:
            schemas = [refer_to(kind) for kind in find_answers(operation)]
            answer = {
                "content": {JSON_TYPE: {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}
            }
        described["responses"] = {str(operation.status): answer}
        if operation.other_status is not None:
            described["responses"][str(operation.other_status)] = answer
    return described


def describe_query(query: type[msgspec.Struct]) -> list[dict[str, Any]]:
    """Return the fields as query parameters. None of them has a null: it is left out instead."""
    _, components = msgspec.json.schema_components([query], ref_template=REFERENCE)
    return [
        describe_parameter(name, schema) for name, schema in components[query.__name__]["properties"].items()
    ]


def describe_parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    (value,) = (each for each in schema.pop("anyOf", [{}]) if each.get("type") != "null")
    if schema.get("default", ...) is None:
        del schema["default"]
    description = schema.pop("description", None)
    told = {"name": name, "in": "query", "required": False, "schema": value | schema}
    return told if description is None else told | {"description": description}


def refer_to(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a type: a reference to a component, or what a list or a union is made of."""
    arguments = [refer_to(each) for each in get_args(kind)]
    if isinstance(kind, UnionType):
        return {"anyOf": arguments}
    if arguments:  # of a list
        return {"type": "array", "items": arguments[0]}
    return {"type": "number"} if kind is float else {"$ref": REFERENCE.format(name=kind.__name__)}


def find_types(operations: Iterable[Operation[Any]]) -> list[type]:
    """Return the types of all bodies, lines and answers in JSON that are components, each once."""
    wanted = [kind for each in operations for kind in (each.body, each.line, *find_answers(each))]
    found: dict[type, None] = {}
    while wanted:
        kind = wanted.pop(0)
        wanted += get_args(kind)
        if isinstance(kind, type) and kind is not float and not get_args(kind):
            found[kind] = None
    return list(found)


def find_answers(operation: Operation[Any]) -> list[Any]:
    """Return the types of the answer in JSON."""
    if operation.status == NO_CONTENT or operation.media_types:
        return []
    return [operation.answer, *([operation.other_answer] if operation.other_answer is not None else [])]
