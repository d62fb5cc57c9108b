"""Vector streams: a job's vectors as NDJSON, Parquet or NumPy's own format, a block at a time, in constant memory."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from anyio import CancelScope
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api.decimal_tables import write_halves
from api.decimals import SLOT_BYTES, write_decimals
from vectormill.db.export import VectorBlock, Vectors
from vectormill.domain.job import Job

if TYPE_CHECKING:
    from typing_extensions import Buffer

Blocks = Generator[VectorBlock, None, None]
Pieces = Generator[bytes, None, None]

# A hop to a thread costs as much as formatting ten rows. Larger pieces cost more: memory for them is given back and
# taken anew each time, at three page faults a row.
PIECE_BYTES: Final = 256 << 10
# A group is several times in memory while it is written. The footer names every one of them, so it grows with the job:
# some tens of bytes for a megabyte of vectors.
ROW_GROUP_BYTES: Final = 1 << 20


def write_ndjson(job: Job, blocks: Blocks) -> Pieces:
    """One object a line; items without a vector are left out."""
    rows_per_piece = max(1, PIECE_BYTES // (SLOT_BYTES * job.spec.dimensions))
    with closing(blocks):
        for block in blocks:
            keys = [key for key, is_present in zip(block.keys, block.present, strict=True) if is_present]
            vectors = block.vectors[block.present]
            for start in range(0, len(keys), rows_per_piece):
                end = start + rows_per_piece
                yield write_lines(keys[start:end], vectors[start:end])


def write_lines(keys: list[str], vectors: Vectors) -> bytes:
    """One object a line; `vectors` is [len(keys), d]."""
    parts: list[bytes | memoryview] = []
    for key, row in zip(keys, write_numbers(vectors), strict=True):
        parts += (b'{"key":', msgspec.json.encode(key), b',"embedding":[', row.data, b"}\n")
    return b"".join(parts)


def write_numbers(vectors: Vectors) -> npt.NDArray[np.uint8]:
    """Characters [n, width] of vectors [n, d]; each row is numbers and commas, ended by "]"."""
    if vectors.dtype == np.float16:
        return write_halves(vectors.astype(np.float16, copy=False))
    return write_decimals(vectors.astype(np.float32, copy=False))


def write_npy(job: Job, blocks: Blocks) -> Pieces:
    """float32 [num_items, d] in the order of submission; the row of an item without a vector is NaN."""
    num_rows = 0
    with closing(blocks):
        yield npy_header(job)
        for block in blocks:
            num_rows += len(block.vectors)
            yield block.vectors.astype("<f4").tobytes()
    if num_rows != job.num_items:
        # Rows are found by position: the connection is broken off rather than a short array be taken for whole.
        raise RuntimeError(
            f"Job {job.id} has {job.num_items} items, but vectors of {num_rows} could be read."
        )


def npy_header(job: Job) -> bytes:
    header = io.BytesIO()
    shape = (job.num_items, job.spec.dimensions)
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return header.getvalue()


def measure_npy(job: Job) -> int:
    """The bytes of the whole npy stream."""
    return len(npy_header(job)) + 4 * job.num_items * job.spec.dimensions


class PieceSink(io.RawIOBase):
    """A file for pyarrow that cannot seek: what was written since the last `take` waits in memory."""

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


def write_parquet(job: Job, blocks: Blocks) -> Pieces:
    """Columns key (string) and embedding (fixed_size_list of float32); items without a vector are left out."""
    dimensions = job.spec.dimensions
    embedding_type = pa.list_(pa.float32(), dimensions)
    schema = pa.schema([pa.field("key", pa.string(), nullable=False), pa.field("embedding", embedding_type)])
    rows_per_group = max(1, ROW_GROUP_BYTES // (4 * dimensions))
    sink = PieceSink()
    # Components of unit vectors are as good as random: neither a dictionary nor compression makes them smaller.
    writer = pq.ParquetWriter(
        pa.PythonFile(sink, mode="w"),
        schema,
        compression={"key": "zstd", "embedding.list.element": "none"},
        use_dictionary=False,
        write_statistics=False,
    )
    with closing(blocks), writer:
        for keys, vectors in gather_rows(blocks, rows_per_group):
            embedding = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), type=embedding_type)
            writer.write_table(pa.table([pa.array(keys, pa.string()), embedding], schema=schema))
            yield sink.take()
        writer.close()
        yield sink.take()


def gather_rows(
    blocks: Iterator[VectorBlock], num_rows: int
) -> Iterator[tuple[list[str], npt.NDArray[np.float32]]]:
    """Keys and vectors, float32 [n, d], of the items that have one, at least `num_rows` at a time."""
    keys: list[str] = []
    parts: list[npt.NDArray[np.float32]] = []
    for block in blocks:
        keys += [key for key, is_present in zip(block.keys, block.present, strict=True) if is_present]
        parts.append(block.vectors[block.present].astype(np.float32, copy=False))
        if len(keys) >= num_rows:
            yield keys, np.concatenate(parts)
            keys, parts = [], []
    if keys:
        yield keys, np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class VectorFormat:
    """How one format is written. `measure` gives the number of bytes, where it is known beforehand."""

    media_type: str
    extension: str
    write: Callable[[Job, Blocks], Pieces]
    measure: Callable[[Job], int] | None = None


VECTOR_FORMATS: Final = {
    "ndjson": VectorFormat("application/x-ndjson", "ndjson", write_ndjson),
    "parquet": VectorFormat("application/vnd.apache.parquet", "parquet", write_parquet),
    "npy": VectorFormat("application/x-npy", "npy", write_npy, measure_npy),
}


def start_reading(blocks: Iterator[VectorBlock]) -> Blocks:
    """The same blocks, of which the first is read now: what fails at once is a problem, not half a stream."""
    first = next(blocks, None)

    def go_on() -> Blocks:
        if first is not None:
            yield first
            yield from blocks

    return go_on()


class VectorResponse(StreamingResponse):
    """Streams pieces that are made in a thread, the next one while the last one is being sent.

    When the client leaves, the source is closed, in a thread too.
    """

    def __init__(self, job: Job, vector_format: VectorFormat, blocks: Blocks) -> None:
        self._pieces = vector_format.write(job, blocks)
        self._upcoming: asyncio.Task[bytes | None] | None = None
        headers = {"Content-Disposition": f'attachment; filename="{job.id}.{vector_format.extension}"'}
        if vector_format.measure is not None:
            headers["Content-Length"] = str(vector_format.measure(job))
        super().__init__(self._read_ahead(), headers=headers, media_type=vector_format.media_type)

    async def _read_ahead(self) -> AsyncIterator[bytes]:
        self._upcoming = self._start_next()
        # Shielded: a cancelled request waits for the thread, instead of leaving it behind at work.
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
                if self._upcoming is not None:  # a generator that runs cannot be closed
                    await asyncio.gather(self._upcoming, return_exceptions=True)
                await run_in_threadpool(self._pieces.close)
