"""Decoding: the rows of CSV, TSV, JSON lines and Parquet, each by the library that everybody uses.

This is the only module that parses CSV and JSON lines; vectormill/files/parquet.py opens Parquet. What does not parse
is refused with its place, as that library refuses it, and never skipped.
"""

import csv
import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any, BinaryIO, Final, NamedTuple, TypeVar, cast

import msgspec

from vectormill.domain.errors import InvalidItem, SubmissionTooLarge
from vectormill.files.formats import PACKED
from vectormill.rows.columns import Columns

T = TypeVar("T")

JSONL: Final = "jsonl"
PARQUET: Final = "parquet"
DELIMITERS: Final = {"csv": ",", "tsv": "\t"}
BLOCK_BYTES: Final = 256 << 10
UNLIMITED: Final = sys.maxsize
# What is compressed may always expand to this size, since the beginning of an honest file may be repetitive.
FREE_BYTES: Final = 16 << 20
# Of JSON lines so many names of fields are kept to choose among.
MOST_NAMES: Final = 10_000
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_UTF_16: Final = (b"\xff\xfe", b"\xfe\xff")

# The length of a cell is bounded by that of its row, below.
csv.field_size_limit(sys.maxsize)

# The columns, or what chooses them among those of a header or of a first row; the second argument is the place for
# messages.
Choice = Columns | Callable[[Sequence[str], str], Columns]


def _choose(choose: Choice, present: Sequence[str], place: str) -> Columns:
    return choose if isinstance(choose, Columns) else choose(present, place)


class RowBatch(NamedTuple):
    """Consecutive rows: the values of the chosen columns, and where the rows are.

    `numbers` are the lines at which they begin, or the numbers of rows of Parquet, from 1. `ends` are the positions
    after them in the bytes of a format of lines, and `start` that before the first one. `faults` has the reasons why
    rows, by their places in the batch, do not parse, if such rows are kept; all their values are null.
    """

    chosen: Columns
    columns: Mapping[str, Sequence[Any]]
    numbers: Sequence[int]
    start: int = 0
    ends: Sequence[int] = ()
    header: tuple[str, ...] = ()
    faults: Mapping[int, str] = {}


def read_rows(
    file: BinaryIO,
    format: str,
    choose: Choice,
    name: str,
    max_row_bytes: int = UNLIMITED,
    max_ratio: int = UNLIMITED,
) -> Iterator[RowBatch]:
    """Yield the rows of a file of any format, in memory bounded by some MiB and the longest row.

    Raise InvalidItem, which names the file and the line, for what is not of the format, and SubmissionTooLarge for a
    file of lines that expands to more than `max_ratio` times its size.
    """
    if format == PARQUET:
        return read_parquet_rows(file, choose, name)
    return read_lines_of(format)(read_blocks(file, name, max_ratio), choose, name, max_row_bytes)


def read_lines_of(format: str) -> Callable[..., Iterator[RowBatch]]:
    """Return the reader of a format of lines, of read_json_rows and read_cell_rows."""
    return read_json_rows if format == JSONL else partial(read_cell_rows, delimiter=DELIMITERS[format])


