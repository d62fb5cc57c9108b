"""Record streams: a job's records as NDJSON or Parquet, a block at a time, in constant memory."""

from collections.abc import Generator
from contextlib import closing
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from api.streams.vector_streams import PieceSink, ResultFormat
from vectormill.db.jobs.export import RecordBlock
from vectormill.domain.jobs.job import Job
from vectormill.files.formats import OUTPUT_FORMATS, RowsName

Blocks = Generator[RecordBlock, None, None]
Pieces = Generator[bytes, None, None]

SCHEMA: Final = pa.schema(
    [pa.field("key", pa.string(), nullable=False), pa.field("output", pa.string(), nullable=False)]
)


def write_ndjson(job: Job, blocks: Blocks) -> Pieces:
    """One object a line; items without a record are left out."""
    with closing(blocks):
        for block in blocks:
            lines = [
                b'{"key":' + msgspec.json.encode(key) + b',"output":' + record + b"}\n"
                for key, record in zip(block.keys, block.records, strict=True)
                if record is not None
            ]
            if lines:
                yield b"".join(lines)


def write_parquet(job: Job, blocks: Blocks) -> Pieces:
    """Columns key and output, which is JSON; items without a record are left out. A row group is a chunk."""
    sink = PieceSink()
    writer = pq.ParquetWriter(pa.PythonFile(sink, mode="w"), SCHEMA, compression="zstd")
    with closing(blocks), writer:
        for block in blocks:
            rows = [
                (key, record.decode())
                for key, record in zip(block.keys, block.records, strict=True)
                if record is not None
            ]
            columns = [pa.array([row[place] for row in rows], pa.string()) for place in (0, 1)]
            writer.write_table(pa.table(columns, schema=SCHEMA))
            yield sink.take()
        writer.close()
        yield sink.take()


RECORD_FORMATS: Final[dict[RowsName, ResultFormat]] = {
    "ndjson": ResultFormat(OUTPUT_FORMATS["ndjson"], write_ndjson),
    "parquet": ResultFormat(OUTPUT_FORMATS["parquet"], write_parquet),
}
