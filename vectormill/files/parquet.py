"""Parquet: the only module that opens Parquet files, to read them and to write them.

A file of some hundred bytes may unfold to gigabytes: pages are compressed, and a value that repeats is stored once. So
what a row group needs is computed from the headers of its pages, which no footer can belie, before it is decoded.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vectormill.domain.errors import InvalidItem

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

# The most rows of a batch, and the most bytes that they have unless a row alone has more.
BATCH_ROWS: Final = 1024
BATCH_BYTES: Final = 8 << 20
# The most bytes to which the rows of a batch are decoded before they are divided.
DECODED_BYTES: Final = 64 << 20
# The most bytes of the columns of a row group as they are stored, and of a page of each of them when decompressed:
# DuckDB writes pages of 100 MiB, pyarrow of 1,024 values, others of 1 MiB.
GROUP_BYTES: Final = 1 << 30
PAGES_BYTES: Final = 256 << 20
# All lists of a column may have so many bytes, or so many times those that are stored: one row may have all of them.
LIST_BYTES: Final = 512 << 20
LIST_RATIO: Final = 32
FOOTER_BYTES: Final = 32 << 20
# A larger dictionary is not read for its longest value.
DICTIONARY_BYTES: Final = 4 << 20
# One number takes this much memory together with its repetition and definition levels.
NUMBER_BYTES: Final = 12

# These numbers are defined by https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift:
# DICTIONARY_PAGE is the type of a page. PREFIXES is the encoding DELTA_BYTE_ARRAY, which stores of a value only the end
# that differs from the value before it. CODECS has the codecs by the names that pyarrow gives them.
DICTIONARY_PAGE: Final = 2
PREFIXES: Final = 7
CODECS: Final = {1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
# Types of Thrift's compact protocol.
BOOLEANS: Final = (1, 2)  # a field of a struct has its value in its type
BYTE, I16, I32, I64, DOUBLE, BYTES, LIST, STRUCT = 3, 4, 5, 6, 7, 8, 9, 12
MALFORMED: Final = (LookupError, ValueError, TypeError, AttributeError, RecursionError, OverflowError)


class ParquetInput:
    """A Parquet file that is read in bounded memory, whatever it says.

    Where its columns lie is read here from the footer, since pyarrow ends the process for some that are malformed.
    """

    def __init__(self, file: Any) -> None:
        import pyarrow.parquet  # imported here because this takes a tenth of a second

        with _naming_malformed():
            self._groups = read_footer(file).get((4, LIST), [])
            self.group_rows: list[int] = [group[3, I64] for group in self._groups]
        self._chunks = _Chunks(file)
        handle = pyarrow.PythonFile(self._chunks, mode="r")
        # Without a buffer it reads each column chunk as a whole.
        self._file = pyarrow.parquet.ParquetFile(handle, pre_buffer=False)
        self._chunks.is_measured = True
        self.num_rows: int = self._file.metadata.num_rows
        self.schema_arrow = self._file.schema_arrow
        self._leaves = [self._file.schema.column(place) for place in range(self._file.metadata.num_columns)]

    def close(self) -> None:
        self._file.close()

    def measure_columns(self, number: int) -> list[tuple[str, int]]:
        """Return the paths of the columns of a row group, and their bytes without compression by the footer."""
        with _naming_malformed():
            return [
                (leaf.path, chunk[6, I64])
                for leaf, chunk in zip(self._leaves, self._list_chunks(number), strict=True)
            ]

    def iter_batches(
        self, columns: Sequence[str] | None = None, row_groups: Iterable[int] | None = None
    ) -> "Iterator[pyarrow.RecordBatch]":
        """Yield the rows in batches of at most BATCH_ROWS rows, and of BATCH_BYTES unless one row has more.

        Raise the errors of pyarrow, ArrowInvalid also for a row group that may need too much memory.
        """
        names = self.schema_arrow.names if columns is None else list(columns)
        for number in range(len(self._groups)) if row_groups is None else row_groups:
            if not self.group_rows[number]:
                continue
            with _naming_malformed():
                num_rows = self._load(number, names)
            # Without threads, since two of them would seek in one file.
            batches = self._file.iter_batches(num_rows, row_groups=[number], columns=names, use_threads=False)
            for batch in batches:
                yield from divide(batch)

    def _list_chunks(self, number: int) -> list[Any]:
        return [chunk[3, STRUCT] for chunk in self._groups[number][1, LIST]]

    def _load(self, number: int, names: Sequence[str]) -> int:
        """Load the columns of a row group as they are stored; return how many rows may be decoded at once."""

        def refuse(fault: str, num_bytes: int, most: int) -> None:
            if num_bytes > most:
                raise ValueError(
                    f"row group {number} has {fault} of {num_bytes:,} bytes, and at most {most:,} are read; write it "
                    "with smaller row groups and pages"
                )

        chosen = [
            (leaf, chunk)
            for leaf, chunk in zip(self._leaves, self._list_chunks(number), strict=True)
            if any(f"{leaf.path}.".startswith(f"{name}.") for name in names)
        ]
        refuse("columns", sum(chunk[7, I64] for _, chunk in chosen), GROUP_BYTES)
        pages_bytes, row_bytes = 0, 1
        for leaf, chunk in chosen:
            start, dictionary = chunk[9, I64], chunk.get((11, I64), 0)
            content = self._chunks.load(dictionary if 0 < dictionary < start else start, chunk[7, I64])
            page_bytes, value_bytes, all_bytes = measure_chunk(content, leaf, chunk[4, I32])
            pages_bytes += page_bytes
            if leaf.max_repetition_level:
                refuse(f"lists in {leaf.path!r}", all_bytes, max(LIST_BYTES, LIST_RATIO * len(content)))
            else:
                row_bytes += value_bytes
        refuse("pages", pages_bytes, PAGES_BYTES)
        return max(1, min(BATCH_ROWS, DECODED_BYTES // row_bytes))


@contextmanager
def _naming_malformed() -> Iterator[None]:
    import pyarrow

    try:
        yield
    except MALFORMED as error:
        said = str(error) if isinstance(error, ValueError) else "a footer or a page has no valid header"
        raise pyarrow.ArrowInvalid(said) from error


class _Chunks:
    """A file for pyarrow, which gets the column chunks that were loaded before; once it `is_measured`, nothing else."""

    closed = False
    is_measured = False

    def __init__(self, file: Any) -> None:
        self.seek, self.tell, self._read = file.seek, file.tell, file.read
        self._loaded: dict[int, bytes] = {}

    def load(self, start: int, num_bytes: int) -> bytes:
        if min(start, num_bytes) < 0:
            raise ValueError("a column has a negative size")
        self.seek(start)
        content = self._loaded[start] = bytes(self._read(num_bytes))
        return content

    def read(self, size: int) -> bytes:
        content = self._loaded.pop(self.tell(), b"")
        if self.is_measured and size != len(content):
            raise OSError("a column lies elsewhere than the footer says")
        if not self.is_measured:
            return bytes(self._read(size))
        self.seek(size, 1)
        return content

    def close(self) -> None:
        """Leave the file to who has opened it."""


def read_footer(file: Any) -> dict[Any, Any]:
    """Return the fields of the footer of a file; none if it has no footer, which pyarrow refuses."""
    end = max(file.seek(0, 2) - 8, 0)
    file.seek(end)
    tail = bytes(file.read(8))
    size = int.from_bytes(tail[:4], "little")
    if tail[4:] != b"PAR1" or size > end:
        return {}
    if size > FOOTER_BYTES:
        raise ValueError(f"its footer has {size:,} bytes, and at most {FOOTER_BYTES:,} are read")
    file.seek(end - size)
    return _Thrift(file.read(size)).read_struct()


def measure_chunk(content: bytes, leaf: Any, codec: int) -> tuple[int, int, int]:
    """Return the most bytes of a page of a column chunk, of a value on average, and of all values.

    Raise one of MALFORMED if a page has no valid header.
    """
    fixed = leaf.length if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY" else NUMBER_BYTES
    page_bytes = value_bytes = all_bytes = longest = 0
    pages = _Thrift(content)
    while pages.tell() < len(content):
        header = pages.read_struct()
        num_bytes, num_stored = header[2, I32], header[3, I32]
        if min(num_bytes, num_stored) < 0:
            raise ValueError("a page has a negative size")
        page_bytes = max(page_bytes, num_bytes)
        start, end = pages.tell(), pages.seek(num_stored, 1)
        if header[1, I32] == DICTIONARY_PAGE:
            is_text = leaf.physical_type == "BYTE_ARRAY"
            longest = find_longest(content[start:end], num_bytes, codec) if is_text else 0
        else:  # of one of two versions
            page = header.get((5, STRUCT)) or header[8, STRUCT]
            num_values, encoding = page[1, I32], page[2 if (5, STRUCT) in header else 4, I32]
            repeated = num_bytes if encoding == PREFIXES else longest
            mean = max(fixed, repeated) + num_bytes // max(num_values, 1)
            value_bytes, all_bytes = max(value_bytes, mean), all_bytes + mean * max(num_values, 0)
    return page_bytes, value_bytes, all_bytes


def find_longest(stored: bytes, num_bytes: int, codec: int) -> int:
    """Return the bytes of the longest text of a dictionary, or of all if it is large or cannot be read."""
    import pyarrow

    if num_bytes > DICTIONARY_BYTES:
        return num_bytes
    try:
        values = pyarrow.decompress(stored, num_bytes, CODECS[codec], asbytes=True) if codec else stored
    except (pyarrow.ArrowException, OSError, ValueError, KeyError):
        return num_bytes
    longest, position = num_bytes if len(values) != num_bytes else 0, 0
    while position < len(values):
        size = int.from_bytes(values[position : position + 4], "little")
        longest, position = max(longest, size), position + 4 + size
    return longest


class _Thrift(io.BytesIO):
    """Bytes in Thrift's compact protocol, whose values are read one after another."""

    def read_struct(self) -> dict[Any, Any]:
        """Return the fields of a struct by their ids and types."""
        fields: dict[Any, Any] = {}
        field = 0
        while head := self.read(1)[0]:
            step, kind = divmod(head, 16)
            field = field + step if step else self._read_number()
            if kind not in BOOLEANS:
                fields[field, kind] = self._read_value(kind)
        return fields

    def _read_value(self, kind: int) -> Any:
        """Return a value; None for those that are passed over. Each takes a byte at least, so that lists end."""
        if kind in (I16, I32, I64):
            return self._read_number()
        if kind == STRUCT:
            return self.read_struct()
        if kind == LIST:
            size, item_kind = divmod(self.read(1)[0], 16)
            return [self._read_value(item_kind) for _ in range(self._read_varint() if size == 15 else size)]
        if kind == BYTES:
            self.seek(self._read_varint(), 1)
        elif kind in (*BOOLEANS, BYTE):
            self.read(1)[0]
        elif kind == DOUBLE:
            self.read(8)[7]
        else:
            raise ValueError("a field has a type that Parquet does not use")
        return None

    def _read_number(self) -> int:
        value = self._read_varint()
        return (value >> 1) ^ -(value & 1)

    def _read_varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self.read(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a number has more than 64 bits")


def divide(rows: "pyarrow.RecordBatch") -> "Iterator[pyarrow.RecordBatch]":
    """Yield the rows in parts of at most BATCH_BYTES, each value written out, unless one row has more."""
    if rows.num_rows <= 1 or measure(rows) <= BATCH_BYTES:
        yield rows
        return
    half = rows.num_rows // 2
    yield from divide(rows.slice(0, half))
    yield from divide(rows.slice(half))


def measure(rows: "pyarrow.RecordBatch | pyarrow.Table") -> int:
    """Return the bytes of rows if each value of a dictionary, as of a categorical column, were written out."""
    import pyarrow
    import pyarrow.compute

    total = 0
    for column in rows.columns:
        for part in column.chunks if isinstance(column, pyarrow.ChunkedArray) else (column,):
            if pyarrow.types.is_dictionary(part.type):
                lengths = pyarrow.compute.binary_length(part.dictionary).cast(pyarrow.int64())
                total += pyarrow.compute.sum(lengths.take(part.indices)).as_py() or 0
                part = part.indices
            total += part.nbytes
    return total


def open_parquet(file: Any) -> "closing[ParquetInput]":
    """Open a file that can be sought for reading. Raise the errors of pyarrow."""
    return closing(ParquetInput(file))


def open_writer(sink: Any, schema: "pyarrow.Schema", **options: Any) -> "pyarrow.parquet.ParquetWriter":
    """Open a path or a file for writing a table of this schema."""
    import pyarrow.parquet

    return pyarrow.parquet.ParquetWriter(sink, schema, **options)


def read_table(path: Path) -> "pyarrow.Table":
    """Return a whole file in memory, which must be of our own."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        return file.read()


@contextmanager
def naming(name: str, error: type[Exception] = InvalidItem) -> Iterator[None]:
    """Raise `error`, with the file's name, for the errors of pyarrow in the block."""
    import pyarrow

    try:
        yield
    # A page that cannot be decoded raises OSError, and the name of a column that is not UTF-8 raises UnicodeError.
    except (pyarrow.ArrowException, OSError, UnicodeError) as cause:
        raise error(f"{name} cannot be read as Parquet: {str(cause).strip().rstrip('.')}.") from cause
