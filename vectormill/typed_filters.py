"""Filters as people type them: a JSON object, or `lang=de`, `year>=2020`. Knows nothing of what they are asked of."""

import json
import re
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from vectormill.domain.errors import InvalidOption
from vectormill.domain.filter import EQ, GT, GTE, LT, LTE, NE

COMPARISON: Final = re.compile(r"([^=<>!]+)(>=|<=|!=|=|>|<)(.*)", re.DOTALL)
OPERATOR_BY_SIGN: Final = {"=": EQ, "!=": NE, ">": GT, ">=": GTE, "<": LT, "<=": LTE}


def read_filters(written: Sequence[str], told_as: str = "--filter") -> dict[str, Any] | None:
    """One filter that all of the written ones are parts of; None of none. Raises InvalidOption that names `told_as`."""
    parts = [read_filter(one, told_as) for one in written]
    return {"and": parts} if len(parts) > 1 else parts[0] if parts else None


def read_filter(written: str, told_as: str) -> dict[str, Any]:
    """The filter of `{"lang": "de"}`, `lang=de` or `year>=2020`; a value that reads as JSON is what JSON says."""
    if written.lstrip().startswith("{"):
        try:
            parsed = json.loads(written, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise InvalidOption(f"{told_as} {written} is not JSON: {error}.") from error
        return dict(parsed)
    comparison = COMPARISON.fullmatch(written)
    if comparison is None:
        raise InvalidOption(
            f"""{told_as} {written} is no filter; write name=value, name>=value, or JSON as '{{"lang": "de"}}'."""
        )
    name, sign, value = comparison.groups()
    return {name.strip(): {OPERATOR_BY_SIGN[sign]: read_value(value)}}


def read_value(written: str) -> Any:
    """2020 is a number, true and null are themselves, and what is no JSON is a string; "2020" in quotes is one too."""
    try:
        value = json.loads(written, parse_constant=lambda name: name)
    except (ValueError, RecursionError):  # nested too deeply is no value either
        return written.strip()
    return written.strip() if isinstance(value, dict | list) else value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
