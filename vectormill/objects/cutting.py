"""Cutting: divide objects into the chunks of a job, without keeping any text.

Of a Parquet file only the footer is read. A file of lines is read once from end to end, to find where its rows
begin; what is read is dropped at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Final

from vectormill.domain.errors import InvalidItem, InvalidOption
from vectormill.files.formats import PACKED
from vectormill.jobs.chunk import TokenEstimate
from vectormill.objects.reference import ItemReference, open_parquet
from vectormill.objects.store import StoredObject, read_stream
from vectormill.rows.columns import Columns
from vectormill.rows.decoding import PARQUET, read_lines_of
from vectormill.rows.inputs import find_format
from vectormill.rows.values import encode_texts, join_pairs

PART_BYTES: Final = 8 << 20


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
    chosen = format or find_format(found.url)
    if suffix in PACKED:
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
    found: StoredObject, format: str, columns: Columns, estimate: TokenEstimate, limits: ChunkLimits
) -> Iterator[Cut]:
    """Yield the rows of an object in order.

    Raise InvalidOption if a column is missing, InvalidItem if a row is too long, and the errors of store.py.
    """
    if format == PARQUET:
        return _cut_parquet(found, columns, estimate)
    return _cut_lines(found, format, columns, estimate, limits)


def _cut_parquet(found: StoredObject, columns: Columns, estimate: TokenEstimate) -> Iterator[Cut]:
    texts = {columns.text, columns.text_pair}
    with open_parquet(found) as file:
        _find_columns(columns, file.schema_arrow.names, found.url)
        for number, num_rows in enumerate(file.group_rows):
            if not num_rows:
                continue
            sizes = dict.fromkeys(columns.names, 0.0)
            for path, num_bytes in file.measure_columns(number):
                for name in sizes:
                    if f"{path}.".startswith(f"{name}."):
                        sizes[name] += num_bytes / num_rows
            reference = ItemReference(
                found.url, found.tag, found.num_bytes, PARQUET, columns, num_rows, row_group=number
            )
            text_bytes = sum(size for name, size in sizes.items() if name in texts)
            yield Cut(reference, estimate.of(b"a" * min(round(text_bytes), PART_BYTES)), sum(sizes.values()))


def _find_columns(columns: Columns, present: Sequence[str], place: str) -> Columns:
    try:
        return columns.find(present, place)
    except InvalidItem as error:
        raise InvalidOption(str(error)) from error


def _cut_lines(
    found: StoredObject, format: str, columns: Columns, estimate: TokenEstimate, limits: ChunkLimits
) -> Iterator[Cut]:
    """Yield runs of whole rows of about one chunk each, at the places where their decoder ends its rows."""
    start, first_row, num_rows, num_bytes, num_tokens = 0, 0, 0, 0, 0
    header: tuple[str, ...] = ()
    end = 0

    def make_cut() -> Cut:
        reference = ItemReference(
            found.url, found.tag, found.num_bytes, format, columns, num_rows,
            start=start, end=min(end, found.num_bytes), first_row=first_row, header=header,
        )  # fmt: skip
        return Cut(reference, num_tokens / num_rows, num_bytes / num_rows)

    blocks = read_stream(found.url, found.tag, PART_BYTES)
    choose = partial(_find_columns, columns)
    for batch in read_lines_of(format)(blocks, choose, found.url, limits.max_row_bytes, keeps_faults=True):
        _, texts, _, pairs = columns.pick(batch.columns)
        header, begin = batch.header, batch.start
        encoded = encode_texts(texts) if pairs is None else join_pairs(encode_texts(texts), pairs)
        for place, end in enumerate(batch.ends):
            start = start if num_rows else begin
            num_rows += 1
            num_bytes += end - begin
            num_tokens += estimate.of(encoded[place])
            begin = end
            if num_rows >= limits.max_items or num_bytes >= limits.max_bytes:
                yield make_cut()
                first_row += num_rows
                num_rows = num_bytes = num_tokens = 0
    if num_rows:
        yield make_cut()
