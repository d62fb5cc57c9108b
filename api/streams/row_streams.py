"""Row streams: write rows of a collection or of a job as NDJSON or Parquet, page by page, in constant memory."""

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, Final

import msgspec
import pyarrow as pa

from api.streams.result_columns import Parts, measure, write_results
from api.streams.vector_streams import PIECE_BYTES, Pieces, write_groups
from vectormill.collections.exports import Inclusion, RowPage
from vectormill.collections.row_kinds import choose_kind
from vectormill.domain.encoding import EncodingSpec
from vectormill.files.result_tables import RESULT_TABLES, UNCOMPRESSED

Pages = Generator[RowPage, None, None]


def write_ndjson(spec: EncodingSpec, inclusion: Inclusion, pages: Pages) -> Pieces:
    """Yield NDJSON with an object per row: the key and the included result, metadata and text.

    A client whose download breaks off resumes after the key of the last line.
    """
    with closing(pages):
        for page in pages:
            num_rows = len(page.keys)
            num_bytes = 1 if page.results is None else measure(page.results, spec)
            rows_per_piece = max(1, PIECE_BYTES // num_bytes)
            for start in range(0, num_rows, rows_per_piece):
                yield write_lines(spec, page, inclusion, start, min(num_rows, start + rows_per_piece))


def write_lines(spec: EncodingSpec, page: RowPage, inclusion: Inclusion, start: int, end: int) -> bytes:
    parts: Parts = []
    written = None if page.results is None else write_results(page.results[start:end], spec)
    for place in range(start, end):
        parts += (b'{"key":', msgspec.json.encode(page.keys[place]))
        if written is not None:
            parts += written[place - start]
        if inclusion.metadata:
            metadata = page.metadata[place]
            parts += (b',"metadata":', b"null" if metadata is None else metadata.encode())
        if inclusion.text:
            for name, texts in page.texts.items():
                parts += (b',"%b":' % name.encode(), msgspec.json.encode(texts[place]))
        parts.append(b"}\n")
    return b"".join(parts)


def write_parquet(spec: EncodingSpec, inclusion: Inclusion, pages: Pages) -> Pieces:
    """Yield a Parquet file with the key and the included columns of result, metadata (a JSON string) and text."""
    fields = [pa.field("key", pa.string(), nullable=False)]
    if inclusion.result:
        fields += RESULT_TABLES[spec.result].fields(spec)
    if inclusion.metadata:
        fields.append(pa.field("metadata", pa.string()))
    if inclusion.text:
        fields += [pa.field(name, pa.string()) for name in choose_kind(spec).text_columns]
    schema = pa.schema(fields)
    compression = {field.name: "zstd" for field in fields} | UNCOMPRESSED
    # Each page is a row group. Larger groups need several times the memory; smaller ones lengthen the footer, which is
    # in memory until the end: 25 MiB for the 8,000 pages of ten million rows. Components of unit vectors are nearly
    # random: dictionaries and statistics are of no use.
    groups = (_make_columns(page, spec, inclusion) for page in pages)
    return write_groups(
        schema, pages, groups, compression=compression, use_dictionary=False, write_statistics=False
    )


def _make_columns(page: RowPage, spec: EncodingSpec, inclusion: Inclusion) -> list[Any]:
    columns: list[Any] = [pa.array(page.keys, pa.string())]
    if page.results is not None:
        columns += RESULT_TABLES[spec.result].arrays(page.results, spec)
    if inclusion.metadata:
        columns.append(pa.array(page.metadata, pa.string()))
    if inclusion.text:
        columns += [pa.array(texts, pa.string()) for texts in page.texts.values()]
    return columns


# The writers of the formats that have keys.
ROW_FORMATS: Final[dict[str, Callable[[EncodingSpec, Inclusion, Pages], Pieces]]] = {
    "ndjson": write_ndjson,
    "parquet": write_parquet,
}
