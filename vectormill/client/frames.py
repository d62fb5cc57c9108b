"""Convert tables of pandas, polars and pyarrow to items to submit, and results to such tables.

A table's library is recognised by the module of its type, and is not imported here: a caller who passes a
table has loaded it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vectormill.domain.errors import InvalidItem, InvalidOption
from vectormill.files.ndjson import ItemJson
from vectormill.files.texts import KEY_FIELDS, Fields, make_item

if TYPE_CHECKING:
    import numpy as np
    import pandas
    import polars
    import pyarrow


# Rows converted at a time: while they are, they are in memory twice, in the table and as Python objects.
SLICE_ROWS: Final = 1024
TABLES: Final = "a DataFrame of pandas or polars, a pyarrow.Table or a pyarrow.RecordBatchReader"

ADVICE: Final = "Choose others with text= and key=."

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of the columns with the key, the text and the second text of a pair.

    `metadata` names the columns that are kept as metadata of each item; None means that none were named.
    """

    text: str = "text"
    key: str | None = None
    pair: str | None = None
    metadata: tuple[str, ...] | None = None

    @classmethod
    def choose(
        cls,
        text: str | None,
        key: str | None,
        pair: str | None,
        metadata: Mapping[str, Any] | Sequence[str] | None,
    ) -> "Columns | None":
        """Return the named columns; None if no column was named.

        Raise InvalidOption if `metadata` is a string instead of a list.
        """
        if isinstance(metadata, str):
            raise InvalidOption(f"metadata must be a list of column names: metadata=[{metadata!r}].")
        names = None if metadata is None or isinstance(metadata, Mapping) else tuple(metadata)
        if text is None and key is None and pair is None and names is None:
            return None
        return cls(text or "text", key, pair, names)

    def wanted(self, present: Sequence[str]) -> list[str]:
        """Return those of the present columns that items need; no other is converted to Python objects."""
        named = {self.text, self.key, self.pair, *(self.metadata or ("metadata",))}
        own_key = () if self.key else KEY_FIELDS
        return [name for name in present if name in named or name in own_key]


def read_items(source: Iterable[Any], columns: Columns | None) -> Iterable[ItemJson]:
    """Return the items of `source`; they can be iterated again if `source` can.

    Raise InvalidOption if `source` has no rows. A missing column, or a text or key of a wrong type, raises
    InvalidItem when its row is read.
    """
    read_slices = find_reader(source)
    if read_slices is not None:
        items = TableItems(source, columns or Columns(), read_slices)
        return items if read_slices.can_repeat(source) else iter(items)
    if isinstance(source, str | bytes | Mapping) or not isinstance(source, Iterable):
        raise InvalidOption(f"Items must be dictionaries or texts, or {TABLES}; got {type(source).__name__}.")
    rows = RowItems(source, columns)
    return iter(rows) if iter(source) is source else rows


def find_reader(source: Any) -> "ReadSlices | None":
    """Return the reader for a table, chosen by the library of its type; None if it is not a table."""
    libraries = {kind.__module__.partition(".")[0] for kind in type(source).__mro__}
    return next((reader for library, reader in READERS.items() if library in libraries), None)


class ReadSlices(ABC):
    """Reads the requested columns of a table, a slice of rows at a time."""

    def can_repeat(self, table: Any) -> bool:
        """Return whether the table can be read a second time with the same rows."""
        return True

    def names(self, table: Any) -> list[str]:
        return [str(name) for name in table.columns]

    @abstractmethod
    def rows(self, table: Any, columns: Columns) -> Iterator[Row]: ...


class PandasRows(ReadSlices):
    """Reads rows of pandas.

    NaN, NaT and NA become None; the index counts as a column if it has the key's name.
    """

    def rows(self, table: Any, columns: Columns) -> Iterator[Row]:
        index_name = table.index.name if columns.key not in self.names(table) else None
        for start in range(0, len(table), SLICE_ROWS):
            part = table.iloc[start : start + SLICE_ROWS]
            if index_name is not None and index_name == columns.key:
                part = part.reset_index()
            part = part[columns.wanted(self.names(part)) or list(part.columns)]
            part = part.astype(object).where(part.notna(), None)
            yield from part.to_dict("records")


class PolarsRows(ReadSlices):
    """Reads rows of polars. A lazy frame is collected first, because polars cannot stream rows to Python."""

    def names(self, table: Any) -> list[str]:
        return list(table.collect_schema().names())

    def rows(self, table: Any, columns: Columns) -> Iterator[Row]:
        frame = table.select(columns.wanted(self.names(table)) or self.names(table))
        frame = frame.collect() if hasattr(frame, "collect") else frame
        yield from frame.iter_rows(named=True, buffer_size=SLICE_ROWS)


