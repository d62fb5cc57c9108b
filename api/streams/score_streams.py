"""Score streams: a job's scores as NDJSON or Parquet, a block at a time, in constant memory."""

from collections.abc import Generator
from contextlib import closing
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from api.streams.result_columns import RESULT_COLUMNS
from api.streams.vector_streams import PieceSink, ResultFormat
from vectormill.domain.task import SCORE
from vectormill.files.formats import OUTPUT_FORMATS, RowsName
from vectormill.jobs.export import VectorBlock
from vectormill.jobs.job import Job
from vectormill.vectors.scores import Numbers, describe_scores

Blocks = Generator[VectorBlock, None, None]
Pieces = Generator[bytes, None, None]

ROWS_PER_GROUP: Final = 1 << 16


def write_ndjson(job: Job, blocks: Blocks) -> Pieces:
    """One object a line; items without a score are left out."""
    with closing(blocks):
        for block in blocks:
            keys, numbers = _present(block)
            if keys:
                lines = describe_scores(keys, numbers, job.spec.labels)
                yield b"\n".join([*map(msgspec.json.encode, lines), b""])


def write_parquet(job: Job, blocks: Blocks) -> Pieces:
    """Columns key, score, label and probabilities (a field a label); items without a score are left out."""
    columns = RESULT_COLUMNS[SCORE]
    schema = pa.schema([pa.field("key", pa.string(), nullable=False), *columns.fields(job.spec)])
    sink = PieceSink()
    writer = pq.ParquetWriter(pa.PythonFile(sink, mode="w"), schema, compression="zstd")
    with closing(blocks), writer:
        for keys, numbers in _gather(blocks):
            arrays = [pa.array(keys, pa.string()), *columns.arrays(numbers, job.spec)]
            writer.write_table(pa.table(arrays, schema=schema))
            yield sink.take()
        writer.close()
        yield sink.take()


def _gather(blocks: Blocks) -> Generator[tuple[list[str], Numbers], None, None]:
    """Some blocks at a time: a row group for each would be many small ones."""
    keys: list[str] = []
    parts: list[Numbers] = []
    for block in blocks:
        own, numbers = _present(block)
        keys += own
        parts.append(numbers)
        if len(keys) >= ROWS_PER_GROUP:
            yield keys, np.concatenate(parts)
            keys, parts = [], []
    if keys:
        yield keys, np.concatenate(parts)


def _present(block: VectorBlock) -> tuple[list[str], Numbers]:
    keys = [key for key, is_present in zip(block.keys, block.present, strict=True) if is_present]
    return keys, block.vectors[block.present].astype(np.float32, copy=False)


SCORE_FORMATS: Final[dict[RowsName, ResultFormat]] = {
    "ndjson": ResultFormat(OUTPUT_FORMATS["ndjson"], write_ndjson),
    "parquet": ResultFormat(OUTPUT_FORMATS["parquet"], write_parquet),
}
