"""Record streams: a job's records as NDJSON or Parquet, a block at a time, in constant memory."""

from collections.abc import Generator
from contextlib import closing
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from api.streams.vector_streams import PIECE_BYTES, PieceSink, ResultFormat
from vectormill.files.formats import OUTPUT_FORMATS, RowsName
from vectormill.jobs.export import RecordBlock
from vectormill.jobs.job import Job

Blocks = Generator[RecordBlock, None, None]
Pieces = Generator[bytes, None, None]

SCHEMA: Final = pa.schema(
    [pa.field("key", pa.string(), nullable=False), pa.field("output", pa.string(), nullable=False)]
)

# The size of a row group, uncompressed: a million short records have some 30 of them.
GROUP_BYTES: Final = 8 << 20
ROW_BYTES: Final = 100  # of the objects that hold a row


def write_ndjson(job: Job, blocks: Blocks) -> Pieces:
    """One object a line; items without a record are left out."""
    with closing(blocks):
        for block in blocks:
            piece: list[bytes] = []
            num_bytes = 0
            for key, record in zip(block.keys, block.records, strict=True):
                if record is None:
                    continue
                piece += (b'{"key":', msgspec.json.encode(key), b',"output":', record, b"}\n")
                num_bytes += len(record)
                if num_bytes >= PIECE_BYTES:
                    yield b"".join(piece)
                    piece, num_bytes = [], 0
            if piece:
                yield b"".join(piece)


def write_parquet(job: Job, blocks: Blocks) -> Pieces:
    """Columns key and output, which is JSON; items without a record are left out."""
    sink = PieceSink()
    writer = pq.ParquetWriter(pa.PythonFile(sink, mode="w"), SCHEMA, compression="zstd")
    with closing(blocks), writer:
        for keys, records in _gather(blocks):
            columns = [pa.array(keys, pa.string()), pa.array(records, pa.binary()).cast(pa.string())]
            writer.write_table(pa.table(columns, schema=SCHEMA))
            yield sink.take()
        writer.close()
        yield sink.take()


def _gather(blocks: Blocks) -> Generator[tuple[list[str], list[bytes]], None, None]:
    """Some blocks at a time: the footer names every row group, and is in memory until the end."""
    keys: list[str] = []
    records: list[bytes] = []
    num_bytes = 0
    for block in blocks:
        for key, record in zip(block.keys, block.records, strict=True):
            if record is None:
                continue
            keys.append(key)
            records.append(record)
            num_bytes += len(key) + len(record) + ROW_BYTES
        if num_bytes >= GROUP_BYTES:
            yield keys, records
            keys, records, num_bytes = [], [], 0
    if keys:
        yield keys, records


RECORD_FORMATS: Final[dict[RowsName, ResultFormat]] = {
    "ndjson": ResultFormat(OUTPUT_FORMATS["ndjson"], write_ndjson),
    "parquet": ResultFormat(OUTPUT_FORMATS["parquet"], write_parquet),
}
