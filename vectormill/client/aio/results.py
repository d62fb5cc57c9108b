"""Results: what a job made, or a collection keeps, one by one or all at once as a table of another library."""

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import msgspec

from vectormill.client.aio import flow
from vectormill.client.aio.exports import NDJSON, Export, ExportTransport
from vectormill.client.frames import tables

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

Row = TypeVar("Row")
# From the name of a format to its export.
Describe = Callable[[str], Awaitable[Export]]


class Results(AsyncIterator[Row], Generic[Row]):
    """Iterated once, in constant memory and in the order of the export; nothing is asked for before that.

    Each `to_…` fetches all of it, by Parquet, whatever was iterated before.
    """

    def __init__(self, transport: ExportTransport, describe: Describe) -> None:
        self._transport = transport
        self._describe = describe
        self._rows: AsyncIterator[Row] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Row:
        if self._rows is None:
            self._rows = self._read()
        return await anext(self._rows)

    async def to_arrow(self) -> "pyarrow.Table":
        """Return all of it as a table of pyarrow; an embedding is a list of fixed size."""
        tables.require("pyarrow")
        with tempfile.TemporaryDirectory(prefix="vectormill-") as folder:
            path = Path(folder) / "results.parquet"
            await self._transport.write_export(await self._describe("parquet"), path)
            return tables.read(path)

    async def to_numpy(self) -> tables.Matrix:
        """Return keys, and the matrix [num_keys, width] of their vectors, or the scores [num_keys] of a job that
        scores.
        """
        return tables.make_matrix(await self.to_arrow())

    async def to_pandas(self) -> "pandas.DataFrame":
        """Return a row a key; an embedding is an array of NumPy."""
        tables.require("pandas")
        return tables.make_pandas(await self.to_arrow())

    async def to_polars(self) -> "polars.DataFrame":
        """Return a row a key; an embedding is an Array of fixed width."""
        tables.require("polars")
        return tables.make_polars(await self.to_arrow())

    async def _read(self) -> AsyncIterator[Row]:
        export = await self._describe(NDJSON)
        async for line in flow.split_lines(self._transport.export_parts(export)):
            row: Row = msgspec.json.decode(line)
            yield row
