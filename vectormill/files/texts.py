"""Texts: read files, directories and standard input as a stream of items.

read_texts("papers.jsonl.gz")       JSONL, plain or .gz (also .ndjson)
read_texts("papers.csv")            CSV or TSV with a header, plain or .gz
read_texts("papers.parquet")        Parquet, one row group after another
read_texts("papers/")               every text file below the directory
read_texts("-")                     JSONL on standard input"""

import csv
import gzip
import io
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, cast

from vectormill.domain.errors import InvalidItem
from vectormill.files.formats import INPUT_FORMATS, INPUT_HELP, by_suffix
from vectormill.files.ndjson import ItemJson

KEY_FIELDS: Final = ("key", "id")

# Error handlers of Python's decoders for input that is not UTF-8. With surrogateescape a bad byte becomes a lone
# surrogate, so that only its item fails, as an item error of the job; with strict, reading raises InvalidItem.
UnicodeErrors = Literal["surrogateescape", "strict"]
FAIL_ALONE: Final = "surrogateescape"
REFUSE: Final = "strict"


@dataclass(frozen=True, slots=True)
class Fields:
    """The names of the fields with key, text and second text, and the error handler for bytes that are not UTF-8.

    If `key` is None, the key is the field `key`, else `id`, else the number of the line. If `pair` is None, no second
    text is read. `advice` ends the error of a row without such a field: how others are chosen. A longer line than
    `max_line_bytes` is refused before it is read whole.
    """

    key: str | None = None
    text: str = "text"
    pair: str | None = None
    errors: UnicodeErrors = FAIL_ALONE
    advice: str = "Choose others with --text-field and --key-field."
    max_line_bytes: int = 1 << 62


def make_item(row: Mapping[str, Any], fields: Fields, number: int, place: str) -> ItemJson:
    """Return the item of one row, with its `metadata` field if that is an object. Raise InvalidItem.

    `number` is the number of the row or line, from 1; `place` names the row in errors.
    """
    text = row.get(fields.text)
    if not isinstance(text, str):
        raise InvalidItem(f"{place}: {_describe_missing(row, fields.text, text, fields.advice)}")
    item: ItemJson = {"key": _find_key(row, fields, number, place), "text": text}
    if fields.pair is not None and (pair := row.get(fields.pair)) is not None:
        if not isinstance(pair, str):
            raise InvalidItem(f"{place}: {_describe_missing(row, fields.pair, pair, fields.advice)}")
        item["text_pair"] = pair
    metadata = row.get("metadata")
    if isinstance(metadata, Mapping):
        item["metadata"] = metadata
    return item


def _find_key(row: Mapping[str, Any], fields: Fields, number: int, place: str) -> str:
    names: Iterable[str] = KEY_FIELDS if fields.key is None else (fields.key,)
    for name in names:
        key = row.get(name)
        if key is None:
            continue
        if isinstance(key, bool | float) or not isinstance(key, str | int):
            raise InvalidItem(
                f"{place}: the key in field {name!r} must be a string or a whole number, not {key!r}."
            )
        return str(key)
    if fields.key is not None:
        raise InvalidItem(f"{place}: {_describe_missing(row, fields.key, None, fields.advice)}")
    return str(number)


