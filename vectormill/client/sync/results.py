# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""Results: what a job made, or a collection keeps, one by one or all at once as a table of another library."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import msgspec

from vectormill.client.frames import tables
from vectormill.client.sync import flow
from vectormill.client.sync.exports import NDJSON, Export, ExportTransport

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

Row = TypeVar("Row")
# From the name of a format to its export.
Describe = Callable[[str], Export]


class Results(Iterator[Row], Generic[Row]):
    """Iterated once, in constant memory and in the order of the export; nothing is asked for before that.

    Each `to_…` fetches all of it, by Parquet, whatever was iterated before.
    """

    def __init__(self, transport: ExportTransport, describe: Describe) -> None:
        self._transport = transport
        self._describe = describe
        self._rows: Iterator[Row] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Row:
        if self._rows is None:
            self._rows = self._read()
        return next(self._rows)

    def to_arrow(self) -> "pyarrow.Table":
        """Return all of it as a table of pyarrow; an embedding is a list of fixed size."""
        tables.require("pyarrow")
        with tempfile.TemporaryDirectory(prefix="vectormill-") as folder:
            path = Path(folder) / "results.parquet"
            self._transport.write_export(self._describe("parquet"), path)
            return tables.read(path)

    def to_numpy(self) -> tables.Matrix:
        """Return keys, and the matrix [num_keys, width] of their vectors, or the scores [num_keys] of a job that
        scores.
        """
        return tables.make_matrix(self.to_arrow())

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a row a key; an embedding is an array of NumPy."""
        tables.require("pandas")
        return tables.make_pandas(self.to_arrow())

    def to_polars(self) -> "polars.DataFrame":
        """Return a row a key; an embedding is an Array of fixed width."""
        tables.require("polars")
        return tables.make_polars(self.to_arrow())

    def _read(self) -> Iterator[Row]:
        export = self._describe(NDJSON)
        for line in flow.split_lines(self._transport.export_parts(export)):
            row: Row = msgspec.json.decode(line)
            yield row
