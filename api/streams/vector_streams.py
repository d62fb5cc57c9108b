"""Vector streams: write a job's vectors as NDJSON, Parquet or .npy, block by block, in constant memory."""

import asyncio
import io
import math
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from anyio import CancelScope
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api.streams.decimal_tables import HALF_SLOT_BYTES, WHOLE_SLOT_BYTES, write_halves, write_wholes
from vectormill.domain.encoding import FLOAT32
from vectormill.files.formats import OUTPUT_FORMATS, OutputFormat
from vectormill.files.result_tables import RESULT_TABLES
from vectormill.jobs.export import VectorBlock
from vectormill.jobs.job import Job
from vectormill.vectors.decimals import SLOT_BYTES, write_decimals
from vectormill.vectors.vector_types import VECTOR_TYPE_BY_NAME, Rows, VectorType

if TYPE_CHECKING:
    from typing_extensions import Buffer

Block = TypeVar("Block")
Blocks = Generator[VectorBlock, None, None]
Pieces = Generator[bytes, None, None]

# A call in a thread costs as much as formatting ten rows. Larger pieces cost more, since their memory is returned to
# the system and allocated again each time, at three page faults per row.
PIECE_BYTES: Final = 256 << 10
# Memory of the Parquet writer: the copies of a row group between Postgres and the socket, and the bytes of the footer
# per row group, which are kept until the end.
GROUP_COPIES: Final = 9
FOOTER_BYTES: Final = 1200
SMALLEST_GROUP_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """The JSON form of one number type: `write` formats [n, d] as characters [n, d × slot_bytes], rows ended by "]"."""

    slot_bytes: int
    write: Callable[[Any], npt.NDArray[np.uint8]]


NUMBER_FORMATS: Final = {
    np.dtype(np.float32): NumberFormat(SLOT_BYTES, write_decimals),
    np.dtype(np.float16): NumberFormat(HALF_SLOT_BYTES, write_halves),
    np.dtype(np.int8): NumberFormat(WHOLE_SLOT_BYTES, write_wholes),
    np.dtype(np.uint8): NumberFormat(WHOLE_SLOT_BYTES, write_wholes),
}


def delivered_type(job: Job) -> VectorType:
    """Return the number type of a job's binary export: the requested one, else float32, whatever a collection keeps."""
    return VECTOR_TYPE_BY_NAME[job.spec.vector_type or FLOAT32]


