"""Opening a source: make a reader for any kind, check one by its first rows, and look single rows up by their keys."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from typing import Any, Final, cast

import msgspec
from psycopg import sql

from vectormill.domain.errors import InvalidOption, SourceFailed
from vectormill.jobs.item import Item, split_pair
from vectormill.sources.operations import SourceCheckBody, SourceRowBody
from vectormill.sources.own_texts import OwnTextReader
from vectormill.sources.parsing import NONE, parse_options, parse_split, refuse_unfit
from vectormill.sources.passages import PassageReader
from vectormill.sources.pushes import PushReader
from vectormill.sources.reader import Reader, SourcePlace
from vectormill.sources.source import (
    PUSH,
    FileOptions,
    Options,
    OwnTextOptions,
    PushOptions,
    Source,
    SqlOptions,
    TreeOptions,
)
from vectormill.sources.sql import SqlReader, ask_for, write_array


def open_source(source: Source, place: SourcePlace, *, patience_seconds: float = 0) -> Reader:
    """Return a reader of the source's rows: its documents, or their passages if the source is split.

    Nothing is read yet. `patience_seconds` bounds each database statement when a source is only checked; 0
    means no limit. Raise InvalidOption if an option does not fit or the collection's task cannot read such
    rows.
    """
    refuse_unfit(source, place.find_spec())
    options, split = parse_options(source), parse_split(source)
    reader = _make_reader(options, place, patience_seconds)
    reader.source = source
    if not options.can_be_split or split.by == NONE:
        return reader
    if source.options.get("changed"):
        raise InvalidOption(
            "A source that is split into passages cannot name a column of changes: passages that a shorter document no "
            "longer has would be found only when all rows are read."
        )
    return PassageReader(reader, split, place)


def _make_reader(options: Options, place: SourcePlace, patience_seconds: float) -> Reader:
    if isinstance(options, SqlOptions):
        return SqlReader(options, place, patience_seconds)
    if isinstance(options, PushOptions):
        return PushReader(place)
    if isinstance(options, OwnTextOptions):
        return OwnTextReader(place)
    from vectormill.sources.files import FileReader, TreeReader  # late, because fsspec takes 0.1 s

    if isinstance(options, FileOptions):
        return FileReader(options, place)
    assert isinstance(options, TreeOptions)
    return TreeReader(options, place)


SAMPLE_ROWS: Final = 10_000
SHOWN_ROWS: Final = 3
SHOWN_CHARS: Final = 200
# A check is kept short because a person waits for the answer. The timeout bounds each statement of a query;
# checking the rows of a batch takes hardly any time.
PATIENCE_SECONDS: Final = 20.0


def check_source(source: Source, place: SourcePlace) -> SourceCheckBody:
    """Check a source by reading its first rows. The number of all rows is None if no cheap estimate is available.

    Raise SourceFailed if they cannot be read or two of them have the same key, and InvalidOption if options
    do not fit.
    """
    reader = open_source(source, place, patience_seconds=PATIENCE_SECONDS)
    if source.kind == PUSH and place.run_id is None:
        return SourceCheckBody(
            num_sampled=0, is_whole=False, num_rows=None, rows=[], complaints=reader.complaints.to_json()
        )
    keys: set[str] = set()
    shown: list[Item] = []
    num_rows = 0
    is_whole = True
    with closing(cast("Any", reader.read())) as batches:
        for batch in cast("Iterator[Sequence[Item]]", batches):
            for item in batch:
                if item.key in keys:
                    raise SourceFailed(f"Duplicate key {item.key!r}: each row must have a unique key.")
                keys.add(item.key)
            shown += batch[: SHOWN_ROWS - len(shown)]
            num_rows += len(batch)
            if num_rows >= SAMPLE_ROWS:
                is_whole = False
                break
    return SourceCheckBody(
        num_sampled=num_rows,
        is_whole=is_whole,
        num_rows=num_rows if is_whole else reader.count_rows(),
        rows=[show_row(item) for item in shown],
        complaints=reader.complaints.to_json(),
    )


def show_row(item: Item) -> SourceRowBody:
    """Return a row as it would be encoded, with its texts shortened to SHOWN_CHARS characters."""
    texts = [None if each is None else each.decode("utf-8", "replace") for each in split_pair(item.text)]
    text, pair = (
        each if each is None or len(each) <= SHOWN_CHARS else each[: SHOWN_CHARS - 1] + "…" for each in texts
    )
    metadata = msgspec.json.decode(item.metadata) if item.metadata else None
    return SourceRowBody(key=item.key, text=text or "", text_pair=pair, metadata=metadata)


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
