"""What users see of a release, kept in files beside this one: each difference is a change that somebody meant.

`pytest tests/blackbox/test_seen.py --write-seen` writes the files anew; its commit names the reason of each
difference.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.blackbox.service import Service

KEPT = Path(__file__).parent / "seen"
ROOT = Path(__file__).parents[2]
# Lists the public names, and those of the client with signatures, in the environment of the program that is tested.
SIGNATURES = """
import inspect, vectormill, vectormill.client as module
print("from vectormill import", ", ".join(getattr(vectormill, "__all__", ())))
for name in sorted(module.__all__):
    value = getattr(module, name)
    print(name, inspect.signature(value) if callable(value) else "")
    if inspect.isclass(value):
        for attribute, member in inspect.getmembers(value):
            if not attribute.startswith("_"):
                print(f"    {name}.{attribute}", inspect.signature(member) if inspect.isfunction(member) else "")
"""
COLUMNS = """
SELECT column_name, data_type, udt_name FROM information_schema.columns WHERE table_name = '{name}'
ORDER BY ordinal_position
"""


def read_names(page: str, pattern: str) -> str:
    """Return what the pattern finds in a page of the docs, sorted, a line each."""
    return (
        "\n".join(sorted(set(re.findall(pattern, (ROOT / "docs" / page).read_text(), re.MULTILINE)))) + "\n"
    )


def read_metrics(service: Service) -> str:
    """Return the name and type of every metric."""
    lines = service.http.get("/metrics").text.splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith("# TYPE vectormill")})) + "\n"


def read_view(service: Service, name: str) -> str:
    """Return the columns of the view of a collection."""
    service.make_collection(name, keep_text=True)
    return "\n".join(" ".join(row) for row in service.sql(COLUMNS.format(name=name))) + "\n"


def read_signatures(program: Path) -> str:
    """Return the signatures of the Python client's public names."""
    done = subprocess.run(
        [program.parent / "python", "-c", SIGNATURES], capture_output=True, text=True, check=True, cwd="/"
    )
    return re.sub(r" at 0x[0-9a-f]+", "", done.stdout)


def read_document(service: Service) -> str:
    """Return the OpenAPI document, a line for each operation, parameter, body, answer and property."""
    document = service.ask("GET", "/openapi.json")
    lines = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            start = f"{method.upper()} {path}"
            lines.append(start)
            for parameter in operation.get("parameters", ()):
                must = "required " if parameter.get("required") else ""
                lines.append(
                    f"{start} ?{parameter['name']} in {parameter['in']}: {must}{tell(parameter['schema'])}"
                )
            for media, body in operation.get("requestBody", {}).get("content", {}).items():
                lines.append(f"{start} < {media}: {tell(body.get('schema', {}))}")
            for status, answer in operation["responses"].items():
                for media, body in answer.get("content", {"-": {}}).items():
                    lines.append(f"{start} > {status} {media}: {tell(body.get('schema', {}))}")
    for name, schema in document["components"]["schemas"].items():
        for property_name, each in schema.get("properties", {}).items():
            must = "required " if property_name in schema.get("required", ()) else ""
            lines.append(f"{name}.{property_name}: {must}{tell(each)}")
        if "properties" not in schema:
            lines.append(f"{name}: {tell(schema)}")
    return "\n".join(sorted(lines)) + "\n"


def tell(schema: dict[str, object]) -> str:
    """Return a schema on one line, without its titles and descriptions."""

    def strip(value: object) -> object:
        if isinstance(value, dict):
            return {
                key: strip(each)
                for key, each in value.items()
                if key not in ("title", "description", "examples")
            }
        return [strip(each) for each in value] if isinstance(value, list) else value

    return json.dumps(strip(schema), ensure_ascii=False, sort_keys=True).replace("#/components/schemas/", "")


@pytest.mark.parametrize(
    "what", ["openapi.txt", "settings.txt", "errors.txt", "metrics.txt", "client.txt", "view.txt"]
)
def test_what_users_see_is_what_was_kept(
    service: Service, program: Path, name: str, what: str, pytestconfig: pytest.Config
) -> None:
    if what == "openapi.txt":
        seen = read_document(service)
    elif what == "settings.txt":
        seen = read_names("CONFIGURATION.md", r"VECTORMILL_[A-Z0-9_]+")
    elif what == "errors.txt":
        seen = read_names("ERRORS.md", r"^\| `\w+` \| `([a-z0-9-]+)`")
    elif what == "metrics.txt":
        seen = read_metrics(service)
    elif what == "client.txt":
        seen = read_signatures(program)
    else:
        seen = read_view(service, name)
    assert seen.strip()
    if pytestconfig.getoption("--write-seen", default=False):
        (KEPT / what).write_text(seen)
    assert seen.splitlines() == (KEPT / what).read_text().splitlines()
