"""Serving: a function becomes the route of an operation. Its body is read, its answer written and both are described by
the types of that operation alone; parameters of path, query and header are the framework's.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Final, TypeVar, cast

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from api.dependencies import ResourcesDependency
from api.door.media_types import JSON_TYPE, require_json
from api.intake.requests import decode_body
from api.intake.submissions import read_body
from vectormill.operation import NO_CONTENT, Operation

REFERENCE: Final = "#/components/schemas/{name}"
WRITER: Final = msgspec.json.Encoder()

Handler = TypeVar("Handler", bound=Callable[..., Any])


def serve(
    router: APIRouter, operation: Operation[Any], content: Mapping[str, Any] | None = None
) -> Callable[[Handler], Handler]:
    """Make the decorated function the route of the operation.

    It runs in a thread, a coroutine on the event loop. An argument `body` is the decoded body, and what it returns is
    the answer. `content` describes the body, by media type, where the function reads it itself.
    """

    def register(handler: Handler) -> Handler:
        router.add_api_route(
            operation.path,
            make_endpoint(operation, handler),
            methods=[operation.method],
            status_code=operation.status,
            response_model=None,
            openapi_extra=describe_operation(operation, content),
        )
        return handler

    return register


def make_endpoint(operation: Operation[Any], handler: Callable[..., Any]) -> Callable[..., Response]:
    """Return the function with its body as a dependency and its answer as a response."""
    signature = inspect.signature(handler)
    parameters = dict(signature.parameters)
    if operation.body is not None:
        reader = Depends(make_reader(operation.body))
        parameters["body"] = parameters["body"].replace(annotation=Annotated[operation.body, reader])

    def respond(answer: Any) -> Response:
        if operation.status == NO_CONTENT:
            return Response(status_code=NO_CONTENT)
        headers = {} if operation.location is None else {"Location": operation.location.format_map(answer)}
        return Response(WRITER.encode(answer), operation.status, headers, JSON_TYPE)

    @functools.wraps(handler)
    def endpoint(**arguments: Any) -> Response:
        return respond(handler(**arguments))

    @functools.wraps(handler)
    async def endpoint_on_loop(**arguments: Any) -> Response:
        return respond(await handler(**arguments))

    chosen: Any = endpoint_on_loop if inspect.iscoroutinefunction(handler) else endpoint
    chosen.__signature__ = signature.replace(parameters=list(parameters.values()))
    return cast("Callable[..., Response]", chosen)


def make_reader(body: type[msgspec.Struct]) -> Callable[..., Any]:
    """Return the dependency that reads a body of this type. It raises Problem."""
    decoder = msgspec.json.Decoder(body)

    async def read(request: Request, resources: ResourcesDependency) -> msgspec.Struct:
        require_json(request)
        with resources.gates.json_bytes.hold() as hold:
            return await run_in_threadpool(
                decode_body, await read_body(request, resources.settings, hold), decoder
            )

    return read


def describe_operation(operation: Operation[Any], content: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what the OpenAPI document says of the body and the answer."""
    described: dict[str, Any] = {}
    if content is not None:
        described["requestBody"] = {"required": True, "content": dict(content)}
    if operation.body is not None:
        example = {"example": operation.example} if operation.example else {}
        content = {JSON_TYPE: {"schema": refer_to(operation.body)} | example}
        described["requestBody"] = {"required": True, "content": content}
    if operation.status != NO_CONTENT:
        answer = {JSON_TYPE: {"schema": refer_to(operation.answer)}}
        described["responses"] = {str(operation.status): {"content": answer}}
    return described


def refer_to(kind: type) -> dict[str, str]:
    return {"$ref": REFERENCE.format(name=kind.__name__)}


def find_types(operations: Iterable[Operation[Any]]) -> list[type]:
    """Return the types of all bodies and answers, each once."""
    wanted = ((each.body, None if each.status == NO_CONTENT else each.answer) for each in operations)
    return list(dict.fromkeys(kind for pair in wanted for kind in pair if kind is not None))
