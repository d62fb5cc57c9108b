"""Convert tables of pandas, polars and pyarrow to items to submit, and results to such tables.

A table's library is recognised by the module of its type, and is not imported here: a caller who passes a
table has loaded it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

from vectormill.domain.errors import InvalidItem, InvalidOption
from vectormill.files.ndjson import ItemJson
from vectormill.rows.columns import KEY_FIELDS, Columns
from vectormill.rows.decoding import UNLIMITED, RowBatch
from vectormill.rows.inputs import to_json
from vectormill.rows.items import Assembler
from vectormill.rows.values import Kind, encode_fitting_metadata, is_plain, spell_duration, spell_instants

if TYPE_CHECKING:
    import numpy as np
    import polars
    import pyarrow


# Rows converted at a time: while they are, they are in memory twice, in the table and as Python objects.
SLICE_ROWS: Final = 1024
# Rows of an iterable that are waited for before the first of them is sent.
GATHERED_ROWS: Final = 64
TABLES: Final = "a DataFrame of pandas or polars, a pyarrow.Table or a pyarrow.RecordBatchReader"

ADVICE: Final = "Choose others with text= and key=."

Slice = Mapping[str, Sequence[Any]]


def choose_columns(
    text: str | None,
    key: str | None,
    pair: str | None,
    metadata: Mapping[str, Any] | Sequence[str] | None,
) -> Columns | None:
    """Return the named columns; None if no column was named.

    Raise InvalidOption if `metadata` is a string instead of a list.
    """
    if isinstance(metadata, str):
        raise InvalidOption(f"metadata must be a list of column names: metadata=[{metadata!r}].")
    names = None if metadata is None or isinstance(metadata, Mapping) else tuple(metadata)
    if text is None and key is None and pair is None and names is None:
        return None
    return Columns(text or "text", key, pair, names or ())


def read_items(source: Iterable[Any], columns: Columns | None) -> Iterable[ItemJson]:
    """Return the items of `source`; they can be iterated again if `source` can.

    Raise InvalidOption if `source` has no rows. A missing column, or a key of a wrong type, raises InvalidItem when
    its row is read.
    """
    table = find_table(source)
    if table is not None:
        items = TableItems(table, columns or Columns())
        return items if table.can_repeat else iter(items)
    if isinstance(source, str | bytes | Mapping) or not isinstance(source, Iterable):
        raise InvalidOption(f"Items must be dictionaries or texts, or {TABLES}; got {type(source).__name__}.")
    rows = RowItems(source, columns)
    return iter(rows) if iter(source) is source else rows


def find_table(source: Any) -> "Table | None":
    """Return a table by the library of its type; None if it is not one."""
    if not hasattr(type(source), "columns") and not hasattr(type(source), "schema"):  # a column alone
        return None
    libraries = {kind.__module__.partition(".")[0] for kind in type(source).__mro__}
    return next((kind(source) for library, kind in TABLES_OF.items() if library in libraries), None)


class Table(ABC):
    """A table of some library. Names of columns are compared as texts."""

    # True if the table can be read a second time and then has the same rows.
    can_repeat = True
    # The column that is the key if none is named so; None if there is none.
    own_key: str | None = None

    def __init__(self, table: Any) -> None:
        self._table = table

    def names(self) -> list[str]:
        return [str(name) for name in self._table.columns]

    @abstractmethod
    def slices(self, names: Sequence[str]) -> Iterator[Slice]:
        """Yield the values of these columns, some rows at a time."""


class PandasTable(Table):
    """A DataFrame of pandas. NaN, NaT and NA are None. An index with a name is a column, unless one has its name."""

    def __init__(self, table: Any) -> None:
        super().__init__(table)
        self.own_key = None if table.index.name is None else str(table.index.name)

    def names(self) -> list[str]:
        own = super().names()
        named = [str(name) for name in self._table.index.names if name is not None]
        return own + [name for name in named if name not in own]

    def slices(self, names: Sequence[str]) -> Iterator[Slice]:
        own = super().names()
        levels = [str(name) for name in self._table.index.names]
        for start in range(0, len(self._table), SLICE_ROWS):
            part = self._table.iloc[start : start + SLICE_ROWS]
            yield {
                name: self._list(
                    part.iloc[:, own.index(name)]
                    if name in own
                    else part.index.get_level_values(levels.index(name)).to_series()
                )
                for name in names
            }

    def _list(self, series: Any) -> list[Any]:
        return list(series.astype(object).where(series.notna(), None))


class PolarsTable(Table):
    """A DataFrame of polars. A lazy one is collected first, because polars cannot stream rows to Python."""

    def names(self) -> list[str]:
        return list(self._table.collect_schema().names())

    def slices(self, names: Sequence[str]) -> Iterator[Slice]:
        frame = self._table.select(names)
        frame = frame.collect() if hasattr(frame, "collect") else frame
        for start in range(0, len(frame), SLICE_ROWS):
            part = frame.slice(start, SLICE_ROWS)
            yield {name: self._list(part.get_column(name)) for name in names}

    def _list(self, series: Any) -> list[Any]:
        """Return the values of a column; moments from their numbers, since polars cuts them to microseconds."""
        kind = str(series.dtype.base_type())
        if kind in ("List", "Array"):
            return [None if inner is None else self._list(inner) for inner in series]
        if kind == "Struct":
            fields = {field.name: self._list(field) for field in series.struct.unnest()}
            return [
                {name: values[place] for name, values in fields.items()} if is_there else None
                for place, is_there in enumerate(series.is_not_null())
            ]
        if kind not in ("Datetime", "Date", "Time", "Duration"):
            return list(series.to_list())
        ints, unit = series.to_physical().to_list(), getattr(series.dtype, "time_unit", "ns")
        if kind == "Duration":
            return [None if value is None else spell_duration(value, unit) for value in ints]
        kinds: dict[str, Kind] = {"Date": "date", "Time": "time"}
        has_zone = getattr(series.dtype, "time_zone", None) is not None
        moment: Kind = "moment in UTC" if has_zone else "moment"
        return list(spell_instants(ints, "D" if kind == "Date" else unit, kinds.get(kind, moment)))


class ArrowTable(Table):
    """A table, batch or reader of pyarrow. A RecordBatchReader can be read once, with one batch in memory at a time."""

    def __init__(self, table: Any) -> None:
        super().__init__(table)
        self.can_repeat = not hasattr(table, "read_next_batch")

    def names(self) -> list[str]:
        return list(self._table.schema.names)

    def slices(self, names: Sequence[str]) -> Iterator[Slice]:
        from vectormill.rows.arrow import list_columns

        # A whole table is sliced below, so it needs no batches.
        batches = [self._table] if hasattr(self._table, "num_rows") else self._table
        for batch in batches:
            for start in range(0, batch.num_rows, SLICE_ROWS):
                yield list_columns(batch.slice(start, SLICE_ROWS), names)


TABLES_OF: Final[Mapping[str, type[Table]]] = {
    "pandas": PandasTable,
    "polars": PolarsTable,
    "pyarrow": ArrowTable,
}


@dataclass(frozen=True, slots=True)
class TableItems:
    """An iterable over the rows of a table, as items."""

    table: Table
    columns: Columns

    def __iter__(self) -> Iterator[ItemJson]:
        names, columns = self.table.names(), self.columns
        if columns.key is None and not set(KEY_FIELDS) & set(names):
            columns = msgspec.structs.replace(columns, key=self.table.own_key)
        chosen = columns.guess(names, "the table", ADVICE)
        assembler = Assembler("the table", UNLIMITED)
        number = 1
        for part in self.table.slices(chosen.names):
            numbers = range(number, number + len(part[chosen.text]))
            number = numbers.stop
            yield from map(to_json, assembler.assemble_batch(RowBatch(chosen, part, numbers)))


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
            return map(self._fit, rows, count(1))
        return self._convert(rows, self.columns or Columns())

    def _fit(self, row: Any, number: int) -> ItemJson:
        """Return an item with the values that the API takes; the item itself if it has only such values."""
        item = _name_text(row, "text", number)
        metadata = item.get("metadata", {})
        texts = (item.get("key"), item.get("text"), item.get("text_pair", ""))
        # The items of a file have metadata that are encoded already.
        is_encoded = isinstance(metadata, msgspec.Raw)
        fits = is_encoded or (is_plain(metadata) and encode_fitting_metadata(metadata)[1] is None)
        if fits and all(type(text) is str for text in texts):
            return cast("ItemJson", item)
        pair = "text_pair" if "text_pair" in item else None
        chosen = Columns(key="key", text_pair=pair, metadata_json="metadata")
        values = {name: [item.get(name)] for name in chosen.names}
        return to_json(
            Assembler("the input", UNLIMITED).assemble_batch(RowBatch(chosen, values, [number]))[0]
        )

    def _convert(self, rows: Iterator[Any], columns: Columns) -> Iterator[ItemJson]:
        assembler = Assembler("the input", UNLIMITED)
        number, chosen = 1, None
        while part := list(islice(rows, GATHERED_ROWS)):
            part = [_name_text(row, columns.text, number + place) for place, row in enumerate(part)]
            chosen = chosen or columns.guess(list(dict.fromkeys(chain(*part))), f"row {number}", ADVICE)
            values = {name: [row.get(name) for row in part] for name in chosen.names}
            numbers = range(number, number + len(part))
            number = numbers.stop
            yield from map(to_json, assembler.assemble_batch(RowBatch(chosen, values, numbers)))


def _name_text(row: Any, name: str, number: int) -> Mapping[str, Any]:
    """Return a row, and a text as a row. Raise InvalidItem for anything else."""
    if not isinstance(row, str | Mapping):
        raise InvalidItem(f"row {number}: expected a dictionary or a text; got {type(row).__name__}.")
    return {name: row} if isinstance(row, str) else row


class Matrix(NamedTuple):
    """Keys and their values: `keys[i]` is the key of `values[i]`.

    `values` is a matrix of vectors [num_keys, width], or an array of scores [num_keys].
    """

    keys: list[str]
    values: "np.ndarray[Any, Any]"


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


def make_polars(table: "pyarrow.Table") -> "polars.DataFrame":
    import polars

    made = polars.from_arrow(table)
    assert isinstance(made, polars.DataFrame)  # from_arrow returns a Series only for a single column
    return made
