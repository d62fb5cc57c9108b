"""ItemReference: where the items of a chunk lie in an object, instead of the items themselves.

A chunk's payload is either its items or a reference to them, which begins with MARK. No text of such a job is
ever stored in Postgres or Redis: every process that needs the items reads them from the object, under the tag
that it had when the job was submitted.
"""

import csv
import io
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from msgspec import Struct

from vectormill.domain.errors import ObjectChanged
from vectormill.jobs.item import Items, has_nul, join_pair
from vectormill.objects.store import ObjectFile, StoredObject, read_range

if TYPE_CHECKING:
    import pyarrow

# No zstd frame begins so (RFC 8878, 3.1.1: 28 B5 2F FD), and all other payloads are zstd frames.
MARK: Final = b"vmref1\n"

PARQUET: Final = "parquet"
JSONL: Final = "jsonl"
DELIMITERS: Final = {"csv": ",", "tsv": "\t"}


class ItemColumns(Struct, frozen=True, omit_defaults=True):
    """The names of the columns, or fields, that make an item.

    Without a `key` an item is named after its object, row group and position.
    """

    text: str = "text"
    key: str | None = None
    text_pair: str | None = None
    metadata: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name of each column once."""
        wanted = (self.key, self.text, self.text_pair, *self.metadata)
        return tuple(dict.fromkeys(name for name in wanted if name is not None))


class ItemReference(Struct, frozen=True, omit_defaults=True):
    """Consecutive rows of one object.

    In Parquet they are `num_rows` rows of a row group from row `skip` on. In a format of lines they are
    `num_rows` rows after the first `skip` of those in the bytes from `start` up to `end`, which begin and end
    with whole rows; `first_row` is the position in the object of the first row in these bytes, and `header` has
    the names of a CSV file's columns.
    """

    url: str
    tag: str
    num_bytes: int
    format: str
    columns: ItemColumns
    num_rows: int
    skip: int = 0
    row_group: int = 0
    start: int = 0
    end: int = 0
    first_row: int = 0
    header: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Return the reference as a chunk's payload."""
        return MARK + msgspec.msgpack.encode(self)

    def take(self, start: int, stop: int) -> "ItemReference":
        """Return the reference to the rows from `start` up to `stop` of this one."""
        return msgspec.structs.replace(self, skip=self.skip + start, num_rows=stop - start)

    def name_items(self) -> list[str]:
        """Return the names of the items by their positions, which does not read the object."""
        place = f"{self.row_group}:" if self.format == PARQUET else ""
        first = self.skip + self.first_row
        return [f"{self.url}#{place}{first + row}" for row in range(self.num_rows)]

    def read(self) -> Items:
        """Read the items. A missing text becomes an empty one, and a row without a key is named by its position.

        Raise ObjectChanged if the object is not what it was, and StorageUnavailable if it cannot be read now.
        """
        columns = read_table(self) if self.format == PARQUET else read_lines(self)
        texts = [_encode(value) for value in columns[self.columns.text]]
        if self.columns.text_pair is not None:
            texts = list(map(join_pair, texts, map(_encode, columns[self.columns.text_pair])))
        metadata: Sequence[bytes] = [b""] * len(texts)
        if self.columns.metadata:
            named = [columns[name] for name in self.columns.metadata]
            metadata = [
                _encode_metadata(dict(zip(self.columns.metadata, row, strict=True)))
                for row in zip(*named, strict=True)
            ]
        return Items(self._choose_keys(columns), texts, metadata)

    def read_keys(self, row_groups: "RowGroups | None" = None) -> list[str]:
        """Read the keys of the items as `read` does, and of a Parquet file no other column.

        The columns that were decoded are kept in `row_groups`.
        """
        if self.columns.key is None:
            return self.name_items()
        only = msgspec.structs.replace(self, columns=ItemColumns(self.columns.key, self.columns.key))
        columns = read_table(only, row_groups) if self.format == PARQUET else read_lines(only)
        return self._choose_keys(columns)

    def _choose_keys(self, columns: dict[str, list[Any]]) -> list[str]:
        if self.columns.key is None:
            return self.name_items()
        keys = list(map(_make_key, columns[self.columns.key]))
        if None not in keys:
            return cast(list[str], keys)
        return [key or name for key, name in zip(keys, self.name_items(), strict=True)]


