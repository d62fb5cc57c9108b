"""One word for one thing: no two public classes of the product share a name."""

import ast
from collections import defaultdict
from typing import Final

from tests.architecture.sources import PACKAGES, find_sources, parse

# Made of the asynchronous client, under its names.
MADE: Final = "vectormill/client/sync/"


def test_no_two_public_classes_have_one_name() -> None:
    places = defaultdict(list)
    for path in find_sources(*PACKAGES):
        if str(path).startswith(MADE):
            continue
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    assert places
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
