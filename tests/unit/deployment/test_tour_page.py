"""The client's tour names what the client has, and shows what it gave; a service runs it in tests/acceptance."""

import ast
import inspect
import json
import re
from typing import Any, Final

import pytest

from tests.architecture.sources import DOCS
from vectormill.client import Client, Results

TOUR: Final = DOCS / "tour.ipynb"
CELLS: Final[list[dict[str, Any]]] = json.loads(TOUR.read_text(encoding="utf-8"))["cells"]
CODE: Final = [cell for cell in CELLS if cell["cell_type"] == "code"]


def find_calls(code: str, owner: type) -> list[ast.Call]:
    """Calls of methods of the client, or of what is fetched by one."""
    return [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and is_of(node.func.value, owner)
    ]


def is_of(node: ast.expr, owner: type) -> bool:
    if owner is Client:
        return isinstance(node, ast.Name) and node.id == "client"
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("vectors", "collection_rows")
    )


@pytest.mark.parametrize("owner", [Client, Results])
def test_the_tour_asks_for_what_there_is(owner: type) -> None:
    calls = [call for cell in CODE for call in find_calls("".join(cell["source"]), owner)]
    assert calls
    for call in calls:
        assert isinstance(call.func, ast.Attribute)
        signature = inspect.signature(getattr(owner, call.func.attr))
        arguments = [None] * (1 + len(call.args))  # itself, and those without a name
        signature.bind(*arguments, **{word.arg: None for word in call.keywords if word.arg})


def test_the_tour_tells_of_no_machine_and_keeps_no_state_of_widgets() -> None:
    text = TOUR.read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|tmp|work|usr|dev)/|127\.0\.0\.1:|localhost|widget", text)
    assert "iopub" not in text  # when a cell ran