def is_reference(payload: bytes) -> bool:
    return payload.startswith(MARK)


def decode_reference(payload: bytes) -> ItemReference:
    """Decode a payload for which `is_reference` is true."""
    return msgspec.msgpack.decode(payload[len(MARK) :], type=ItemReference)


def _encode(value: Any) -> bytes:
    if value is None:
        return b""
    if isinstance(value, bytes):
        return value
    return (value if isinstance(value, str) else str(value)).encode("utf-8", "surrogatepass")


def _make_key(value: Any) -> str | None:
    if value is None or isinstance(value, float | bool | bytes):
        return None
    key = str(value)
    if not key or "\0" in key:
        return None
    if not key.isascii() and any("\ud800" <= letter <= "\udfff" for letter in key):
        return None
    return key


def _encode_metadata(metadata: dict[str, Any]) -> bytes:
    """Encode metadata with sorted keys; what is not JSON becomes text, and what Postgres cannot store is left out."""
    try:
        encoded = msgspec.json.encode(metadata, order="sorted", enc_hook=str)
    except (UnicodeEncodeError, RecursionError, TypeError, ValueError):
        return b""
    return b"" if has_nul(encoded) else encoded


# -- Parquet ----------------------------------------------------------------------------------------------------------

# Row groups that are kept decoded, so that the chunks of one do not each decode it again: bytes in all.
KEPT_BYTES: Final = 256 << 20
ROWS_AT_ONCE: Final = 1024


class RowGroups:
    """The last row groups that were read, in memory up to `most_bytes`. Thread-safe."""

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Any, ...], pyarrow.Table] = OrderedDict()
        self._reading: dict[tuple[Any, ...], threading.Lock] = {}

    def read(self, reference: ItemReference) -> "pyarrow.Table":
        """Return the rows of a reference. Of a row group that is too large to keep, decode those before them too."""
        name = (reference.url, reference.tag, reference.row_group, reference.columns.names)
        with self._lock:
            own = self._reading.setdefault(name, threading.Lock())
        with own:
            with self._lock:
                table = self._kept.get(name)
                if table is not None:
                    self._kept.move_to_end(name)
            if table is None:
                with open_parquet(reference) as file, _naming(reference.url):
                    most_bytes = 0 if self._is_too_large(file, reference) else self._most_bytes
                    table, is_whole = read_group(file, reference, most_bytes)
                if not is_whole:
                    return table
                self._keep(name, table)
        return table.slice(reference.skip, reference.num_rows)

    def _is_too_large(self, file: Any, reference: ItemReference) -> bool:
        group = file.metadata.row_group(reference.row_group)
        columns = (group.column(place) for place in range(group.num_columns))
        sizes = (
            each.total_uncompressed_size for each in columns if each.path_in_schema in reference.columns.names
        )
        return int(sum(sizes)) > self._most_bytes

    def _keep(self, name: tuple[Any, ...], table: "pyarrow.Table") -> None:
        with self._lock:
            self._kept[name] = table
            while sum(each.nbytes for each in self._kept.values()) > self._most_bytes and len(self._kept) > 1:
                gone, _ = self._kept.popitem(last=False)
                self._reading.pop(gone, None)


def read_group(file: Any, reference: ItemReference, most_bytes: int) -> "tuple[pyarrow.Table, bool]":
    """Return the row group of a reference and True, or only the reference's rows if it has more than `most_bytes`.

    It is decoded some rows at a time, since only then is it known how large equal values become, which Parquet stores
    once.
    """
    import pyarrow

    end, position, num_bytes = reference.skip + reference.num_rows, 0, 0
    whole, parts = [], []
    names = list(reference.columns.names)
    for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[reference.row_group], columns=names):
        first, last = max(reference.skip - position, 0), min(end - position, batch.num_rows)
        if first < last:
            parts.append(batch.slice(first, last - first))
        position += batch.num_rows
        num_bytes += batch.nbytes
        if num_bytes <= most_bytes:
            whole.append(batch)
            continue
        whole.clear()
        if position >= end:
            break
    is_whole = num_bytes <= most_bytes
    read = whole if is_whole else parts
    return pyarrow.Table.from_batches(read, None if read else file.schema_arrow), is_whole