def unpack(file: BinaryIO, name: str) -> BinaryIO:
    """Return a file decompressed if its name ends in one of PACKED."""
    if name.lower().endswith(".gz"):
        return cast("BinaryIO", gzip.open(file, "rb"))
    if name.lower().endswith(".zst"):
        import pyarrow  # unlike zstandard's reader, this one rejects a truncated file

        return cast("BinaryIO", pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd"))
    return file


def is_bomb(num_given: int, num_read: int, max_ratio: float) -> bool:
    """Return True if compressed bytes have expanded too much."""
    return num_given > max(FREE_BYTES, num_read * max_ratio)


def read_blocks(file: BinaryIO, name: str, max_ratio: int = UNLIMITED) -> Iterator[bytes]:
    """Yield the content of a file, decompressed. Raise InvalidItem if it is not whole, and SubmissionTooLarge."""
    unpacked, num_given = unpack(file, name), 0
    try:
        while block := unpacked.read(BLOCK_BYTES):
            num_given += len(block)
            if unpacked is not file and is_bomb(num_given, file.tell(), max_ratio):
                raise SubmissionTooLarge(
                    f"{name} expands to more than {max_ratio} times its size (VECTORMILL_MAX_GZIP_RATIO); compress it "
                    "less, or use Parquet."
                )
            yield bytes(block)
    except (OSError, EOFError, zlib.error) as error:
        if not name.lower().endswith(PACKED):
            raise
        kind = "zstd" if name.lower().endswith(".zst") else "gzip"
        raise InvalidItem(f"{name} is not a complete {kind} file: {error}.") from error


def strip_mark(block: bytes, name: str) -> bytes:
    """Return the first block of a text without a byte order mark. Raise InvalidItem for UTF-16."""
    if block.startswith(_UTF_16) or b"\0" in block[:2]:
        raise InvalidItem(f"{name} is UTF-16 text. Save it as UTF-8, as `iconv -f UTF-16 -t UTF-8` does.")
    return block.removeprefix(BYTE_ORDER_MARK)


def _too_long(name: str, number: int, max_bytes: int) -> SubmissionTooLarge:
    return SubmissionTooLarge(
        f"{name}, line {number}: more than {max_bytes:,} bytes (VECTORMILL_MAX_LINE_BYTES)."
    )


# -- JSON lines -------------------------------------------------------------------------------------------------------


class WholeLines:
    """Divides the blocks of a stream into blocks of whole lines, in memory bounded by a block and the longest line.

    `num_read` is the number of whole lines so far, and `num_lines` that before those that `take` returned last, which
    `num_marked` bytes of a byte order mark preceded. A stream that `is_part` of another has no such mark.
    """

    def __init__(
        self, name: str = "the input", max_line_bytes: int = UNLIMITED, *, is_part: bool = False
    ) -> None:
        self.num_lines = 0
        self._name = name
        self._max_line_bytes = max_line_bytes
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self.num_marked = 0
        self.num_read = 0
        self._is_first = not is_part

    def take(self, block: bytes) -> bytes:
        """Return the lines that end in this block, and keep the last one if it has no end.

        Raise SubmissionTooLarge for a kept line that is too long, and InvalidItem for UTF-16.
        """
        end = block.rfind(b"\n") + 1
        if not end:
            self._keep(block)
            return b""
        whole = b"".join([*self._rest, block[:end]])
        self._rest, self._rest_bytes = [], 0
        whole = self._count(whole)
        self._keep(block[end:])
        return whole

    def end(self) -> bytes:
        """Return the last line if it has no end. Call it after the last block."""
        line = b"".join(self._rest)
        return self._count(line + b"\n") if line else b""

    def _keep(self, part: bytes) -> None:
        if part:
            self._rest.append(part)
            self._rest_bytes += len(part)
        if self._rest_bytes > self._max_line_bytes:
            raise _too_long(self._name, self.num_read + 1, self._max_line_bytes)

    def _count(self, whole: bytes) -> bytes:
        self.num_marked = 0
        if self._is_first:
            marked, self._is_first = whole, False
            whole = strip_mark(marked, self._name)
            self.num_marked = len(marked) - len(whole)
        self.num_lines = self.num_read
        self.num_read += whole.count(b"\n")
        return whole


def decode_objects(lines: bytes, num_lines: int, decoder: "msgspec.json.Decoder[T]") -> list[T] | None:
    """Decode so many lines that all end with \\n and each hold one object; return None if any is something else.

    msgspec takes a newline for any white space: it accepts two objects on one line, and one on two lines. If every line
    begins with { and ends with }, and there are as many objects as lines, each line is one object.
    """
    num_ends = lines.count(b"}\n") + lines.count(b"}\r\n")
    if not lines.startswith(b"{") or lines.count(b"\n{") != num_lines - 1 or num_ends != num_lines:
        return None
    try:
        decoded = decoder.decode_lines(lines)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return decoded if len(decoded) == num_lines else None


_ROW_DECODER: Final = msgspec.json.Decoder(dict[str, Any])


def read_json_rows(
    blocks: Iterable[bytes],
    choose: Choice,
    name: str,
    max_row_bytes: int = UNLIMITED,
    *,
    keeps_faults: bool = False,
    is_part: bool = False,
) -> Iterator[RowBatch]:
    """Yield the objects in lines of JSON; blank lines are skipped. The columns are the fields of any row so far.

    A field that a row lacks is null. A byte that is not UTF-8 becomes a lone surrogate, so that its item fails.
    Raise InvalidItem for a line that is no JSON object; with `keeps_faults` all but the first become faults.
    """
    lines = WholeLines(name, max_row_bytes, is_part=is_part)
    chosen = choose if isinstance(choose, Columns) else None
    present: dict[str, None] = {}
    position = 0
    for block in _whole_blocks(lines, blocks):
        position += lines.num_marked
        faults: dict[int, str] | None = {} if keeps_faults else None
        rows, numbers, ends = _decode_block(block, name, lines.num_lines, max_row_bytes, faults)
        if rows:
            if not isinstance(choose, Columns):
                if chosen is None and faults and 0 in faults:
                    raise InvalidItem(faults[0])
                there = present | dict.fromkeys(rows[0]) | dict.fromkeys(sorted(set().union(*rows)))
                present = there if len(there) <= MOST_NAMES else present
                found = choose(list(there), name)
                # A field of another usual name in later rows is no key.
                key = found.key if chosen is None or chosen.key is None else chosen.key
                chosen = msgspec.structs.replace(found, key=key)
            assert chosen is not None
            columns = {field: [row.get(field) for row in rows] for field in chosen.names}
            places = [position + end for end in ends]
            yield RowBatch(chosen, columns, numbers, position, places, faults=faults or {})
        position += len(block)


def _whole_blocks(lines: WholeLines, blocks: Iterable[bytes]) -> Iterator[bytes]:
    for block in blocks:
        if whole := lines.take(block):
            yield whole
    if whole := lines.end():
        yield whole


def _decode_block(
    block: bytes, name: str, num_before: int, max_row_bytes: int, faults: dict[int, str] | None
) -> tuple[Sequence[dict[str, Any]], Sequence[int], Sequence[int]]:
    """Return the objects of whole lines, their numbers, and the positions after them.

    The reasons why lines do not parse are added to `faults`, unless that is None.
    """
    lines = block[:-1].split(b"\n")
    ends = list(accumulate(len(line) + 1 for line in lines))
    rows = decode_objects(block, len(lines), _ROW_DECODER) if max(map(len, lines)) <= max_row_bytes else None
    numbers: Sequence[int] = range(num_before + 1, num_before + 1 + len(lines))
    if rows is None:
        there = [place for place, line in enumerate(lines) if line.strip()]
        rows = []
        for place in there:
            try:
                rows.append(_decode_line(lines[place], name, numbers[place], max_row_bytes))
            except InvalidItem as error:
                if faults is None:
                    raise
                faults[len(rows)] = str(error)
                rows.append({})
        numbers, ends = [numbers[place] for place in there], [ends[place] for place in there]
    return rows, numbers, ends


def _decode_line(line: bytes, name: str, number: int, max_row_bytes: int) -> dict[str, Any]:
    if len(line) > max_row_bytes:
        raise _too_long(name, number, max_row_bytes)
    place = f"{name}, line {number}"
    try:
        row = json.loads(line.decode("utf-8", "surrogateescape"))
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidItem(f"{place}: not valid JSON ({reason}{column}).") from error
    except RecursionError as error:
        raise InvalidItem(f"{place}: the JSON is nested too deeply.") from error
    if not isinstance(row, dict):
        raise InvalidItem(f'{place}: expected a JSON object such as {{"key": …, "text": …}}.')
    return row


def list_lines(whole: bytes) -> list[bytes]:
    """Return whole lines, each of which ends with \\n, without it."""
    return whole[:-1].split(b"\n") if whole else []


def split_lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream without their \\n. No other character ends a line: a key may contain U+2028."""
    for whole in _whole_blocks(WholeLines(), parts):
        yield from list_lines(whole)


def number_lines(pieces: Iterable[bytes], max_line_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number and the bytes of each non-blank line; the bytes are None for a line that is too long.

    Numbers start at 1 and count blank lines too.
    """
    number = 1
    rest: bytes | None = b""  # None for a line that is too long
    for piece in chain(pieces, (b"\n",)):
        *ends, last = piece.split(b"\n")
        for end in ends:
            line = None if rest is None or len(rest) + len(end) > max_line_bytes else rest + end
            if number == 1 and line:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line is None or line.strip():
                yield number, line
            number, rest = number + 1, b""
        rest = None if rest is None or len(rest) + len(last) > max_line_bytes else rest + last


# -- CSV and TSV ------------------------------------------------------------------------------------------------------


class _CellLines:
    """The lines of a stream as csv.reader takes them; `position` is the one after the last line that it took.

    A line ends as it does for the csv module: with \\n, \\r or \\r\\n. Raise SubmissionTooLarge for a row, which may
    have many lines within quotes, that is longer than `max_row_bytes`.
    """

    def __init__(self, blocks: Iterable[bytes], name: str, max_row_bytes: int, *, is_part: bool) -> None:
        self.position = 0
        self.row_start = 0
        self._is_part = is_part
        self._blocks = blocks
        self._name = name
        self._max_row_bytes = max_row_bytes
        self._num_lines = 0

    def __iter__(self) -> Iterator[str]:
        kept: list[bytes] = []
        is_first = not self._is_part
        for block in self._blocks:
            if is_first:
                marked, is_first = block, False
                block = strip_mark(marked, self._name)
                self.position = self.row_start = len(marked) - len(block)
            kept.append(block)
            # A \r may be the first half of the \r\n of the next block.
            if b"\n" in block or b"\r" in block or kept[0].endswith(b"\r"):
                lines = b"".join(kept).splitlines(keepends=True)
                kept = [] if lines[-1].endswith(b"\n") else [lines.pop()]
                yield from map(self._take, lines)
            self._check(sum(map(len, kept)))
        yield from map(self._take, b"".join(kept).splitlines(keepends=True))

    def _take(self, line: bytes) -> str:
        self._check(len(line))
        self._num_lines += 1
        self.position += len(line)
        return line.decode("utf-8", "surrogateescape")

    def _check(self, num_more: int) -> None:
        if self.position + num_more - self.row_start > self._max_row_bytes:
            raise _too_long(self._name, self._num_lines + 1, self._max_row_bytes)


def read_cell_rows(
    blocks: Iterable[bytes],
    choose: Choice,
    name: str,
    max_row_bytes: int = UNLIMITED,
    *,
    delimiter: str,
    header: tuple[str, ...] = (),
    keeps_faults: bool = False,
    is_part: bool = False,
) -> Iterator[RowBatch]:
    """Yield the rows of CSV or TSV as Python's csv module reads them, strictly; blank lines are skipped.

    The first row is the header unless it is given. A byte that is not UTF-8 becomes a lone surrogate, so that its item
    fails. Raise InvalidItem for what csv refuses, and for a row with more or fewer cells than the header; with
    `keeps_faults` the latter becomes a fault.
    """
    lines = _CellLines(blocks, name, max_row_bytes, is_part=is_part)
    reader = csv.reader(iter(lines), delimiter=delimiter, strict=True)
    chosen = _choose(choose, header, name) if header else None
    rows: list[list[str]] = []
    numbers: list[int] = []
    ends: list[int] = []
    faults: dict[int, str] = {}
    start = 0

    def make_batch() -> RowBatch:
        assert chosen is not None
        values = list(zip(*rows, strict=True))
        columns = {field: values[header.index(field)] for field in chosen.names}
        return RowBatch(chosen, columns, numbers, start, ends, header, faults)

    number = 1
    try:
        for cells in reader:
            lines.row_start = lines.position
            if not cells:
                pass
            elif chosen is None:
                header, start = tuple(cells), lines.position
                chosen = _choose(choose, header, name)
            else:
                if len(cells) != len(header):
                    fault = f"{name}, line {number}: the row has {len(cells)} cells, but the header has {len(header)}."
                    if not keeps_faults:
                        raise InvalidItem(fault)
                    faults[len(rows)] = fault
                    cells = cast("list[str]", [None] * len(header))
                rows.append(cells)
                numbers.append(number)
                ends.append(lines.position)
                if lines.position - start >= BLOCK_BYTES:
                    yield make_batch()
                    start = lines.position
                    rows, numbers, ends, faults = [], [], [], {}
            number = reader.line_num + 1
    except csv.Error as error:
        raise InvalidItem(f"{name}, in the row that begins at line {number}: {error}.") from error
    if rows:
        yield make_batch()
    if chosen is None:
        raise InvalidItem(f"{name} is empty; its first line should name the columns.")


def scan_rows(content: bytes, format: str, *, is_part: bool = True) -> Iterator[tuple[int, list[str]]]:
    """Yield the position after each row of a part of a file of lines, and the cells of one of CSV or TSV.

    The part may begin and end within rows. Blank lines are no rows.
    """
    if format == JSONL:
        ends = accumulate(len(line) + 1 for line in content.split(b"\n"))
        yield from (
            (min(end, len(content)), [])
            for line, end in zip(content.split(b"\n"), ends, strict=True)
            if line.strip()
        )
        return
    lines = _CellLines([content], "a sample", UNLIMITED, is_part=is_part)
    for cells in csv.reader(iter(lines), delimiter=DELIMITERS[format]):
        if cells:
            yield lines.position, cells


# -- Parquet ----------------------------------------------------------------------------------------------------------


def read_parquet_rows(file: BinaryIO, choose: Choice, name: str) -> Iterator[RowBatch]:
    """Yield the rows of a Parquet file. One batch of rows, of the chosen columns, is decoded at a time."""
    from vectormill.files.parquet import naming, open_parquet
    from vectormill.rows.arrow import list_columns

    with naming(name), open_parquet(file) as table:
        chosen = _choose(choose, table.schema_arrow.names, name)
        number = 1
        for batch in table.iter_batches(chosen.names):
            numbers = range(number, number + batch.num_rows)
            yield RowBatch(chosen, list_columns(batch, chosen.names), numbers)
            number += batch.num_rows
