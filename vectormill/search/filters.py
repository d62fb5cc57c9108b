"""Filters in SQL: a condition on metadata, of bound values only, in the form that expression indexes serve.

A field is `(metadata -> 'year')`, of nested ones `(metadata -> 'a' -> 'b')`, compared as jsonb: numbers by value, and
strings by the database's collation. Equality, `in` and ranges are of its value as an index has it (write_value),
where texts of more than 2,000 bytes count as none; a GIN index on metadata serves `contains` and `exists`. The names of
fields are bound too: the plan is made for the values (plan_cache_mode), so Postgres sees constants where the index has
them.

jsonb orders values: numbers as numbers, texts as texts. A B-tree entry may have about 2,700 bytes, and a worker whose
row had a longer one could write neither that row nor the chunk it is in. So a longer value, and what is no scalar,
counts as none here: in the index, and in the filter that is to be served by it."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from psycopg import sql

from vectormill.collections.generation_tables import attributes_name
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

# Instead of a field: one index over all metadata, for `metadata @> '{"tags": ["new"]}'` and `metadata ? 'year'`.
ANY_FIELD: Final = "*"

MOST_VALUE_BYTES: Final = 2000


def write_value(field: str) -> str:
    """Return the SQL of a field's value as its index has it; `field` is its SQL, such as `metadata -> 'year'`.

    An expression, and no partial index: Postgres gathers how often which value of it comes, and so knows how many rows
    a filter leaves.
    """
    return (
        f"(CASE WHEN octet_length(CAST({field} AS text)) <= {MOST_VALUE_BYTES}"
        f" AND jsonb_typeof({field}) NOT IN ('array', 'object') THEN {field} END)"
    )


def name_filter_index(generation_id: int, field: str) -> str:
    """Make the name of an index on a field, whatever the field, of at most 63 bytes."""
    if field == ANY_FIELD:
        return f"{attributes_name(generation_id)}_on_any"
    return f"{attributes_name(generation_id)}_on_{hashlib.blake2b(field.encode(), digest_size=6).hexdigest()}"


def define_filter_index(field: str) -> sql.Composable:
    """Return the text behind `CREATE INDEX … ON the attributes table`. A dot leads into an object, as in a
    filter.
    """
    if field == ANY_FIELD:
        return sql.SQL("USING gin (metadata jsonb_ops)")
    names = [sql.Literal(name) for name in field.split(".")]
    template = write_value("metadata" + " -> {}" * len(names))
    return sql.SQL("({value})").format(value=sql.SQL(template).format(*names, *names, *names))


def name_text_index(generation_id: int) -> str:
    return f"{attributes_name(generation_id)}_search"


def define_text_index() -> sql.Composable:
    """Return the definition of the index of the words of kept texts, for hybrid searches."""
    return sql.SQL("USING gin (search)")


# jsonb sorts null, strings, numbers, booleans, in this order: the least value of a type, and the least beyond it. No
# number of JSON that fits into a document is less than the first one here.
BOUNDS: Final[Mapping[str, tuple[str, str]]] = {
    "string": ('""', "-1e100000"),
    "number": ("-1e100000", "false"),
}
SIGNS: Final[Mapping[str, str]] = {EQ: "=", GT: ">", GTE: ">=", LT: "<", LTE: "<="}


@dataclass(frozen=True, slots=True)
class Condition:
    """A filter as SQL. `fits_nothing`: whether a row without any metadata fulfils it, so that no such row is lost."""

    sql: str
    values: dict[str, Any]
    fits_nothing: bool


@dataclass(slots=True)
class _Values:
    """The values bound so far, by names that no other part of a statement has."""

    bound: dict[str, Any] = field(default_factory=dict)

    def bind(self, value: Any) -> str:
        name = f"filter_{len(self.bound)}"
        self.bound[name] = value
        return f":{name}"


def compile_filter(condition: Filter, column: str) -> Condition:
    """Return the condition on `column`, a jsonb column that is an object or NULL; NULL under a NOT counts as false."""
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
            return f"({column} ? CAST({values.bind(name)} AS text))"  # which a GIN index on metadata serves
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
            # Values of its own type only: bounds, which an index and its statistics understand, and not jsonb_typeof.
            least, beyond = BOUNDS[find_json_type(value)]
            bound = f"{name} >= CAST('{least}' AS jsonb)" if operator in (LT, LTE) else None
            bound = bound or f"{name} < CAST('{beyond}' AS jsonb)"
            return f"({compared} AND {bound})"


def name_value(column: str, path: tuple[str, ...], values: _Values, compared: list[str]) -> str:
    """Return the expression of a field as its index has it, if the index has values like those it is compared with."""
    name = name_field(column, path, values)
    is_short = all(len(written) <= MOST_VALUE_BYTES for written in compared)
    return write_value(name) if is_short else name


def name_field(column: str, path: tuple[str, ...], values: _Values) -> str:
    """Return the expression of a field."""
    return f"({column}{''.join(f' -> CAST({values.bind(name)} AS text)' for name in path)})"
