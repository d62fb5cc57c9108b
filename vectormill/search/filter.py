r"""Filter: a condition on an item's metadata, which clients write in JSON, and how it is parsed.

    {"lang": "de", "year": {"gte": 2020, "lt": 2025}, "tag": {"in": ["a", "b"]}, "author": {"exists": true}}

Every entry must hold. `and` and `or` take lists of filters, `not` takes one; a dotted name leads into an object, and
one in double quotes is taken as it is: `{"\"file.name\"": "a"}`. vectormill/search/filter_sql.py makes SQL of it.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from vectormill.collections.index_plan import is_storable, split_field
from vectormill.domain.errors import InvalidOption

EQ: Final = "eq"
NE: Final = "ne"
IN: Final = "in"
GT: Final = "gt"
GTE: Final = "gte"
LT: Final = "lt"
LTE: Final = "lte"
CONTAINS: Final = "contains"
EXISTS: Final = "exists"

RANGES: Final = (GT, GTE, LT, LTE)
OPERATORS: Final = (EQ, NE, IN, *RANGES, CONTAINS, EXISTS)

AND: Final = "and"
OR: Final = "or"
NOT: Final = "not"

# Without an index a filter is evaluated for every row; a filter beyond these limits is a list of keys, not a condition.
MAX_CONDITIONS: Final = 100
MAX_LISTED: Final = 1000
MAX_DEPTH: Final = 8
MAX_STRING_CHARS: Final = 10_000
# An error message shows at most this many characters of the path to the faulty entry.
MAX_PLACE_CHARS: Final = 120
# Larger numbers differ between Postgres' numeric and a double.
MAX_NUMBER: Final = 1e300

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class FieldRange:
    """The condition that the value at `path` is less or greater than `value`, or equal to it, and of its JSON type."""

    path: tuple[str, ...]
    operator: str  # one of RANGES
    value: Scalar


@dataclass(frozen=True, slots=True)
class OneOf:
    """The condition that the value at `path` equals one of `values`."""

    path: tuple[str, ...]
    values: tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class Contains:
    """The condition that the value at `path` is a list with an element that equals `value`."""

    path: tuple[str, ...]
    value: Scalar


@dataclass(frozen=True, slots=True)
class Exists:
    """The condition that there is a value at `path`, even null."""

    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AllOf:
    """The condition that all parts hold; without parts it always holds."""

    parts: "tuple[Filter, ...]"


@dataclass(frozen=True, slots=True)
class AnyOf:
    """The condition that at least one part holds."""

    parts: "tuple[Filter, ...]"


@dataclass(frozen=True, slots=True)
class Not:
    part: "Filter"


Filter = FieldRange | OneOf | Contains | Exists | AllOf | AnyOf | Not


def parse_filter(written: Any, place: str = "filter") -> Filter:
    """Parse a filter that a client wrote. Raise InvalidOption, which names the bad entry, such as `filter.year.gte`."""
    parsed = _parse(written, place, 1)
    if sum(1 for _ in list_conditions(parsed)) > MAX_CONDITIONS:
        raise _refusal(place, f"more than {MAX_CONDITIONS} conditions; combine some of them with `in`")
    return parsed


def list_conditions(condition: Filter) -> Iterator[FieldRange | OneOf | Contains | Exists]:
    """Yield the conditions on single fields that a filter is made of."""
    if isinstance(condition, AllOf | AnyOf | Not):
        for part in (condition.part,) if isinstance(condition, Not) else condition.parts:
            yield from list_conditions(part)
    else:
        yield condition


def list_fields(condition: Filter) -> set[str]:
    """Return the names of the metadata fields that a filter compares; of a nested field, the outermost name."""
    return {each.path[0] for each in list_conditions(condition)}


def _parse(written: Any, place: str, depth: int) -> Filter:
    if depth > MAX_DEPTH:
        raise _refusal(place, f"nested more than {MAX_DEPTH} levels deep")
    if not isinstance(written, Mapping):
        raise _refusal(place, 'a filter must be an object, such as {"lang": "de"}')
    if len(written) > MAX_CONDITIONS:
        raise _refusal(place, f"more than {MAX_CONDITIONS} conditions")
    parts: list[Filter] = []
    for name, wanted in written.items():
        here = f"{place}.{name}"
        if name in (AND, OR):
            if not isinstance(wanted, Sequence) or isinstance(wanted, str) or not wanted:
                raise _refusal(
                    here,
                    f'{name} takes a list of filters, such as {{"{name}": [{{"lang": "de"}}, {{"lang": "fr"}}]}}',
                )
            if len(wanted) > MAX_CONDITIONS:
                raise _refusal(here, f"more than {MAX_CONDITIONS} filters")
            listed = tuple(_parse(part, f"{here}[{at}]", depth + 1) for at, part in enumerate(wanted))
            parts.append(AllOf(listed) if name == AND else AnyOf(listed))
        elif name == NOT:
            parts.append(Not(_parse(wanted, here, depth + 1)))
        else:
            try:
                path = split_field(name)
            except ValueError as error:
                raise _refusal(here, str(error)) from None
            if not isinstance(wanted, Mapping):
                parts.append(OneOf(path, (_check_scalar(wanted, here),)))
            elif not wanted:
                raise _refusal(here, f"no operator given; expected one of: {', '.join(OPERATORS)}")
            else:
                parts += [_parse_operator(path, each, wanted[each], f"{here}.{each}") for each in wanted]
    return parts[0] if len(parts) == 1 else AllOf(tuple(parts))


def _parse_operator(path: tuple[str, ...], name: str, value: Any, place: str) -> Filter:
    if name == EXISTS:
        if not isinstance(value, bool):
            raise _refusal(place, "exists must be true or false")
        return Exists(path) if value else Not(Exists(path))
    if name == IN:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise _refusal(place, 'in takes a list, such as {"in": ["a", "b"]}')
        if len(value) > MAX_LISTED:
            raise _refusal(place, f"in takes at most {MAX_LISTED:,} values")
        return OneOf(path, tuple(_check_scalar(one, f"{place}[{at}]") for at, one in enumerate(value)))
    if name in RANGES:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise _refusal(place, f"{name} takes a number or a string")
        return FieldRange(path, name, _check_scalar(value, place))
    if name == CONTAINS:
        return Contains(path, _check_scalar(value, place))
    if name in (EQ, NE):
        equal = OneOf(path, (_check_scalar(value, place),))
        return equal if name == EQ else Not(equal)
    raise _refusal(place, f"unknown operator; expected one of: {', '.join(OPERATORS)}")


def _check_scalar(value: Any, place: str) -> Scalar:
    if isinstance(value, str):
        if len(value) > MAX_STRING_CHARS:
            raise _refusal(place, f"a string may have at most {MAX_STRING_CHARS:,} characters")
        if not is_storable(value):
            raise _refusal(
                place,
                "contains a NUL character or half of a UTF-16 surrogate pair, which Postgres cannot store",
            )
        return value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        if not abs(value) <= MAX_NUMBER or not math.isfinite(value):
            raise _refusal(place, f"a number must be within ±{MAX_NUMBER:g}")
        return value
    raise _refusal(
        place,
        'must be a string, a number, true, false or null; for one of several values use {"in": […]}, and for a list '
        'with an element {"contains": …}',
    )


def _refusal(place: str, reason: str) -> InvalidOption:
    shown = place if len(place) <= MAX_PLACE_CHARS else f"{place[:MAX_PLACE_CHARS]}…"
    return InvalidOption(f"{shown.encode('utf-8', 'replace').decode()}: {reason}.")


def fits_nothing(condition: Filter) -> bool:
    """Return whether a row without any metadata satisfies the filter."""
    match condition:
        case AllOf(parts):
            return all(map(fits_nothing, parts))
        case AnyOf(parts):
            return any(map(fits_nothing, parts))
        case Not(part):
            return not fits_nothing(part)
        case _:
            return False


COMPARISON: Final = re.compile(r'((?:"[^"]*"|[^=<>!"])+)(>=|<=|!=|=|>|<)(.*)', re.DOTALL)
OPERATOR_BY_SIGN: Final = {"=": EQ, "!=": NE, ">": GT, ">=": GTE, "<": LT, "<=": LTE}
# Signs of other languages, which would otherwise be a comparison with a value that begins with the second character.
MISTAKEN_SIGNS: Final = {"=>": ">=", "=<": "<=", "==": "=", "<>": "!=", "=!": "!="}


def read_filters(written: Sequence[str], told_as: str = "--filter") -> dict[str, Any] | None:
    """Combine the filters of a command line with `and`; return None if there are none.

    Raise InvalidOption, which names the option `told_as`.
    """
    parts = [read_filter(one, told_as) for one in written]
    return {"and": parts} if len(parts) > 1 else parts[0] if parts else None


def read_filter(written: str, told_as: str) -> dict[str, Any]:
    """Parse a filter: `{"lang": "de"}`, `year>=2020` or `"file.name"=a`. Raise InvalidOption, which names `told_as`."""
    if written.lstrip().startswith("{"):
        try:
            parsed = json.loads(written, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise InvalidOption(f"Invalid {told_as} {written}: not JSON ({error}).") from error
        return dict(parsed)
    comparison = COMPARISON.fullmatch(written)
    if comparison is None:
        raise InvalidOption(
            f"""Invalid {told_as} {written}: expected name=value, name>=value, or JSON such as '{{"lang": "de"}}'."""
        )
    name, sign, value = comparison.groups()
    rest = value.lstrip()
    if rest.startswith(("=", "<", ">", "!")):
        meant = MISTAKEN_SIGNS.get(sign + rest[0], sign)
        raise InvalidOption(
            f"Invalid {told_as} {written}: {sign}{rest[0]} is not a comparison; write {name}{meant}{rest[1:]}, or put "
            f"a value that begins with {rest[0]} in double quotes."
        )
    return {name.strip(): {OPERATOR_BY_SIGN[sign]: read_value(value)}}


def read_value(written: str) -> Any:
    """Parse a value of a command line as a JSON scalar, else take it as a string: 2020 is a number, "2020" a string."""
    try:
        value = json.loads(written, parse_constant=lambda name: name)
    except (ValueError, RecursionError):  # too deeply nested JSON counts as a string too
        return written.strip()
    return written.strip() if isinstance(value, dict | list) else value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
