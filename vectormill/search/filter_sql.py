"""Filters in SQL: compile a filter on metadata to a condition with bound values that expression indexes can serve.

A field is `(metadata -> 'year')`, a nested field `(metadata -> 'a' -> 'b')`, compared as jsonb: numbers by value, and
strings by the database's collation. Equality, `in` and ranges compare the expression that is indexed (write_value); a
GIN index on metadata serves `contains` and `exists`. Names of fields are bound parameters too: Postgres plans each
statement for its values (plan_cache_mode), so it sees constants and can match them with the index.

A B-tree entry has at most about 2,700 bytes, and a longer value would keep a worker from writing the whole chunk. So
values of more than 2,000 bytes, arrays and objects count as NULL in the index of a field. The rows whose value is a
long string or number are in a second index, almost always empty."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from psycopg import sql

from vectormill.collections.generation_tables import attributes_name
from vectormill.collections.index_plan import split_field
from vectormill.db.parameters import to_jsonb
from vectormill.search.filter import (
    GT,
    GTE,
    OPERATOR_BY_SIGN,
    AllOf,
    AnyOf,
    Contains,
    Exists,
    FieldRange,
    Filter,
    Not,
    OneOf,
    fits_nothing,
)

# As a field, * means one index over all metadata, for `metadata @> '{"tags": ["new"]}'` and `metadata ? 'year'`.
ANY_FIELD: Final = "*"

MOST_VALUE_BYTES: Final = 2000


def write_value(field: str) -> str:
    """Return the indexed SQL expression of a field: NULL for long values, arrays and objects.

    `field` is the field in SQL, such as `metadata -> 'year'`. It is an expression and not the WHERE of a partial index,
    so that Postgres gathers statistics of its values and can estimate how many rows a filter leaves.
    """
    return (
        f"(CASE WHEN octet_length(CAST({field} AS text)) <= {MOST_VALUE_BYTES}"
        f" AND jsonb_typeof({field}) NOT IN ('array', 'object') THEN {field} END)"
    )


def write_is_long(field: str) -> str:
    """Return SQL that is true for strings and numbers that count as NULL in the index.

    It repeats itself for the planner, which knows how many are NULL, and takes 1 % for IN and 0.5 % for BETWEEN.
    """
    return (
        f"({write_value(field)} IS NULL AND jsonb_typeof({field}) IN ('string', 'number')"
        f" AND octet_length(CAST({field} AS text)) BETWEEN {MOST_VALUE_BYTES + 1} AND 1000000000)"
    )


def name_filter_index(generation_id: int, field: str) -> str:
    """Return the name of the index on a metadata field, at most 63 bytes for any field."""
    suffix = "any" if field == ANY_FIELD else hashlib.blake2b(field.encode(), digest_size=6).hexdigest()
    return f"{attributes_name(generation_id)}_on_{suffix}"


def define_filter_indexes(generation_id: int, fields: Iterable[str]) -> dict[str, sql.Composable]:
    """Return the indexes on metadata fields: by name, the part of CREATE INDEX that follows the table's name."""
    indexes: dict[str, sql.Composable] = {}
    for wanted in fields:
        name = name_filter_index(generation_id, wanted)
        if wanted == ANY_FIELD:
            indexes[name] = sql.SQL("USING gin (metadata jsonb_ops)")
            continue
        place = sql.SQL(" -> ").join([sql.SQL("metadata"), *map(sql.Literal, split_field(wanted))])
        value, is_long = write_value("{place}"), write_is_long("{place}")
        indexes[name] = sql.SQL(f"({value})").format(place=place)
        indexes[f"{name}_long"] = sql.SQL(f"({value}) WHERE {is_long}").format(place=place)
    return indexes


def name_text_index(generation_id: int) -> str:
    return f"{attributes_name(generation_id)}_search"


# The part of CREATE INDEX that follows the table's name, for the full-text index of kept texts.
TEXT_INDEX: Final = sql.SQL("USING gin (search)")

