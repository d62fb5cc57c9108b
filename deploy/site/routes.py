"""Generate the HTTP reference from the API's OpenAPI document, as one page. Starts no server."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from sqlalchemy import create_engine

from api.app import create_app
from vectormill.settings import Settings

Json = Mapping[str, Any]
METHODS: Final = ("get", "put", "post", "patch", "delete")
PROBLEM: Final = "application/problem+json"
# A database URL that is never used, because an engine connects only when it is first used.
NOWHERE: Final = "postgresql+psycopg://localhost/none"


def describe_routes() -> str:
    """Return Markdown with a section for each path of the API."""
    document = create_app(Settings.model_construct(), create_engine(NOWHERE)).openapi()
    return "\n".join(describe_document(document))


def describe_document(document: Json) -> Iterator[str]:
    yield "# HTTP\n"
    yield "Generated from the OpenAPI document, which every API serves at `/openapi.json`; `/docs` has forms.\n"
    yield "Every error is a problem details object (RFC 9457): [errors](../ERRORS.md).\n"
    for path, operations in sorted(document["paths"].items()):
        yield f"## {path}\n"
        for method in METHODS:
            if method in operations:
                yield from describe_operation(method, path, operations[method])


def describe_operation(method: str, path: str, operation: Json) -> Iterator[str]:
    yield f"### {method.upper()} {path}\n"
    yield f"{plain(operation.get('description') or operation.get('summary', ''), joined=False)}\n"
    parameters = operation.get("parameters", ())
    if parameters:
        yield "| parameter | in | type | meaning |\n| --- | --- | --- | --- |"
        yield from (describe_parameter(each) for each in parameters)
        yield ""
    if body := operation.get("requestBody"):
        kinds = ", ".join(
            f"{name_type(each.get('schema', {}))} as `{kind}`" for kind, each in body["content"].items()
        )
        yield f"Body: {kinds}.\n"
    answers = [
        f"{status} {plain(each.get('description', '')).rstrip('.')}"
        for status, each in operation["responses"].items()
        if PROBLEM not in each.get("content", {})
    ]
    yield f"Answers: {'; '.join(answers)}.\n"


def describe_parameter(parameter: Json) -> str:
    name = f"`{parameter['name']}`" + (" (required)" if parameter.get("required") else "")
    kind, meaning = name_type(parameter.get("schema", {})), plain(parameter.get("description", ""))
    return f"| {name} | {parameter['in']} | {kind} | {meaning} |"


def name_type(schema: Json) -> str:
    """Return the name of a JSON schema's type, such as `integer`, `Job` or `string or null`."""
    if reference := schema.get("$ref"):
        return f"`{reference.rpartition('/')[2]}`"
    several = schema.get("anyOf") or schema.get("oneOf")
    if several:
        return " or ".join(dict.fromkeys(name_type(each) for each in several))
    if values := schema.get("enum"):
        return ", ".join(f"`{value}`" for value in values)
    return f"{schema.get('type', 'any')}"


def plain(text: str, *, joined: bool = True) -> str:
    """Escape a docstring for Markdown; by default join it into one line for a table cell."""
    safe = text.replace("<", "&lt;").replace("[", "\\[")
    return " ".join(safe.split()).replace("|", "\\|") if joined else safe
