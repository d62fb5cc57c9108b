"""The meaning of filters on metadata in Python, with which their SQL is compared."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vectormill.search.filter import (
    GT,
    GTE,
    LT,
    LTE,
    AllOf,
    AnyOf,
    Contains,
    Exists,
    FieldRange,
    Filter,
    Not,
    OneOf,
    Scalar,
)

COMPARE: Final[Mapping[str, Any]] = {GT: operator.gt, GTE: operator.ge, LT: operator.lt, LTE: operator.le}


def fits(condition: Filter, metadata: Mapping[str, Any]) -> bool:
    """Return whether metadata satisfies a filter. Strings are compared by code points, as in Postgres' collation C."""
    match condition:
        case AllOf(parts):
            return all(fits(part, metadata) for part in parts)
        case AnyOf(parts):
            return any(fits(part, metadata) for part in parts)
        case Not(part):
            return not fits(part, metadata)
        case Exists(path):
            return _find(metadata, path)[0]
        case OneOf(path, values):
            is_there, found = _find(metadata, path)
            return is_there and any(is_equal(found, value) for value in values)
        case Contains(path, value):
            _, found = _find(metadata, path)
            return isinstance(found, list) and any(is_equal(element, value) for element in found)
        case FieldRange(path, name, value):
            _, found = _find(metadata, path)
            return find_json_type(found) == find_json_type(value) and bool(COMPARE[name](found, value))


def _find(metadata: Any, path: Sequence[str]) -> tuple[bool, Any]:
    """Return (True, the value at the path), or (False, None). A path leads through objects only, not into lists."""
    found = metadata
    for name in path:
        if not isinstance(found, Mapping) or name not in found:
            return False, None
        found = found[name]
    return True, found


def find_json_type(value: Any) -> str:
    """Return the JSON type of a value as jsonb_typeof names it. In Python True is an int, but here it is a boolean."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def is_equal(found: Any, value: Scalar) -> bool:
    return find_json_type(found) == find_json_type(value) and bool(found == value)
