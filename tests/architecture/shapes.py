"""The answers of the API as TypedDicts for the client, made from the API's own description of them."""

import json
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from api.app import create_app
from tests.architecture.blocking import arrange
from vectormill.db.session import make_engine
from vectormill.settings import Settings

# By file, what methods of the client answer; what these refer to comes with them.
ROOTS: Final = {
    "jobs": ("JobBody", "ItemErrorBody", "TruncatedItemBody"),
    "collections": ("CollectionBody", "CollectionDetail", "RollbackAnswer", "IndexBody"),
    "items": ("PutAnswer", "ItemAnswer", "DeleteAnswer"),
    "searches": ("MatchBody", "SearchAnswer", "ManySearchesAnswer", "RerankAnswer", "EmbeddingsAnswer"),
    "sources": ("SourceBody", "SourceCheckBody", "PushBody", "FollowingBody"),
    "runs": ("RunBody", "RunLine", "ScheduleBody", "ScheduledRunBody"),
    "webhooks": ("WebhookBody", "NewWebhookBody", "DeliveryBody", "ReplayedBody"),
    "service": ("ModelBody", "ModelList", "WorkerBody", "WorkerList", "Readiness"),
}
# Two modules of the API may have one name for two things; in the client each has its own.
RENAMED: Final = {
    "api__bodies__indexes__IndexBody": "IndexBody",
    "api__bodies__collections__IndexBody": "CollectionIndexBody",
    "api__bodies__collections__GenerationBody": "GenerationBody",
    "api__bodies__generations__GenerationBody": "LiveGenerationBody",
    "api__bodies__embeddings__UsageBody": "EmbeddingsUsage",
}
PLACE: Final = "vectormill/client/shapes"
FILES: Final = (*ROOTS, "__init__")
LINE_CHARS: Final = 105
PLAIN: Final = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
REFERENCE: Final = "#/components/schemas/"


@cache
def describe_api() -> Mapping[str, Any]:
    """The description's schemas by their names here."""
    engine = make_engine("postgresql://nobody@127.0.0.1:1/nothing", application_name="test")
    document = json.loads(json.dumps(create_app(Settings(), engine).openapi()))
    engine.dispose()
    return {RENAMED.get(name, name): schema for name, schema in document["components"]["schemas"].items()}


def find_references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield name_of(schema)
        for value in schema.values():
            yield from find_references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from find_references(value)


def name_of(schema: Mapping[str, Any]) -> str:
    name: str = schema["$ref"].removeprefix(REFERENCE)
    return RENAMED.get(name, name)


@cache
def share_out() -> Mapping[str, tuple[str, ...]]:
    """By file, the names that it has: its roots and what only they, or they first, refer to. Referred to, then used."""
    schemas, taken = describe_api(), set[str]()

    def gather(name: str) -> Iterator[str]:
        if name in taken:
            return
        taken.add(name)
        for other in find_references(schemas[name]):
            yield from gather(other)
        yield name

    return {file: tuple(each for root in roots for each in gather(root)) for file, roots in ROOTS.items()}


def type_of(schema: Mapping[str, Any]) -> str:
    """A JSON schema as a type of Python."""
    if "$ref" in schema:
        return name_of(schema)
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(type_of(each) for each in schema["anyOf"]))
    if "enum" in schema:
        return f"Literal[{', '.join(json.dumps(value) for value in schema['enum'])}]"
    kind = schema.get("type")
    if kind == "array":
        return f"list[{type_of(schema.get('items', {}))}]"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"dict[str, {type_of(values) if isinstance(values, Mapping) else 'Any'}]"
    return PLAIN[kind] if kind else "Any"


def make_class(name: str) -> str:
    schema = describe_api()[name]
    required = schema.get("required", ())
    lines = [f"class {name}(TypedDict):"]
    if "description" in schema:
        said = textwrap.wrap(" ".join(schema["description"].split()), LINE_CHARS)
        lines += [
            "\n    ".join([f'    """{said[0]}', *said[1:]]) + ('"""' if len(said) == 1 else '\n    """'),
            "",
        ]
    for field, described in schema["properties"].items():
        written = type_of(described)
        lines.append(f"    {field}: {written if field in required else f'NotRequired[{written}]'}")
    return "\n".join(lines)


def make_shapes(file: str) -> str:
    """One module."""
    made = make_index() if file == "__init__" else make_module(file)
    return arrange(made, Path(PLACE) / f"{file}.py")


def make_module(file: str) -> str:
    names = share_out()[file]
    body = "\n\n\n".join(make_class(name) for name in names)
    typing = [word for word in ("Any", "Literal", "NotRequired", "TypedDict") if f"{word}" in body]
    others = {
        each: other
        for name in names
        for each in find_references(describe_api()[name])
        for other, theirs in share_out().items()
        if each in theirs and other != file
    }
    imports = "".join(
        f"from vectormill.client.shapes.{other} import {name}\n" for name, other in sorted(others.items())
    )
    return (
        f'"""Answers about {file}, as the API describes them. Made by `python -m tests.architecture.derived`."""\n\n'
        f"from typing import {', '.join(typing)}\n\n{imports}\n\n{body}\n"
    )


def make_index() -> str:
    """The package itself: every name."""
    imports = "".join(
        f"from vectormill.client.shapes.{file} import {', '.join(names)}\n"
        for file, names in share_out().items()
    )
    names = sorted(name for names in share_out().values() for name in names)
    listed = ", ".join(f'"{name}"' for name in names)
    return (
        '"""Shapes: answers of the API as types; `python -m tests.architecture.derived` makes all but `rows`."""\n\n'
        f"{imports}\n__all__ = [{listed}]\n"
    )
