"""Write the parts of the Python client that are made and not written: `python -m tools.client`.

`vectormill/client/sync`, the client that blocks, is made from the asynchronous one by replacing words; what is more
than words is in `flow`. `vectormill/client/shapes` has the types of answers that are not yet defined with their feature
(decision 0050), made from the API's own description. A test makes both again and compares.
"""

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from api.app import create_app
from vectormill.db.session import make_engine
from vectormill.settings import Settings

ROOT: Final = Path(__file__).parents[1]
ASYNC: Final = "vectormill/client/aio"
BLOCKING: Final = "vectormill/client/sync"
BY_HAND: Final = "flow.py"
WORDS: Final = (
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAwaitable\[([^\[\]]*)\]", r"\1"),
    (r"AsyncIterable\[(\w+)\] \| Iterable\[\1\]", r"Iterable[\1]"),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\b__a(enter|exit|iter|next)__\b", r"__\1__"),
    (r"\ba(close|read|next|iter_bytes)\b", r"\1"),
    (r"\bAsync(?=[A-Z])", ""),
    (r"\bvectormill\.client\.aio\b", "vectormill.client.sync"),
    (r"\bfor_aio\b", "for_sync"),
)
NOTE: Final = "# Made of the same file in `aio` by `python -m tools.client`: change that one.\n"

# By file, what methods of the client answer; what these refer to comes with them.
ROOTS: Final = {
    "collections": ("CollectionBody", "CollectionDetail", "RollbackAnswer"),
    "items": ("PutAnswer", "ItemAnswer", "DeleteAnswer"),
    "searches": ("MatchBody", "SearchAnswer", "ManySearchesAnswer"),
}
# Types of features that define their bodies themselves (decision 0050), by module.
DEFINED: Final = {
    "vectormill.batches.endpoints": ("EmbeddingsAnswer", "EmbeddingsUsage", "RerankAnswer"),
    "vectormill.collections.indexes.bodies": (
        "BuildProgressBody",
        "IndexBody",
        "IndexPlanBody",
        "OneIndexBody",
    ),
    "vectormill.jobs.bodies": (
        "BottleneckBody",
        "ItemErrorBody",
        "JobBody",
        "RecordRow",
        "ScoreRow",
        "StageBody",
        "TruncatedItemBody",
        "VectorRow",
    ),
    "vectormill.models.bodies": ("ModelBody", "ModelList"),
    "vectormill.runs.bodies": ("EncodingBody", "RunBody"),
    "vectormill.schedules.bodies": ("ScheduleBody", "ScheduledRunBody"),
    "vectormill.sources.bodies": (
        "FollowingBody",
        "PushBody",
        "SourceBody",
        "SourceCheckBody",
        "SourceRowBody",
    ),
    "vectormill.webhooks.bodies": ("WebhookBody", "NewWebhookBody", "DeliveryBody", "ReplayedBody"),
    "vectormill.workers.bodies": ("Readiness", "ScheduleHealth", "WorkerBody", "WorkerList"),
}
PLACE: Final = "vectormill/client/shapes"
FILES: Final = (*ROOTS, "__init__")
LINE_CHARS: Final = 105
PLAIN: Final = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
REFERENCE: Final = "#/components/schemas/"


@cache
def describe_api() -> Mapping[str, Any]:
    """Return the schemas of the API's description by their names."""
    engine = make_engine("postgresql://nobody@127.0.0.1:1/nothing", application_name="test")
    document = json.loads(json.dumps(create_app(Settings(), engine).openapi()))
    engine.dispose()
    schemas: dict[str, Any] = document["components"]["schemas"]
    return schemas


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
    return name


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
        f'"""Answers about {file}, as the API describes them. Made by `python -m tools.client`."""\n\n'
        f"from typing import {', '.join(typing)}\n\n{imports}\n\n{body}\n"
    )


def make_index() -> str:
    """The package itself: every name."""
    imports = "".join(
        f"from vectormill.client.shapes.{file} import {', '.join(names)}\n"
        for file, names in share_out().items()
    )
    imports += "".join(f"from {module} import {', '.join(names)}\n" for module, names in DEFINED.items())
    names = sorted(name for place in (share_out(), DEFINED) for names in place.values() for name in names)
    listed = ", ".join(f'"{name}"' for name in names)
    return (
        '"""Shapes: answers of the API as types. Made by `python -m tools.client`."""\n\n'
        f"{imports}\n__all__ = [{listed}]\n"
    )


def list_files() -> tuple[str, ...]:
    """Of the asynchronous client those that are translated, by their path below it."""
    folder = ROOT / ASYNC
    return tuple(
        sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py") if path.name != BY_HAND)
    )


def make_blocking(file: str) -> str:
    text = (ROOT / ASYNC / file).read_text(encoding="utf-8")
    for pattern, replacement in WORDS:
        text = re.sub(pattern, replacement, text)
    return arrange(NOTE + text, Path(BLOCKING) / file)


def arrange(text: str, path: Path) -> str:
    """The text as the linter wants imports and lines."""
    ruff = (sys.executable, "-m", "ruff")
    for command in (("check", "--select", "I,F401", "--fix-only", "--quiet"), ("format", "--quiet")):
        text = subprocess.run(
            [*ruff, *command, "--stdin-filename", str(path), "-"],
            input=text, capture_output=True, text=True, check=True, cwd=ROOT,
        ).stdout  # fmt: skip
    return text


def make_files() -> dict[str, str]:
    """Return the text of every made file by its path from the root."""
    blocking = {f"{BLOCKING}/{file}": make_blocking(file) for file in list_files()}
    return blocking | {f"{PLACE}/{file}.py": make_shapes(file) for file in FILES}


def main() -> None:
    for file, text in make_files().items():
        (ROOT / file).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
