"""Result streams: write a job's results as NDJSON or Parquet, block by block, in constant memory.

These are scores, records and representations; vectors have streams of their own.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Engine

from api.streams.result_columns import RESULT_COLUMNS
from api.streams.vector_streams import PIECE_BYTES, Pieces, PieceSink, ResultFormat
from vectormill.collections.row_kinds import take_objects
from vectormill.domain.task import RECORD, REPRESENTATIONS, SCORE
from vectormill.files.formats import OUTPUT_FORMATS, RowsName
from vectormill.files.result_tables import RESULT_TABLES
from vectormill.jobs.export import RecordBlock, VectorBlock, read_job_records, read_vectors
from vectormill.jobs.job import Job
from vectormill.vectors.scores import Numbers, describe_scores

ScoreBlocks = Generator[VectorBlock, None, None]

ROWS_PER_GROUP: Final = 1 << 16


def write_score_lines(job: Job, blocks: ScoreBlocks) -> Pieces:
    """Yield NDJSON with an object per item; items without a score are left out."""
    with closing(blocks):
        for block in blocks:
            keys, numbers = _select_scores(block)
            if keys:
                lines = describe_scores(keys, numbers, job.spec.labels)
                yield b"\n".join([*map(msgspec.json.encode, lines), b""])


def write_score_table(job: Job, blocks: ScoreBlocks) -> Pieces:
    """Yield a Parquet file with key, score, label and probabilities (one field per label), without failed items."""
    table = RESULT_TABLES[SCORE]
    schema = pa.schema([pa.field("key", pa.string(), nullable=False), *table.fields(job.spec)])
    sink = PieceSink()
    writer = pq.ParquetWriter(pa.PythonFile(sink, mode="w"), schema, compression="zstd")
    with closing(blocks), writer:
        for keys, numbers in _gather_scores(blocks):
            arrays = [pa.array(keys, pa.string()), *table.arrays(numbers, job.spec)]
            writer.write_table(pa.table(arrays, schema=schema))
            yield sink.take()
        writer.close()
        yield sink.take()


def _gather_scores(blocks: ScoreBlocks) -> Generator[tuple[list[str], Numbers], None, None]:
    """Yield keys and numbers of several blocks at a time, since a row group per block would be too small."""
    keys: list[str] = []
    parts: list[Numbers] = []
    for block in blocks:
        own, numbers = _select_scores(block)
        keys += own
        parts.append(numbers)
        if len(keys) >= ROWS_PER_GROUP:
            yield keys, np.concatenate(parts)
            keys, parts = [], []
    if keys:
        yield keys, np.concatenate(parts)


def _select_scores(block: VectorBlock) -> tuple[list[str], Numbers]:
    keys = [key for key, is_present in zip(block.keys, block.present, strict=True) if is_present]
    return keys, block.vectors[block.present].astype(np.float32, copy=False)


SCORE_FORMATS: Final[dict[RowsName, ResultFormat]] = {
    "ndjson": ResultFormat(OUTPUT_FORMATS["ndjson"], write_score_lines),
    "parquet": ResultFormat(OUTPUT_FORMATS["parquet"], write_score_table),
}


RecordBlocks = Generator[RecordBlock, None, None]

# The uncompressed size of a row group; a million short records have some 30 groups.
GROUP_BYTES: Final = 8 << 20
ROW_BYTES: Final = 100  # the memory of a row's Python objects


def write_record_lines(job: Job, blocks: RecordBlocks) -> Pieces:
    """Yield NDJSON with an object per item, its records or representations; items without any are left out."""
    columns = RESULT_COLUMNS[job.spec.result]
    with closing(blocks):
        for block in blocks:
            piece: list[bytes | memoryview] = []
            num_bytes = 0
            for key, record in zip(block.keys, block.records, strict=True):
                if record is None:
                    continue
                (fields,) = columns.write(take_objects([record]), job.spec)
                piece += (b'{"key":', msgspec.json.encode(key), *fields, b"}\n")
                num_bytes += sum(map(len, fields))
                if num_bytes >= PIECE_BYTES:
                    yield b"".join(piece)
                    piece, num_bytes = [], 0
            if piece:
                yield b"".join(piece)


def write_record_table(job: Job, blocks: RecordBlocks) -> Pieces:
    """Yield a Parquet file with the key and the columns of the results; items without any are left out."""
    table = RESULT_TABLES[job.spec.result]
    schema = pa.schema([pa.field("key", pa.string(), nullable=False), *table.fields(job.spec)])
    compression = {field.name: "zstd" for field in schema} | dict(table.compression)
    sink = PieceSink()
    writer = pq.ParquetWriter(pa.PythonFile(sink, mode="w"), schema, compression=compression)
    with closing(blocks), writer:
        for keys, records in _gather_records(blocks):
            arrays = [pa.array(keys, pa.string()), *table.arrays(take_objects(records), job.spec)]
            writer.write_table(pa.table(arrays, schema=schema))
            yield sink.take()
        writer.close()
        yield sink.take()


def _gather_records(blocks: RecordBlocks) -> Generator[tuple[list[str], list[bytes]], None, None]:
    """Yield keys and records of several blocks at a time: each row group lengthens the footer, which is in memory."""
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
    "ndjson": ResultFormat(OUTPUT_FORMATS["ndjson"], write_record_lines),
    "parquet": ResultFormat(OUTPUT_FORMATS["parquet"], write_record_table),
}


@dataclass(frozen=True, slots=True)
class ResultStream:
    """The export of one kind of results: `read` yields a job's results in blocks, and `formats` are their writers."""

    read: Callable[[Engine, UUID, str | None], Iterator[Any]]
    formats: Mapping[RowsName, ResultFormat]


RESULT_STREAMS: Final[Mapping[str, ResultStream]] = {
    SCORE: ResultStream(read_vectors, SCORE_FORMATS),
    RECORD: ResultStream(read_job_records, RECORD_FORMATS),
    REPRESENTATIONS: ResultStream(read_job_records, RECORD_FORMATS),
}
