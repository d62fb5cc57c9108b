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
from sqlalchemy import Engine

from api.streams.result_columns import RESULT_COLUMNS
from api.streams.vector_streams import (
    PIECE_BYTES,
    Pieces,
    ResultFormat,
    gather_rows,
    select_present,
    write_keyed,
)
from vectormill.collections.row_kinds import take_objects
from vectormill.domain.task import RECORD, REPRESENTATIONS, SCORE
from vectormill.files.formats import OUTPUT_FORMATS, RowsName
from vectormill.jobs.export import RecordBlock, VectorBlock, read_job_records, read_vectors
from vectormill.jobs.job import Job
from vectormill.vectors.scores import describe_scores

ScoreBlocks = Generator[VectorBlock, None, None]

ROWS_PER_GROUP: Final = 1 << 16  # since a row group per block would be too small


def write_score_lines(job: Job, blocks: ScoreBlocks) -> Pieces:
    """Yield NDJSON with an object per item; items without a score are left out."""
    with closing(blocks):
        for block in blocks:
            keys, numbers = select_present(block)
            if keys:
                lines = describe_scores(keys, numbers.astype(np.float32, copy=False), job.spec.labels)
                yield b"\n".join([*map(msgspec.json.encode, lines), b""])


def write_score_table(job: Job, blocks: ScoreBlocks) -> Pieces:
    """Yield a Parquet file with key, score, label and probabilities (one field per label), without failed items."""
    groups = gather_rows(blocks, ROWS_PER_GROUP, np.dtype(np.float32))
    return write_keyed(job, blocks, groups, compression="zstd")


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
    groups = ((keys, take_objects(records)) for keys, records in _gather_records(blocks))
    return write_keyed(job, blocks, groups)


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
