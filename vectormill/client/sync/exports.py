# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""Exports over HTTP: a body that is written into a file or read row by row, and goes on after a lost connection.

NDJSON goes on behind the last line that came whole. Other formats cannot: without its end such a file is none, so that
it begins anew, and only in a path. A path gets the whole export or is left as it was.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, Self, TypeVar

import msgspec

from vectormill.client.frames import (
    Matrix,
    make_matrix,
    make_pandas,
    make_polars,
    read_parquet,
    require_library,
)
from vectormill.client.requests import given
from vectormill.client.sync import flow
from vectormill.client.sync.transport import Transport
from vectormill.files.outputs import open_replacement
from vectormill.problems import ApiError, ApiUnreachable

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow


NDJSON = "ndjson"
# Headers of the answer that are asked for again when the export goes on, by the name of the parameter.
GENERATION_HEADER = "Vectormill-Generation"


@dataclass(slots=True)
class Export:
    """A body to fetch: where it is, how it is asked for, and the error when it breaks off for good."""

    path: str
    parameters: Mapping[str, Any]
    format: str
    broken: str | None = None
    answered: dict[str, str] = field(default_factory=dict)


class ExportTransport(Transport):
    """The parts that exports of jobs and of collections share."""

    def write_export(self, export: Export, target: str | Path | BinaryIO) -> int:
        """Return the number of bytes. A file object gets what came until an error."""
        if isinstance(target, str | Path):
            return self._write_whole(export, Path(target))
        return self._write_parts(export, target)

    def export_parts(self, export: Export) -> Iterator[bytes]:
        """Yield the body, in parts of whole lines where it has lines."""
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

    def _write_parts(self, export: Export, file: BinaryIO) -> int:
        num_bytes = 0
        for part in self.export_parts(export):
            file.write(part)
            num_bytes += len(part)
        return num_bytes

    def _write_whole(self, export: Export, path: Path) -> int:
        pauses = self.retries.begin()
        while True:
            try:
                with open_replacement(path) as file:
                    return self._write_parts(export, file)
            except ApiUnreachable as error:
                is_hopeless = export.format == NDJSON or isinstance(error.__cause__, ApiError)
                pause = None if is_hopeless or not export.answered else pauses.before_next(error)
                if pause is None:
                    raise
            self.pause_for(pause)

    def _open(self, export: Export, after: str | None) -> Iterator[bytes]:
        parameters = {**export.parameters, "format": export.format, "after": after}
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
# From the name of a format to its export.
Describe = Callable[[str], Export]


class Results(Iterator[Row], Generic[Row]):
    """Rows of an export, iterated once, in constant memory and in order; nothing is asked for before that.

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
        require_library("pyarrow")
        with tempfile.TemporaryDirectory(prefix="vectormill-") as folder:
            path = Path(folder) / "results.parquet"
            self._transport.write_export(self._describe("parquet"), path)
            return read_parquet(path)

    def to_numpy(self) -> Matrix:
        """Return keys, and the matrix [num_keys, width] of their vectors, or the scores [num_keys] of a job that
        scores.
        """
        return make_matrix(self.to_arrow())

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a row a key; an embedding is an array of NumPy."""
        require_library("pandas")
        return make_pandas(self.to_arrow())

    def to_polars(self) -> "polars.DataFrame":
        """Return a row a key; an embedding is an Array of fixed width."""
        require_library("polars")
        return make_polars(self.to_arrow())

    def _read(self) -> Iterator[Row]:
        export = self._describe(NDJSON)
        for line in flow.split_lines(self._transport.export_parts(export)):
            row: Row = msgspec.json.decode(line)
            yield row
