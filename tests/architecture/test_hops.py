"""The ways that docs/ARCHITECTURE.md draws are walked: each hop is there, and is handed what it takes over."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, parse

# The heading of each way, and the number of its hops at most.
MOST_HOPS = {"From command line to row": 7, "The hops of a chunk": 8, "The hops of a search": 6}
ROW = re.compile(
    r"^\| (?P<number>\d+) \| `(?P<function>[\w.]+)` \| `(?P<path>[\w/.]+)` \| "
    r"(?:(?P<before>\d+): `(?P<name>\w+)`)? ?\| .+ \|$"
)


@dataclass(frozen=True)
class Hop:
    number: int
    function: str
    path: Path
    before: int | None  # the hop that hands over
    name: str | None  # of what is called or sent then


def read_hops(of: str) -> list[Hop]:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.split(f"\n### {of}\n", 1)[1].split("\n#", 1)[0]
    rows = [row for line in section.splitlines() if (row := ROW.match(line))]
    assert len(rows) == sum(line.startswith("| ") and line[2].isdigit() for line in section.splitlines())
    return [
        Hop(
            int(row["number"]),
            row["function"],
            Path(row["path"]),
            int(row["before"]) if row["before"] else None,
            row["name"],
        )
        for row in rows
    ]


HOPS = {of: read_hops(of) for of in MOST_HOPS}


def find_function(tree: ast.Module, name: str) -> ast.AST | None:
    """A function of a module, or "Class.method"."""
    node: ast.AST | None = tree
    for part in name.split("."):
        children = getattr(node, "body", [])
        node = next((child for child in children if getattr(child, "name", None) == part), None)
    return node


def names_in(tree: ast.Module) -> set[str]:
    """What a module defines, calls, imports or names."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


@pytest.mark.parametrize(("of", "most"), MOST_HOPS.items())
def test_each_way_has_few_hops(of: str, most: int) -> None:
    hops = HOPS[of]
    assert [hop.number for hop in hops] == list(range(1, len(hops) + 1))
    assert 2 <= len(hops) <= most
    assert [hop.before for hop in hops].count(None) == 1


@pytest.mark.parametrize("of", MOST_HOPS)
def test_every_hop_is_where_it_is_said_to_be(of: str) -> None:
    gone = [
        f"{hop.path} has no function {hop.function}"
        for hop in HOPS[of]
        if not isinstance(
            find_function(parse(hop.path), hop.function), ast.FunctionDef | ast.AsyncFunctionDef
        )
    ]
    assert gone == [], "correct the table in docs/ARCHITECTURE.md"


@pytest.mark.parametrize("of", MOST_HOPS)
def test_the_hop_before_hands_over_as_is_said(of: str) -> None:
    """A hand-over is a call of either by the other, or a message that one makes and the other takes."""
    hops = HOPS[of]
    silent = [
        f"{path} says nothing of {hop.name}"
        for hop in hops
        if hop.before is not None
        for path in (hops[hop.before - 1].path, hop.path)
        if hop.name not in names_in(parse(path))
    ]
    assert silent == [], "correct the table in docs/ARCHITECTURE.md"
    assert all(hop.before < hop.number for hop in hops if hop.before is not None)