ROW_GROUPS: Final = RowGroups()


def open_parquet(found: "ItemReference | StoredObject") -> Any:
    """Open an object as a pyarrow.parquet.ParquetFile. Raise ObjectChanged if it is not a Parquet file."""
    import pyarrow
    import pyarrow.parquet

    stored = StoredObject(found.url, found.num_bytes, found.tag, 0.0)
    with _naming(found.url):
        return pyarrow.parquet.ParquetFile(pyarrow.PythonFile(ObjectFile(stored), mode="r"))


@contextmanager
def _naming(url: str) -> Iterator[None]:
    """Raise ObjectChanged, with the object's name, for the errors of pyarrow in the block."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowInvalid, OSError) as error:  # OSError: a page that cannot be decoded
        raise ObjectChanged(f"{url} cannot be read as Parquet: {str(error).strip()}") from error


def read_table(reference: ItemReference, row_groups: RowGroups | None = None) -> dict[str, list[Any]]:
    table = (row_groups or ROW_GROUPS).read(reference)
    if table.num_rows != reference.num_rows:
        raise ObjectChanged(f"{reference.url} has fewer rows than when the job was submitted.")
    return {name: table.column(name).to_pylist() for name in reference.columns.names}


# -- lines ------------------------------------------------------------------------------------------------------------


def split_rows(content: bytes, format: str) -> Iterator[tuple[int, bytes]]:
    """Yield each whole row with the position after it, and at last a row that the content breaks off, if any.

    Blank lines are no rows. In CSV and TSV a line break within quotes belongs to its row (RFC 4180).
    """
    position, start, is_open = 0, 0, False
    while position < len(content):
        end = content.find(b"\n", position)
        end = len(content) if end < 0 else end + 1
        if format in DELIMITERS and content.count(b'"', position, end) % 2:
            is_open = not is_open
        position = end
        if not is_open or end == len(content):
            row = content[start:end]
            start = end
            if row.strip():
                yield end, row


def read_lines(reference: ItemReference) -> dict[str, list[Any]]:
    content = read_range(reference.url, reference.tag, reference.start, reference.end)
    rows = [row for _, row in split_rows(content, reference.format)]
    rows = rows[reference.skip : reference.skip + reference.num_rows]
    if len(rows) != reference.num_rows:
        raise ObjectChanged(f"{reference.url} has other rows than when the job was submitted.")
    values = _parse_json(rows) if reference.format == JSONL else _parse_csv(rows, reference)
    return {name: [row.get(name) for row in values] for name in reference.columns.names}


def _parse_json(rows: Sequence[bytes]) -> list[dict[str, Any]]:
    """Decode each line; one that is not a JSON object has no fields, so that only its item fails."""
    decoded = []
    for row in rows:
        try:
            value = json.loads(row.decode("utf-8", "surrogateescape"))
        except (ValueError, RecursionError):
            value = None
        decoded.append(value if isinstance(value, dict) else {})
    return decoded


def _parse_csv(rows: Sequence[bytes], reference: ItemReference) -> list[dict[str, Any]]:
    """Decode each row; one with more or fewer cells than the header has no fields, so that only its item fails."""
    decoded: list[dict[str, Any]] = []
    for row in rows:
        cells = read_cells(row, reference.format)
        is_whole = len(cells) == len(reference.header)
        decoded.append(dict(zip(reference.header, cells, strict=True)) if is_whole else {})
    return decoded


def read_cells(row: bytes, format: str) -> list[str]:
    """Return the cells of one row of CSV or TSV."""
    csv.field_size_limit(max(csv.field_size_limit(), len(row)))
    text = io.StringIO(row.decode("utf-8", "surrogateescape"), newline="")
    return next(csv.reader(text, delimiter=DELIMITERS[format]), [])
