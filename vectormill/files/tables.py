"""Tables as items: CSV and TSV with a header, and Parquet. Rows are read as they are needed."""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from vectormill.domain.errors import InvalidItem
from vectormill.files.lines import open_bytes
from vectormill.files.ndjson import ItemJson
from vectormill.files.rows import KEY_FIELDS, Fields, make_item

# The csv module refuses fields above 128 KiB unless told otherwise; this is what the API takes in a line.
MAX_FIELD_CHARS: Final = 16 << 20
PARQUET_BATCH_ROWS: Final = 1024


@dataclass(frozen=True, slots=True)
class CsvFile:
    """A CSV or TSV file whose first line names the columns; each iteration reads it anew."""

    path: Path
    fields: Fields
    delimiter: str = ","

    def __iter__(self) -> Iterator[ItemJson]:
        csv.field_size_limit(MAX_FIELD_CHARS)
        # newline="": a quoted field may hold line ends, which the csv module must see as they are.
        with open_bytes(self.path) as file, self._decode(file) as text:
            rows = csv.DictReader(text, delimiter=self.delimiter, strict=True)
            try:
                for number, row in enumerate(rows, start=1):
                    yield self._read(row, number, f"{self.path}, line {rows.line_num}")
            except UnicodeDecodeError as error:
                raise InvalidItem(f"{self.path}, after line {rows.line_num}: it is not UTF-8.") from error
            except csv.Error as error:
                raise InvalidItem(f"{self.path}, after line {rows.line_num}: {error}.") from error
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise InvalidItem(f"{self.path} is not a whole gzip file: {error}.") from error

    def _decode(self, file: BinaryIO) -> io.TextIOWrapper:
        return io.TextIOWrapper(file, "utf-8-sig", self.fields.errors, newline="")

    def _read(self, row: dict[str | Any, Any], number: int, place: str) -> ItemJson:
        # DictReader puts surplus cells under None and fills missing ones with None: both are a broken line.
        if None in row or None in row.values():
            raise InvalidItem(f"{place}: it has more or fewer cells than the header.")
        return make_item(row, self.fields, number, place)


@dataclass(frozen=True, slots=True)
class ParquetFile:
    """A Parquet file, of which one batch of rows and the columns in question are in memory at a time."""

    path: Path
    fields: Fields

    def __iter__(self) -> Iterator[ItemJson]:
        import pyarrow  # here, because only this reader needs its tenth of a second
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                names = file.schema_arrow.names
                wanted = {self.fields.text, self.fields.pair, self.fields.key, *KEY_FIELDS, "metadata"}
                columns = [name for name in names if name in wanted]
                if self.fields.text not in names:
                    columns = names[:]  # make_item then names the fields that there are
                number = 0
                for batch in file.iter_batches(PARQUET_BATCH_ROWS, columns=columns):
                    for row in batch.to_pylist():
                        number += 1
                        yield make_item(row, self.fields, number, f"{self.path}, row {number}")
        except pyarrow.ArrowException as error:
            raise InvalidItem(f"{self.path} cannot be read as Parquet: {error}.") from error
