"""Lookups of single rows in the source of a collection that is a query on Postgres, by their keys."""

from collections.abc import Collection, Sequence
from typing import Final, cast

from psycopg import sql

from vectormill.jobs.item import Item
from vectormill.sources.opening import open_source
from vectormill.sources.reader import SourcePlace
from vectormill.sources.source import NONE, Source, SqlOptions, parse_options, parse_split
from vectormill.sources.sql import SqlReader, ask_for, write_array

READ_SECONDS: Final = 30.0

# A key that is not a valid value of the column's type cannot be in any row, so it becomes NULL instead of an error. The
# subquery is evaluated once, so that an index on the column is used.
VALID_KEYS: Final = """
    ARRAY(SELECT CASE WHEN pg_input_is_valid(key, {name}) THEN CAST(key AS {type}) END
            FROM unnest(CAST({keys} AS text[])) AS key)"""


def read_keys(source: Source, place: SourcePlace, keys: Sequence[str]) -> list[Item]:
    """Return the rows or passages that the source has under these values of its key column. Raise SourceFailed."""
    return _read(source, place, sql.Literal(write_array(keys)).as_string(None))


def find_present(source: Source, place: SourcePlace, keys: Collection[str]) -> set[str]:
    """Return those keys of rows of the collection that the source has now, whatever a key looks like.

    Raise SourceFailed; Postgres 16 or later is needed.
    """
    is_split = parse_split(source).by != NONE
    wanted = {key.rpartition("#")[0] for key in keys} if is_split else set(keys)
    options = cast(SqlOptions, parse_options(source))
    type_name = SqlReader(options, place, READ_SECONDS).describe_key()
    literal = sql.Literal(write_array(sorted(wanted))).as_string(None)
    name = sql.Literal(type_name).as_string(None)
    items = _read(source, place, VALID_KEYS.format(name=name, type=type_name, keys=literal))
    return {item.key for item in items} & set(keys)


def write_look_up(source: Source, keys: str) -> str:
    """Return the query of some rows; `keys` is an expression of the type of the column, so that an index is used."""
    column = sql.Identifier(source.key_column).as_string(None)
    return ask_for(source.options["query"], rest=f"WHERE source.{column} = ANY({keys})")


def _read(source: Source, place: SourcePlace, keys: str) -> list[Item]:
    query = write_look_up(source, keys)
    some = Source(source.kind, {**source.options, "query": query, "pages": False}, source.split)
    batches = open_source(some, place, patience_seconds=READ_SECONDS).read()
    return [item for batch in batches for item in batch]