def write_ndjson(job: Job, blocks: Blocks) -> Pieces:
    """Yield NDJSON with an object per item; items without a vector are left out."""
    with closing(blocks):
        for block in blocks:
            keys, rows = select_present(block)
            num_bytes = NUMBER_FORMATS[rows.dtype].slot_bytes * rows.shape[1]
            rows_per_piece = max(1, PIECE_BYTES // num_bytes)
            for start in range(0, len(keys), rows_per_piece):
                end = start + rows_per_piece
                yield write_lines(keys[start:end], rows[start:end])


def select_present(block: VectorBlock) -> tuple[list[str], Rows]:
    """Return the keys and results of the items that have one."""
    keys = [key for key, is_present in zip(block.keys, block.present, strict=True) if is_present]
    return keys, block.vectors[block.present]


def write_lines(keys: list[str], rows: Rows) -> bytes:
    """Return lines of NDJSON, one per key; `rows` is [len(keys), width]."""
    parts: list[bytes | memoryview] = []
    for key, row in zip(keys, NUMBER_FORMATS[rows.dtype].write(rows), strict=True):
        parts += (b'{"key":', msgspec.json.encode(key), b',"embedding":[', row.data, b"}\n")
    return b"".join(parts)


def write_npy(job: Job, blocks: Blocks) -> Pieces:
    """Yield a .npy file [num_items, width] in the order of submission.

    The row of an item without a vector is NaN, or zeros for integer types.
    """
    kind = delivered_type(job)
    with closing(blocks):
        yield npy_header(job)
        for block in blocks:
            yield block.vectors.astype(kind.row).tobytes()


def npy_header(job: Job) -> bytes:
    header = io.BytesIO()
    kind = delivered_type(job)
    values = {
        "descr": np.dtype(kind.row).str,
        "fortran_order": False,
        "shape": (job.num_items, kind.width(job.spec.dimensions)),
    }
    np.lib.format.write_array_header_1_0(header, values)
    return header.getvalue()


def measure_npy(job: Job) -> int:
    """Return the size of a job's .npy export in bytes."""
    kind = delivered_type(job)
    return len(npy_header(job)) + np.dtype(kind.row).itemsize * job.num_items * kind.width(
        job.spec.dimensions
    )


class PieceSink(io.RawIOBase):
    """A write-only file for pyarrow that keeps written bytes in memory until `take` returns them."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, part: "Buffer") -> int:
        copied = bytes(part)
        self._parts.append(copied)
        return len(copied)

    def take(self) -> bytes:
        piece = b"".join(self._parts)
        self._parts.clear()
        return piece


def write_groups(
    schema: pa.Schema, blocks: Generator[Any, None, None], groups: Iterable[list[Any]], **options: Any
) -> Pieces:
    """Yield a Parquet file with a row group for each list of columns; then close `blocks`, their origin."""
    sink = PieceSink()
    writer = pq.ParquetWriter(pa.PythonFile(sink, mode="w"), schema, **options)
    with closing(blocks), writer:
        for columns in groups:
            writer.write_table(pa.table(columns, schema=schema))
            yield sink.take()
        writer.close()
        yield sink.take()


def write_keyed(
    job: Job, blocks: Generator[Any, None, None], groups: Iterable[tuple[list[str], Any]], **options: Any
) -> Pieces:
    """Yield a Parquet file with the keys and results of a job, a row group for each of `groups`."""
    table = RESULT_TABLES[job.spec.result]
    schema = pa.schema([pa.field("key", pa.string(), nullable=False), *table.fields(job.spec)])
    columns = ([pa.array(keys, pa.string()), *table.arrays(results, job.spec)] for keys, results in groups)
    compression = {field.name: "zstd" for field in schema} | dict(table.compression)
    return write_groups(schema, blocks, columns, **{"compression": compression, **options})


def write_parquet(job: Job, blocks: Blocks) -> Pieces:
    """Yield a Parquet file with key (string) and embedding (fixed_size_list of numbers), without failed items."""
    kind = delivered_type(job)
    number = np.dtype(kind.row)
    rows_per_group = max(1, choose_group_bytes(job) // (number.itemsize * kind.width(job.spec.dimensions)))
    groups = gather_rows(blocks, rows_per_group, number)
    return write_keyed(job, blocks, groups, use_dictionary=False, write_statistics=False)


def choose_group_bytes(job: Job) -> int:
    """Return the size of row groups, in bytes, that minimizes the memory for copies of one group and for the footer."""
    kind = delivered_type(job)
    total_bytes = job.num_items * kind.width(job.spec.dimensions) * np.dtype(kind.row).itemsize
    return max(SMALLEST_GROUP_BYTES, math.isqrt(total_bytes * FOOTER_BYTES // GROUP_COPIES))


def gather_rows(
    blocks: Iterator[VectorBlock], num_rows: int, number: "np.dtype[Any]"
) -> Iterator[tuple[list[str], Rows]]:
    """Yield keys and vectors [n, width] of type `number`, about `num_rows` at a time, without items that failed."""
    keys: list[str] = []
    parts: list[Rows] = []
    for block in blocks:
        own, rows = select_present(block)
        keys += own
        parts.append(rows.astype(number, copy=False))
        if len(keys) >= num_rows:
            yield from _cut_evenly(keys, np.concatenate(parts), num_rows)
            keys, parts = [], []
    if keys:
        yield from _cut_evenly(keys, np.concatenate(parts), num_rows)


def _cut_evenly(keys: list[str], rows: Rows, num_rows: int) -> Iterator[tuple[list[str], Rows]]:
    """Split keys and rows into parts of nearly equal size, as many as possible with at least `num_rows` rows."""
    num_parts = max(1, len(keys) // num_rows)
    ends = [len(keys) * part // num_parts for part in range(num_parts + 1)]
    for start, end in pairwise(ends):
        yield keys[start:end], rows[start:end]


@dataclass(frozen=True, slots=True)
class ResultFormat:
    """The writer of one format. `measure` returns the size in bytes if that is known before writing."""

    output: OutputFormat
    write: Callable[[Job, Any], Pieces]  # Any: the blocks of the kind of result
    measure: Callable[[Job], int] | None = None


VECTOR_FORMATS: Final = {
    "ndjson": ResultFormat(OUTPUT_FORMATS["ndjson"], write_ndjson),
    "parquet": ResultFormat(OUTPUT_FORMATS["parquet"], write_parquet),
    "npy": ResultFormat(OUTPUT_FORMATS["npy"], write_npy, measure_npy),
}


def start_reading(blocks: Iterator[Block]) -> Generator[Block, None, None]:
    """Read the first block now, and return a generator of all blocks.

    An error in the first block is thus raised before the response starts, and can be sent as a problem.
    """
    first = next(blocks, None)

    def go_on() -> Generator[Block, None, None]:
        if first is not None:
            yield first
            yield from blocks

    return go_on()


class PieceResponse(StreamingResponse):
    """A streaming response whose pieces are made in a thread, each while the one before is being sent.

    If the client disconnects, the generator is closed, in a thread too. An error after the start breaks the connection,
    without a last HTTP chunk or a Parquet footer.
    """

    def __init__(self, pieces: Pieces, media_type: str, headers: dict[str, str]) -> None:
        self._pieces = pieces
        self._upcoming: asyncio.Task[bytes | None] | None = None
        super().__init__(self._read_ahead(), headers=headers, media_type=media_type)

    async def _read_ahead(self) -> AsyncIterator[bytes]:
        self._upcoming = self._start_next()
        # The shield keeps the thread's task alive if the request is cancelled, so that it can be waited for.
        while (piece := await asyncio.shield(self._upcoming)) is not None:
            self._upcoming = self._start_next()
            yield piece

    def _start_next(self) -> "asyncio.Task[bytes | None]":
        return asyncio.create_task(run_in_threadpool(next, self._pieces, None))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            with CancelScope(shield=True):
                if self._upcoming is not None:  # a running generator cannot be closed
                    await asyncio.gather(self._upcoming, return_exceptions=True)
                await run_in_threadpool(self._pieces.close)


class ResultResponse(PieceResponse):
    """The response with a job's results in one format. If the job is removed meanwhile, the connection breaks."""

    def __init__(self, job: Job, result_format: ResultFormat, blocks: Generator[Any, None, None]) -> None:
        headers = {"Content-Disposition": f'attachment; filename="{job.id}.{result_format.output.name}"'}
        if result_format.measure is not None:
            headers["Content-Length"] = str(result_format.measure(job))
        super().__init__(result_format.write(job, blocks), result_format.output.media_type, headers)
