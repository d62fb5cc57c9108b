"""Vector streams: write a job's vectors as NDJSON, Parquet or .npy, block by block, in constant memory."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from anyio import CancelScope
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from vectormill.domain.encoding import FLOAT32
from vectormill.files.matrices import write_header
from vectormill.files.parquet import open_writer
from vectormill.jobs.export import ResultBlock
from vectormill.jobs.job import Job
from vectormill.vectors.decimals import (
    HALF_SLOT_BYTES,
    SLOT_BYTES,
    WHOLE_SLOT_BYTES,
    write_decimals,
    write_halves,
    write_wholes,
)
from vectormill.vectors.vector_types import VECTOR_TYPE_BY_NAME, VectorType

Block = TypeVar("Block")
Blocks = Generator[ResultBlock, None, None]
Pieces = Generator[bytes, None, None]

# A call in a thread costs as much as formatting ten rows. Larger pieces cost more, since their memory is returned to
# the system and allocated again each time, at three page faults per row.
PIECE_BYTES: Final = 256 << 10


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


def write_npy(job: Job, blocks: Blocks) -> Pieces:
    """Yield a .npy file [num_items, width] in the order of submission.

    The row of an item without a vector is NaN, or zeros for integer types.
    """
    kind = delivered_type(job)
    with closing(blocks):
        yield npy_header(job)
        for block in blocks:
            yield block.results.astype(kind.row).tobytes()


def npy_header(job: Job) -> bytes:
    header, kind = io.BytesIO(), delivered_type(job)
    write_header(header, job.num_items, kind.width(job.spec.dimensions), np.dtype(kind.row))
    return header.getvalue()


def measure_npy(job: Job) -> int:
    """Return the size of a job's .npy export in bytes."""
    kind = delivered_type(job)
    return len(npy_header(job)) + np.dtype(kind.row).itemsize * job.num_items * kind.width(
        job.spec.dimensions
    )


def take_written(sink: io.BytesIO) -> bytes:
    """Return what was written to a file in memory since the last call."""
    piece = sink.getvalue()
    sink.seek(0)
    sink.truncate()
    return piece


def write_groups(
    schema: pa.Schema, blocks: Generator[Any, None, None], groups: Iterable[list[Any]], **options: Any
) -> Pieces:
    """Yield a Parquet file with a row group for each list of columns; then close `blocks`, their origin."""
    sink = io.BytesIO()
    writer = open_writer(pa.PythonFile(sink, mode="w"), schema, **options)
    with closing(blocks), writer:
        for columns in groups:
            writer.write_table(pa.table(columns, schema=schema))
            yield take_written(sink)
        writer.close()
        yield take_written(sink)


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