def _describe_missing(row: Mapping[str, Any], name: str, value: Any, advice: str) -> str:
    if value is not None:
        return f"the field {name!r} must contain a string, not {type(value).__name__}."
    if name in row:
        return f"the field {name!r} is empty."
    known = ", ".join(repr(field) for field in list(row)[:10]) or "none"
    return f"no field {name!r}; its fields are {known}. {advice}"


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading bytes, decompressed if its name ends in .gz."""
    return cast("BinaryIO", gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb"))


@dataclass(frozen=True, slots=True)
class JsonlFile:
    """The items of a .jsonl or .jsonl.gz file; each iteration reads the file again."""

    path: Path
    fields: Fields

    def __iter__(self) -> Iterator[ItemJson]:
        with open_bytes(self.path) as file:
            try:
                lines = iter(partial(file.readline, self.fields.max_line_bytes + 1), b"")
                yield from JsonLines(lines, str(self.path), self.fields)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise InvalidItem(f"{self.path} is not a complete gzip file: {error}.") from error


@dataclass(frozen=True, slots=True)
class JsonLines:
    """The items of JSON objects in lines of bytes. Blank lines are skipped."""

    lines: Iterable[bytes]
    name: str
    fields: Fields

    def __iter__(self) -> Iterator[ItemJson]:
        for number, line in enumerate(self.lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # Windows programs often write a byte order mark
            if line.strip():
                yield self._read(line, number)

    def _read(self, line: bytes, number: int) -> ItemJson:
        place = f"{self.name}, line {number}"
        if len(line) > self.fields.max_line_bytes:
            raise InvalidItem(
                f"{place}: more than {self.fields.max_line_bytes:,} bytes (VECTORMILL_MAX_LINE_BYTES)."
            )
        try:
            row = json.loads(line.decode("utf-8", self.fields.errors))
        except UnicodeDecodeError as error:
            raise InvalidItem(f"{place}: not valid UTF-8 (byte {error.start + 1} of the line).") from error
        except json.JSONDecodeError as error:
            raise InvalidItem(f"{place}: not valid JSON ({error.msg}, column {error.colno}).") from error
        except RecursionError as error:
            raise InvalidItem(f"{place}: the JSON is nested too deeply.") from error
        if not isinstance(row, dict):
            raise InvalidItem(f'{place}: expected a JSON object such as {{"key": …, "text": …}}.')
        return make_item(row, self.fields, number, place)


# The csv module refuses fields above 128 KiB by default; this is the limit of the API for a line.
MAX_FIELD_CHARS: Final = 16 << 20
PARQUET_BATCH_ROWS: Final = 1024


@dataclass(frozen=True, slots=True)
class CsvFile:
    """The items of a CSV or TSV file whose first line names the columns; each iteration reads the file again."""

    path: Path
    fields: Fields
    delimiter: str = ","

    def __iter__(self) -> Iterator[ItemJson]:
        csv.field_size_limit(MAX_FIELD_CHARS)
        # newline="" keeps the line breaks of quoted fields, which the csv module must see unchanged.
        with open_bytes(self.path) as file, self._decode(file) as text:
            rows = csv.DictReader(text, delimiter=self.delimiter, strict=True)
            try:
                for number, row in enumerate(rows, start=1):
                    yield self._read(row, number, f"{self.path}, line {rows.line_num}")
            except UnicodeDecodeError as error:
                raise InvalidItem(f"{self.path}, after line {rows.line_num}: not valid UTF-8.") from error
            except csv.Error as error:
                raise InvalidItem(f"{self.path}, after line {rows.line_num}: {error}.") from error
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise InvalidItem(f"{self.path} is not a complete gzip file: {error}.") from error

    def _decode(self, file: BinaryIO) -> io.TextIOWrapper:
        return io.TextIOWrapper(file, "utf-8-sig", self.fields.errors, newline="")

    def _read(self, row: dict[str | Any, Any], number: int, place: str) -> ItemJson:
        # DictReader stores surplus cells under None and fills missing ones with None: both mean a broken line.
        if None in row or None in row.values():
            raise InvalidItem(f"{place}: the row has more or fewer cells than the header.")
        return make_item(row, self.fields, number, place)


@dataclass(frozen=True, slots=True)
class ParquetFile:
    """The items of a Parquet file. Only one batch of rows, of the needed columns, is in memory at a time."""

    path: Path
    fields: Fields

    def __iter__(self) -> Iterator[ItemJson]:
        import pyarrow  # imported here, since it takes a tenth of a second
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                names = file.schema_arrow.names
                wanted = {self.fields.text, self.fields.pair, self.fields.key, *KEY_FIELDS, "metadata"}
                columns = [name for name in names if name in wanted]
                if self.fields.text not in names:
                    columns = names[:]  # so that the error of make_item names all fields
                number = 0
                for batch in file.iter_batches(PARQUET_BATCH_ROWS, columns=columns):
                    for row in batch.to_pylist():
                        number += 1
                        yield make_item(row, self.fields, number, f"{self.path}, row {number}")
        except pyarrow.ArrowException as error:
            raise InvalidItem(f"{self.path} cannot be read as Parquet: {error}.") from error


@dataclass(frozen=True, slots=True)
class TextTree:
    """The items of all files below a directory, in sorted order. The key is the relative path, with slashes.

    Hidden files and folders (their names start with a dot) are skipped. `errors` is the error handler for files that
    are not UTF-8: see UnicodeErrors.
    """

    root: Path
    errors: UnicodeErrors = FAIL_ALONE

    def __iter__(self) -> Iterator[ItemJson]:
        num_files = 0
        for path in self.find_files():
            num_files += 1
            yield self.read(path)
        if num_files == 0:
            raise InvalidItem(f"{self.root} contains no files.")

    def find_files(self, on_error: Callable[[OSError], object] | None = None) -> Iterator[Path]:
        """Yield the paths of the files in order. Unreadable folders are skipped, and `on_error` gets their errors."""
        for folder, folders, files in os.walk(self.root, onerror=on_error):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                if not name.startswith("."):
                    yield Path(folder, name)

    def read(self, path: Path, max_bytes: int = -1) -> ItemJson:
        """Return the item of one file, of at most its first `max_bytes` bytes (-1: all). Raise InvalidItem."""
        with path.open("rb") as file:
            content = file.read(max_bytes)
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            if self.errors == REFUSE:
                raise InvalidItem(
                    f"{path} is not UTF-8 text (byte {error.start}). Convert it, or move it out of {self.root}."
                ) from error
            # The text ends at the first bad byte, so that a video among the texts is not uploaded completely.
            text = content[: error.start + 1].decode("utf-8", FAIL_ALONE)
        return {"key": path.relative_to(self.root).as_posix(), "text": text}


READERS: Final[Mapping[str, Callable[[Path, Fields], Iterable[ItemJson]]]] = {
    "jsonl": JsonlFile,
    "csv": CsvFile,
    "tsv": partial(CsvFile, delimiter="\t"),
    "parquet": ParquetFile,
}
FORMAT_OF_SUFFIX: Final = by_suffix(INPUT_FORMATS)
# The number of items that are checked before a job is started.
LOOKED_AT = 1000


def read_texts(name: str, fields: Fields | None = None) -> Iterable[ItemJson]:
    """Return the items of an input, which are read lazily. `name` is a file, a directory, or - for standard input.

    All but standard input can be iterated over again. Raise InvalidItem if the input does not exist or has no known
    format; iteration raises it, with file and line, for an item that cannot be read.
    """
    fields = fields or Fields()
    if name == "-":
        return iter(JsonLines(sys.stdin.buffer, "standard input", fields))
    path = Path(name)
    if path.is_dir():
        return TextTree(path, fields.errors)
    if not path.exists():
        raise InvalidItem(f"There is no file {name}.")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    kind = suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else "".join(suffixes[-1:])
    format = FORMAT_OF_SUFFIX.get(kind)
    if format is None:
        raise InvalidItem(f"Unknown format of {name}. Supported inputs: {INPUT_HELP}")
    return READERS[format](path, fields)


def look_at_texts(items: Iterable[ItemJson], *, whole: bool) -> Iterable[ItemJson]:
    """Read the first thousand items, or all if `whole`, to find errors before a job starts; return all items again.

    Of standard input only the first thousand are read, since it can be read only once. Raise InvalidItem.
    """
    if not isinstance(items, Iterator):
        for _ in islice(iter(items), None if whole else LOOKED_AT):
            pass
        return items
    return chain(list(islice(items, LOOKED_AT)), items)
