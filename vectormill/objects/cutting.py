"""Cutting: divide objects into the chunks of a job, without keeping any text.

Of a Parquet file only the footer is read. A file of lines is read once from end to end, to find where its rows
begin; what is read is dropped at once.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from vectormill.domain.errors import InvalidItem, InvalidOption
from vectormill.files.formats import INPUT_FORMATS, by_suffix
from vectormill.jobs.chunk import TokenEstimate
from vectormill.objects.reference import (
    DELIMITERS,
    JSONL,
    PARQUET,
    ItemColumns,
    ItemReference,
    open_parquet,
    read_cells,
    split_rows,
)
from vectormill.objects.store import StoredObject, read_stream

PART_BYTES: Final = 8 << 20
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_FORMAT_OF_SUFFIX: Final = by_suffix(INPUT_FORMATS)


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """The most items and bytes of a chunk, and the most bytes of a row."""

    max_items: int
    max_bytes: int
    max_row_bytes: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows for one chunk or more, about as long as one another."""

    reference: ItemReference
    tokens_per_row: float
    bytes_per_row: float


def choose_format(found: StoredObject, format: str | None) -> str:
    """Return the format of an object, by its name unless it is given. Raise InvalidOption if it has none."""
    name = PurePosixPath(found.url)
    suffix = name.suffix.lower()
    chosen = format or _FORMAT_OF_SUFFIX.get(suffix)
    if suffix in (".gz", ".zst"):
        raise InvalidOption(
            f"{found.url} is compressed as a whole, so that no part of it can be read alone. Use Parquet, which "
            "compresses inside, or submit the file itself."
        )
    if chosen is None:
        raise InvalidOption(
            f"{found.url} has no known format: give the format, or a name that ends in .parquet, .jsonl, .csv or .tsv."
        )
    return chosen


def cut_object(
    found: StoredObject, format: str, columns: ItemColumns, estimate: TokenEstimate, limits: ChunkLimits
) -> Iterator[Cut]:
    """Yield the rows of an object in order.

    Raise InvalidOption if a column is missing, InvalidItem if a row is too long, and the errors of store.py.
    """
    if format == PARQUET:
        return _cut_parquet(found, columns, estimate)
    return _cut_lines(found, format, columns, estimate, limits)


def _refuse_missing(found: StoredObject, names: Iterable[str], columns: ItemColumns) -> None:
    known = list(names)
    for name in columns.names:
        if name not in known:
            raise InvalidOption(
                f"{found.url} has no column {name!r}; its columns are {', '.join(known[:20]) or 'none'}."
            )


def _cut_parquet(found: StoredObject, columns: ItemColumns, estimate: TokenEstimate) -> Iterator[Cut]:
    texts = {columns.text, columns.text_pair}
    with open_parquet(found) as file:
        _refuse_missing(found, file.schema_arrow.names, columns)
        _refuse_nested(found, file.schema_arrow, columns)
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            if not group.num_rows:
                continue
            chunks = (group.column(place) for place in range(group.num_columns))
            num_bytes = sum(each.total_uncompressed_size for each in chunks if each.path_in_schema in texts)
            mean = num_bytes / group.num_rows
            reference = ItemReference(
                found.url, found.tag, found.num_bytes, PARQUET, columns, group.num_rows, row_group=number
            )
            yield Cut(reference, estimate.of(b"a" * min(round(mean), PART_BYTES)), mean)


def _refuse_nested(found: StoredObject, schema: Any, columns: ItemColumns) -> None:
    import pyarrow

    for name in (columns.text, columns.text_pair):
        if name is None:
            continue
        kind = schema.field(name).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not (
            pyarrow.types.is_string(kind)
            or pyarrow.types.is_large_string(kind)
            or pyarrow.types.is_string_view(kind)
        ):
            raise InvalidOption(
                f"The column {name!r} of {found.url} is of type {kind}; texts must be strings."
            )


def _cut_lines(
    found: StoredObject, format: str, columns: ItemColumns, estimate: TokenEstimate, limits: ChunkLimits
) -> Iterator[Cut]:
    """Yield runs of whole rows of about one chunk each."""
    header: tuple[str, ...] = ()
    has_header = format not in DELIMITERS
    rest, offset, first_row = b"", 0, 0
    start, num_rows, num_bytes, num_tokens = 0, 0, 0, 0

    def make_cut(end: int) -> Cut:
        reference = ItemReference(
            found.url, found.tag, found.num_bytes, format, columns, num_rows,
            start=start, end=end, first_row=first_row, header=header,
        )  # fmt: skip
        return Cut(reference, num_tokens / num_rows, num_bytes / num_rows)

    for content, is_last in _mark_last(read_stream(found.url, found.tag, PART_BYTES)):
        block = rest + content
        if offset == 0 and block.startswith(BYTE_ORDER_MARK):
            block, offset, start = block[3:], 3, 3
        taken = 0
        for position, row in split_rows(block, format):
            if position == len(block) and not is_last:
                break  # the row may go on in the next block
            taken = position
            if not has_header:
                header, has_header = tuple(read_cells(row, format)), True
                _refuse_missing(found, header, columns)
                start = offset + position
                continue
            if format == JSONL and first_row == num_rows == 0:
                _refuse_first_line(found, row, columns)
            num_rows += 1
            num_bytes += len(row)
            num_tokens += estimate.of(row)
            if num_rows >= limits.max_items or num_bytes >= limits.max_bytes:
                yield make_cut(offset + position)
                start, first_row = offset + position, first_row + num_rows
                num_rows = num_bytes = num_tokens = 0
        rest = block[taken:]
        offset += taken
        if len(rest) > limits.max_row_bytes:
            raise InvalidItem(
                f"{found.url}: the row at byte {offset:,} is longer than {limits.max_row_bytes:,} bytes."
            )
    if num_rows:
        yield make_cut(found.num_bytes)


def _mark_last(parts: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield each part, and whether it is the last one."""
    before: bytes | None = None
    for part in parts:
        if before is not None:
            yield before, False
        before = part
    if before is not None:
        yield before, True


def _refuse_first_line(found: StoredObject, row: bytes, columns: ItemColumns) -> None:
    import json

    try:
        value = json.loads(row)
    except ValueError as error:
        raise InvalidOption(
            f"{found.url} is not JSON Lines: its first line is not JSON ({error})."
        ) from error
    if not isinstance(value, dict):
        raise InvalidOption(f"{found.url}: the first line is not a JSON object.")
    _refuse_missing(found, value, columns)
