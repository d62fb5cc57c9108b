"""Collection streams: a collection's rows as NDJSON or Parquet, a page at a time, in constant memory."""

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from api.streams.vector_streams import NUMBER_FORMATS, PIECE_BYTES, Pieces, PieceSink
from vectormill.db.rows.collection_rows import Inclusion, RowPage
from vectormill.domain.encoding import FLOAT32, EncodingSpec
from vectormill.vectors.vector_types import VECTOR_TYPE_BY_NAME

Pages = Generator[RowPage, None, None]


def write_ndjson(spec: EncodingSpec, inclusion: Inclusion, pages: Pages) -> Pieces:
    """One object a line, `{"key", "embedding", "metadata", "text"}` of what is wanted; the last line's key resumes."""
    with closing(pages):
        for page in pages:
            num_rows = len(page.keys)
            num_bytes = 1
            if page.vectors is not None:
                num_bytes = NUMBER_FORMATS[page.vectors.dtype].slot_bytes * page.vectors.shape[1]
            rows_per_piece = max(1, PIECE_BYTES // num_bytes)
            for start in range(0, num_rows, rows_per_piece):
                yield write_lines(page, inclusion, start, min(num_rows, start + rows_per_piece))


def write_lines(page: RowPage, inclusion: Inclusion, start: int, end: int) -> bytes:
    parts: list[bytes | memoryview] = []
    written = None
    if page.vectors is not None:
        written = NUMBER_FORMATS[page.vectors.dtype].write(page.vectors[start:end])
    for place in range(start, end):
        parts += (b'{"key":', msgspec.json.encode(page.keys[place]))
        if written is not None:
            parts += (b',"embedding":[', written[place - start].data)
        if inclusion.metadata:
            metadata = page.metadata[place]
            parts += (b',"metadata":', b"null" if metadata is None else metadata.encode())
        if inclusion.text:
            parts += (b',"text":', msgspec.json.encode(page.texts[place]))
        parts.append(b"}\n")
    return b"".join(parts)


def write_parquet(spec: EncodingSpec, inclusion: Inclusion, pages: Pages) -> Pieces:
    """Columns key, embedding (fixed_size_list), metadata (JSON as string) and text, of those that are wanted."""
    # As in the export of a job: the type asked for, else float32, whatever the collection keeps.
    kind = VECTOR_TYPE_BY_NAME[spec.vector_type or FLOAT32]
    number = np.dtype(kind.row)
    embedding_type = pa.list_(NUMBER_FORMATS[number].arrow, kind.width(spec.dimensions))
    fields = [pa.field("key", pa.string(), nullable=False)]
    compression: dict[str, str] = {"key": "zstd"}
    if inclusion.vector:
        fields.append(pa.field("embedding", embedding_type))
        compression["embedding.list.element"] = "none"  # as good as random
    for name, is_wanted in (("metadata", inclusion.metadata), ("text", inclusion.text)):
        if is_wanted:
            fields.append(pa.field(name, pa.string()))
            compression[name] = "zstd"
    schema = pa.schema(fields)
    sink = PieceSink()
    writer = pq.ParquetWriter(
        pa.PythonFile(sink, mode="w"),
        schema,
        compression=compression,
        use_dictionary=False,
        write_statistics=False,
    )
    with closing(pages), writer:
        # A page is a row group. Larger ones are in memory several times over; smaller ones make a longer footer, which
        # waits until the end: 8,000 pages of ten million rows take 25 MiB of it.
        for page in pages:
            writer.write_table(_make_table(page, inclusion, number, embedding_type, schema))
            yield sink.take()
        writer.close()
        yield sink.take()


def _make_table(
    page: RowPage,
    inclusion: Inclusion,
    number: "np.dtype[Any]",
    embedding_type: pa.DataType,
    schema: pa.Schema,
) -> pa.Table:
    columns: list[Any] = [pa.array(page.keys, pa.string())]
    if page.vectors is not None:
        values = pa.array(page.vectors.astype(number, copy=False).reshape(-1))
        columns.append(pa.FixedSizeListArray.from_arrays(values, type=embedding_type))
    if inclusion.metadata:
        columns.append(pa.array(page.metadata, pa.string()))
    if inclusion.text:
        columns.append(pa.array(page.texts, pa.string()))
    return pa.table(columns, schema=schema)


# How each format that has keys is written.
ROW_FORMATS: Final[dict[str, Callable[[EncodingSpec, Inclusion, Pages], Pieces]]] = {
    "ndjson": write_ndjson,
    "parquet": write_parquet,
}
