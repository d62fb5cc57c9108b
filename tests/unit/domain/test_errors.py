"""The tree of errors that is drawn at the head of errors.py is the tree of the classes."""

import re

from vectormill.domain import errors
from vectormill.domain.errors import VectormillError

BRANCH = re.compile(r"^((?:│   |    )*)[├└]── (\w+)", re.MULTILINE)


def read_drawing(drawing: str) -> dict[str, str]:
    """Class -> its base, by how far each is indented."""
    path = [VectormillError.__name__]
    bases = {}
    for indent, name in BRANCH.findall(drawing):
        depth = len(indent) // 4 + 1
        path[depth:] = [name]
        bases[name] = path[depth - 1]
    return bases


def test_every_error_is_drawn_below_the_one_that_it_is_a_kind_of() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    bases = {kind.__name__: kind.__bases__[0].__name__ for kind in kinds if kind is not VectormillError}
    assert read_drawing(errors.__doc__ or "") == bases
