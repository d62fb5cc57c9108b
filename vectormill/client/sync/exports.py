# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""Exports over HTTP: a body is written to a file or read row by row, and resumed after a lost connection.

NDJSON continues after the last complete line. Other formats start again, in place of what came before, because an
incomplete file of such a format cannot be read. A path gets the whole export or stays unchanged.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Generic, Self, TypeVar

import msgspec

from vectormill.client.frames import Matrix, make_matrix, make_polars
from vectormill.client.requests import Export, given
from vectormill.client.sync import flow
from vectormill.client.sync.transport import Transport
from vectormill.extras import require
from vectormill.files.outputs import open_replacement
from vectormill.files.parquet import read_table
from vectormill.problems import ApiError, ApiUnreachable

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow


NDJSON = "ndjson"
# The generation that the first answer named: a resumed export asks for the same one.
GENERATION_HEADER = "Vectormill-Generation"


class ExportTransport(Transport):
    """Requests that exports of jobs and of collections share."""

    def write_export(self, export: Export, target: str | Path | BinaryIO) -> int:
        """Write an export to a file and return the number of bytes.

        After an error, a file object keeps the bytes received so far; a path stays unchanged. What cannot be
        taken back from a pipe is written there once it is whole.
        """
        if isinstance(target, str | Path):
            with open_replacement(Path(target)) as file:
                return self._write_body(export, file)
        return self._write_body(export, target)

    def export_parts(self, export: Export) -> Iterator[bytes]:
        """Yield the body in parts; for NDJSON each part consists of whole lines."""
        after = export.parameters.get("after")
        try:
            if export.format == NDJSON:
                for part in self.resumed_parts(lambda key: self._open(export, key), after):
                    yield part
            else:
                for part in self._open(export, after):
                    yield part
        except (ApiError, ApiUnreachable) as error:
            if not export.answered or export.broken is None:
                raise
            raise ApiUnreachable(export.broken) from error

    def _write_body(self, export: Export, file: BinaryIO) -> int:
        if export.format == NDJSON:
            return self._write_parts(export, file)
        if file.seekable():
            return self._write_whole(export, file)
        with tempfile.TemporaryFile() as draft:
            num_bytes = self._write_whole(export, draft)
            draft.seek(0)
            shutil.copyfileobj(draft, file)
            return num_bytes

    def _write_parts(self, export: Export, file: BinaryIO) -> int:
        num_bytes = 0
        for part in self.export_parts(export):
            file.write(part)
            num_bytes += len(part)
        return num_bytes

    def _write_whole(self, export: Export, file: BinaryIO) -> int:
        start, pauses = file.tell(), self.retries.begin()
        while True:
            try:
                return self._write_parts(export, file)
            except ApiUnreachable as error:
                is_hopeless = not export.answered or isinstance(error.__cause__, ApiError)
                self.pause_after(error, None if is_hopeless else pauses)
            file.seek(start)
            file.truncate()

    def _open(self, export: Export, after: str | None) -> Iterator[bytes]:
        parameters = {**export.parameters, "format": export.format or None, "after": after}
        if GENERATION_HEADER in export.answered:
            parameters["generation"] = export.answered[GENERATION_HEADER]
        with self.answered(
            "GET", export.path, params=given(parameters), timeout=self.long_timeout
        ) as response:
            export.answered["status"] = str(response.status_code)
            if GENERATION_HEADER in response.headers:
                export.answered[GENERATION_HEADER] = response.headers[GENERATION_HEADER]
            for part in response.iter_bytes():
                yield part


Row = TypeVar("Row")
# Returns the export for the name of a format.
Describe = Callable[[str], Export]


class Results(Iterator[Row], Generic[Row]):
    """The rows of an export, iterated once, in order and in constant memory.

    No request is sent before the first row is read.

    Each `to_…` method fetches all rows again as Parquet, whether or not some were iterated before.
    """

    def __init__(self, transport: ExportTransport, describe: Describe) -> None:
        self._transport = transport
        self._describe = describe
        self._rows = self._read()  # a generator, which has not begun

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Row:
        return next(self._rows)

    def to_arrow(self) -> "pyarrow.Table":
        """Return all rows as a pyarrow table; embeddings are lists of fixed size."""
        require("pyarrow", extra="dataframes")
        with tempfile.TemporaryDirectory(prefix="vectormill-") as folder:
            path = Path(folder) / "results.parquet"
            self._transport.write_export(self._describe("parquet"), path)
            return read_table(path)

    def to_numpy(self) -> Matrix:
        """Return the keys, and a matrix [num_keys, width] of vectors or an array [num_keys] of scores."""
        return make_matrix(self.to_arrow())

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a DataFrame with one row a key; an embedding is a NumPy array."""
        require("pandas", extra="dataframes")
        return (self.to_arrow()).to_pandas()

    def to_polars(self) -> "polars.DataFrame":
        """Return a DataFrame with one row a key; an embedding is an Array of fixed width."""
        require("polars", extra="dataframes")
        return make_polars(self.to_arrow())

    def _read(self) -> Iterator[Row]:
        export = self._describe(NDJSON)
        for line in flow.split_lines(self._transport.export_parts(export)):
            row: Row = msgspec.json.decode(line)
            yield row