class ArrowRows(ReadSlices):
    """Reads rows of pyarrow. A RecordBatchReader can be read once, with one batch in memory at a time."""

    def can_repeat(self, table: Any) -> bool:
        return not hasattr(table, "read_next_batch")

    def names(self, table: Any) -> list[str]:
        return list(table.schema.names)

    def rows(self, table: Any, columns: Columns) -> Iterator[Row]:
        wanted = columns.wanted(self.names(table)) or self.names(table)
        # A whole table is sliced below, so it needs no batches.
        batches = [table] if hasattr(table, "num_rows") else table
        for batch in batches:
            for start in range(0, batch.num_rows, SLICE_ROWS):
                yield from batch.slice(start, SLICE_ROWS).select(wanted).to_pylist()


READERS: Final[Mapping[str, ReadSlices]] = {
    "pandas": PandasRows(),
    "polars": PolarsRows(),
    "pyarrow": ArrowRows(),
}


@dataclass(frozen=True, slots=True)
class TableItems:
    """An iterable over the rows of a table, as items."""

    table: Any
    columns: Columns
    reader: ReadSlices

    def __iter__(self) -> Iterator[ItemJson]:
        return make_items(self.reader.rows(self.table, self.columns), self.columns)


@dataclass(frozen=True, slots=True)
class RowItems:
    """An iterable of items made from texts, or from dictionaries: without `columns` they are items, if the first is."""

    source: Iterable[Any]
    columns: Columns | None

    def __iter__(self) -> Iterator[ItemJson]:
        rows = iter(self.source)
        first = list(islice(rows, 1))
        rows = chain(first, rows)
        if self.columns is None and first and not isinstance(first[0], str):
            if isinstance(first[0], Mapping) and (
                others := first[0].keys() - ItemJson.__annotations__.keys()
            ):
                named = ", ".join(repr(name) for name in first[0] if name in others)
                raise InvalidItem(
                    f"row 1: no field of an item is named {named}. Say which fields hold its parts: key='…', text='…', "
                    "pair='…', metadata=['…']."
                )
            return rows
        columns = self.columns or Columns()
        return make_items(({columns.text: row} if isinstance(row, str) else row for row in rows), columns)


def make_items(rows: Iterable[Row], columns: Columns) -> Iterator[ItemJson]:
    fields = Fields(key=columns.key, text=columns.text, pair=columns.pair, advice=ADVICE)
    for number, row in enumerate(rows, start=1):
        item = make_item(row, fields, number, f"row {number}")
        if columns.metadata is not None:
            item["metadata"] = pick_metadata(row, columns.metadata, number)
        yield item


def pick_metadata(row: Row, names: Iterable[str], number: int) -> dict[str, Any]:
    """Return the named columns of a row as metadata, with dates in ISO 8601.

    Raise InvalidOption if a column is missing; `number` is the row's number in the message.
    """
    try:
        return {name: _plain(row[name]) for name in names}
    except KeyError as error:
        known = ", ".join(repr(name) for name in list(row)[:10])
        raise InvalidOption(
            f"row {number}: no column {error} for the metadata; the columns are {known}."
        ) from None


def _plain(value: Any) -> Any:
    """Convert a value to one that JSON can express: dates to ISO 8601, NumPy values to Python's own."""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return value.tolist() if hasattr(value, "tolist") else value


class Matrix(NamedTuple):
    """Keys and their values: `keys[i]` is the key of `values[i]`.

    `values` is a matrix of vectors [num_keys, width], or an array of scores [num_keys].
    """

    keys: list[str]
    values: "np.ndarray[Any, Any]"


def read_parquet(path: Path) -> "pyarrow.Table":
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path)


def make_matrix(table: "pyarrow.Table") -> Matrix:
    """Convert a table of results to keys and NumPy values.

    Raise InvalidOption if the results are not numbers.
    """
    keys = table["key"].to_pylist()
    if "score" in table.column_names:
        return Matrix(keys, table["score"].to_numpy())
    if "embedding" not in table.column_names:
        raise InvalidOption("Records are not numbers: iterate over them, or use to_arrow().")
    column = table["embedding"].combine_chunks()
    width = column.type.list_size
    return Matrix(keys, column.flatten().to_numpy(zero_copy_only=False).reshape(len(keys), width))


def make_pandas(table: "pyarrow.Table") -> "pandas.DataFrame":
    return table.to_pandas()


def make_polars(table: "pyarrow.Table") -> "polars.DataFrame":
    import polars

    made = polars.from_arrow(table)
    assert isinstance(made, polars.DataFrame)  # from_arrow returns a Series only for a single column
    return made
