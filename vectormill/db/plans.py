"""Plans of Postgres: the nodes of what EXPLAIN (FORMAT JSON) returns."""

from collections.abc import Iterator, Mapping
from typing import Any


def walk_plan(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the plan node and all nodes below it."""
    yield node
    for below in node.get("Plans", ()):
        yield from walk_plan(below)