# The tests that end a range below and above, where the values of its JSON type end. An index and its statistics serve
# them, unlike jsonb_typeof. jsonb sorts null, strings, numbers and booleans in this order, and no number that a
# document can hold is less than -1e100000.
ENDS: Final = {
    "string": (">= CAST('\"\"' AS jsonb)", "< CAST('-1e100000' AS jsonb)"),
    "number": (">= CAST('-1e100000' AS jsonb)", "< CAST('false' AS jsonb)"),
}
SIGNS: Final = {name: sign for sign, name in OPERATOR_BY_SIGN.items()}


@dataclass(frozen=True, slots=True)
class Condition:
    """A filter as SQL with its bound values. `fits_nothing` is true if a row without any metadata satisfies it."""

    sql: str
    values: dict[str, Any]
    fits_nothing: bool


@dataclass(slots=True)
class _Values:
    """The values bound so far, under names that no other part of the statement uses."""

    bound: dict[str, Any] = field(default_factory=dict)

    def bind(self, value: Any) -> str:
        name = f"filter_{len(self.bound)}"
        self.bound[name] = value
        return f":{name}"


def compile_filter(condition: Filter | None, column: str) -> Condition:
    """Compile a filter to SQL on `column`, a jsonb column that is an object or NULL. NOT treats NULL as false.

    Without a filter, every row satisfies it.
    """
    if condition is None:
        return Condition("true", {}, fits_nothing=True)
    values = _Values()
    return Condition(_compile(condition, column, values), values.bound, fits_nothing(condition))


def _compile(condition: Filter, column: str, values: _Values) -> str:
    match condition:
        case AllOf(parts):
            return f"({' AND '.join(_compile_all(parts, column, values))})" if parts else "true"
        case AnyOf(parts):
            return f"({' OR '.join(_compile(part, column, values) for part in parts)})"
        case Not(part):
            return f"(({_compile(part, column, values)}) IS NOT TRUE)"
        case Exists((name,)):
            return f"({column} ? CAST({values.bind(name)} AS text))"  # a GIN index serves this
        case Exists(path):
            return f"({name_field(column, path, values)} IS NOT NULL)"
        case OneOf(path, listed):
            written = [to_jsonb(value) for value in listed]
            test = f"= ANY (CAST(CAST({values.bind(written)} AS text[]) AS jsonb[]))"
            can_be_long = any(len(each) > MOST_VALUE_BYTES for each in written)
            return _compare(name_field(column, path, values), [test], can_be_long=can_be_long)
        case Contains(path, value):
            wanted: Any = [value]
            for part_name in reversed(path):
                wanted = {part_name: wanted}
            return f"({column} @> CAST({values.bind(to_jsonb(wanted))} AS jsonb))"
        case FieldRange():
            return "".join(_compile_all([condition], column, values))


def _compile_all(parts: Sequence[Filter], column: str, values: _Values) -> list[str]:
    """Compile filters that all must hold. The ranges of a field become one, whose rows the planner can estimate."""
    ranges: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for part in parts:
        if isinstance(part, FieldRange):
            end = ENDS["string" if isinstance(part.value, str) else "number"][part.operator in (GT, GTE)]
            ranges[part.path] += (
                f"{SIGNS[part.operator]} CAST({values.bind(to_jsonb(part.value))} AS jsonb)",
                end,
            )
    others = [_compile(part, column, values) for part in parts if not isinstance(part, FieldRange)]
    return [
        _compare(name_field(column, path, values), ranges[path], can_be_long=True) for path in ranges
    ] + others


def _compare(name: str, tests: Sequence[str], *, can_be_long: bool) -> str:
    """Return SQL that is true if the value of a field passes all tests, such as `> CAST(:filter_0 AS jsonb)`."""
    indexed, plain = (
        " AND ".join(f"{value} {test}" for test in tests) for value in (write_value(name), name)
    )
    found = f"({indexed} OR {write_is_long(name)})" if can_be_long else indexed
    # The field itself is compared first, which is fast. The planner takes 99.5 % for a number that is not 0, so that
    # this alters no estimate; the bare comparison would.
    return f"(CAST(({plain}) AS integer) <> 0 AND {found})"


def name_field(column: str, path: tuple[str, ...], values: _Values) -> str:
    """Return the SQL expression of a field, and bind the names on its path."""
    return f"({column}{''.join(f' -> CAST({values.bind(name)} AS text)' for name in path)})"
