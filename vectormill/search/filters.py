"""Filters in SQL: compile a filter on metadata to a condition with bound values that expression indexes can serve.

A field is `(metadata -> 'year')`, a nested field `(metadata -> 'a' -> 'b')`, compared as jsonb: numbers by value, and
strings by the database's collation. Equality, `in` and ranges compare the expression that is indexed (write_value); a
GIN index on metadata serves `contains` and `exists`. Names of fields are bound parameters too: Postgres plans each
statement for its values (plan_cache_mode), so it sees constants and can match them with the index.

A B-tree entry has at most about 2,700 bytes, and a longer value would keep a worker from writing the whole chunk. So
values of more than 2,000 bytes, arrays and objects count as NULL, both in the index and in a filter that uses it."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from psycopg import sql

from vectormill.collections.generation_tables import attributes_name
from vectormill.collections.index_plan import split_field
from vectormill.db.parameters import to_jsonb
from vectormill.search.filter import (
    EQ,
    GT,
    GTE,
    LT,
    LTE,
    AllOf,
    AnyOf,
    Contains,
    Exists,
    FieldComparison,
    Filter,
    Not,
    OneOf,
    find_json_type,
    fits,
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


def name_filter_index(generation_id: int, field: str) -> str:
    """Return the name of the index on a metadata field, at most 63 bytes for any field."""
    if field == ANY_FIELD:
        return f"{attributes_name(generation_id)}_on_any"
    return f"{attributes_name(generation_id)}_on_{hashlib.blake2b(field.encode(), digest_size=6).hexdigest()}"


def define_filter_index(field: str) -> sql.Composable:
    """Return the part of CREATE INDEX that follows the table's name. A dot in `field` leads into an object."""
    if field == ANY_FIELD:
        return sql.SQL("USING gin (metadata jsonb_ops)")
    names = [sql.Literal(name) for name in split_field(field)]
    template = write_value("metadata" + " -> {}" * len(names))
    return sql.SQL("({value})").format(value=sql.SQL(template).format(*names, *names, *names))


def name_text_index(generation_id: int) -> str:
    return f"{attributes_name(generation_id)}_search"


def define_text_index() -> sql.Composable:
    """Return the part of CREATE INDEX that follows the table's name, for the full-text index of kept texts."""
    return sql.SQL("USING gin (search)")


# The least jsonb value of a type, and the least value above all of that type, since jsonb sorts null, strings, numbers,
# booleans in this order. No number that a document can hold is less than -1e100000.
BOUNDS: Final[Mapping[str, tuple[str, str]]] = {
    "string": ('""', "-1e100000"),
    "number": ("-1e100000", "false"),
}
SIGNS: Final[Mapping[str, str]] = {EQ: "=", GT: ">", GTE: ">=", LT: "<", LTE: "<="}


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
    return Condition(_compile(condition, column, values), values.bound, fits(condition, {}))


def _compile(condition: Filter, column: str, values: _Values) -> str:
    match condition:
        case AllOf(parts):
            return f"({' AND '.join(_compile(part, column, values) for part in parts)})" if parts else "true"
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
            name = values.bind(written)
            return f"({name_value(column, path, values, written)} = ANY (CAST(CAST({name} AS text[]) AS jsonb[])))"
        case Contains(path, value):
            wanted: Any = [value]
            for part_name in reversed(path):
                wanted = {part_name: wanted}
            return f"({column} @> CAST({values.bind(to_jsonb(wanted))} AS jsonb))"
        case FieldComparison(path, operator, value):
            name = name_value(column, path, values, [to_jsonb(value)])
            compared = f"{name} {SIGNS[operator]} CAST({values.bind(to_jsonb(value))} AS jsonb)"
            if operator == EQ:
                return f"({compared})"
            # A range must match values of one JSON type only. Bounds express that in a form that an index and its
            # statistics can use, unlike jsonb_typeof.
            least, beyond = BOUNDS[find_json_type(value)]
            bound = f"{name} >= CAST('{least}' AS jsonb)" if operator in (LT, LTE) else None
            bound = bound or f"{name} < CAST('{beyond}' AS jsonb)"
            return f"({compared} AND {bound})"


def name_value(column: str, path: tuple[str, ...], values: _Values, compared: list[str]) -> str:
    """Return the indexed SQL expression of a field, or the plain one if a compared value is too long for the index."""
    name = name_field(column, path, values)
    is_short = all(len(written) <= MOST_VALUE_BYTES for written in compared)
    return write_value(name) if is_short else name


def name_field(column: str, path: tuple[str, ...], values: _Values) -> str:
    """Return the SQL expression of a field, and bind the names on its path."""
    return f"({column}{''.join(f' -> CAST({values.bind(name)} AS text)' for name in path)})"
