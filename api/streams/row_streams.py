"""Row streams: write rows of a collection or of a job as NDJSON, Parquet or .npy, page by page, in constant memory."""

import asyncio
import io
import math
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from anyio import CancelScope
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from vectormill.collections.exports import Inclusion, RowPage
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import VARYING
from vectormill.files.formats import OUTPUT_FORMATS
from vectormill.files.matrices import write_header
from vectormill.files.parquet import open_writer
from vectormill.jobs.export import ResultBlock
from vectormill.jobs.job import Job
from vectormill.results.kind import Parts
from vectormill.results.table import choose_kind
from vectormill.rows.decoding import PARQUET

Block = TypeVar("Block")
Blocks = Generator[ResultBlock, None, None]
Pieces = Generator[bytes, None, None]
# A call in a thread costs as much as formatting ten rows. Larger pieces cost more, since their memory is returned to
# the system and allocated again each time, at three page faults per row.
PIECE_BYTES: Final = 256 << 10
Pages = Generator[RowPage, None, None]

# The Parquet columns of unit vectors, whose components are nearly random: no compression makes them smaller.
UNCOMPRESSED: Final = {"embedding.list.element": "none", "multi_vector.list.element.list.element": "none"}


def write_ndjson(spec: EncodingSpec, inclusion: Inclusion, pages: Pages) -> Pieces:
    """Yield NDJSON with an object per row: the key and the included result, metadata and text.

    A client whose download breaks off resumes after the key of the last line.
    """
    with closing(pages):
        for page in pages:
            num_rows = len(page.keys)
            num_bytes = 1 if page.results is None else choose_kind(spec).measure(page.results)
            rows_per_piece = max(1, PIECE_BYTES // num_bytes)
            for start in range(0, num_rows, rows_per_piece):
                yield write_lines(spec, page, inclusion, start, min(num_rows, start + rows_per_piece))


def write_lines(spec: EncodingSpec, page: RowPage, inclusion: Inclusion, start: int, end: int) -> bytes:
    parts: Parts = []
    written = None if page.results is None else choose_kind(spec).write(page.results[start:end], spec)
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
        fields += choose_kind(spec).arrow_fields(spec)
    if inclusion.metadata:
        fields.append(pa.field("metadata", pa.string()))
    if inclusion.text:
        fields += [pa.field(name, pa.string()) for name in spec.text_columns]
    schema = pa.schema(fields)
    compression = {field.name: "zstd" for field in fields} | UNCOMPRESSED
    # Each page is a row group. Larger groups need several times the memory; smaller ones lengthen the footer, which is
    # in memory until the end: 25 MiB for the 8,000 pages of ten million rows. Components of unit vectors are nearly
    # random: dictionaries and statistics are of no use.
    sink = io.BytesIO()
    writer = open_writer(
        pa.PythonFile(sink, mode="w"),
        schema,
        compression=compression,
        use_dictionary=False,
        write_statistics=False,
    )
    with closing(pages), writer:
        for page in pages:
            writer.write_table(pa.table(_make_columns(page, spec, inclusion), schema=schema))
            yield _take_written(sink)
        writer.close()
        yield _take_written(sink)


def _take_written(sink: io.BytesIO) -> bytes:
    """Return what was written to a file in memory since the last call."""
    piece = sink.getvalue()
    sink.seek(0)
    sink.truncate()
    return piece


def _make_columns(page: RowPage, spec: EncodingSpec, inclusion: Inclusion) -> list[Any]:
    columns: list[Any] = [pa.array(page.keys, pa.string())]
    if page.results is not None:
        columns += choose_kind(spec).arrow_arrays(page.results, spec)
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


NPY: Final = "npy"  # of vectors alone

# Memory of the Parquet writer: the copies of a row group between Postgres and the socket, and the bytes of the footer
# per row group, which are kept until the end.
GROUP_COPIES: Final = 9
FOOTER_BYTES: Final = 1200
SMALLEST_GROUP_BYTES: Final = 256 << 10
# The uncompressed size of a row group of records; a million short ones have some 30 groups.
RECORDS_GROUP_BYTES: Final = 8 << 20
ROW_BYTES: Final = 100  # the memory of a record's Python objects
RESULT_ALONE: Final = Inclusion(metadata=False)


def write_npy(job: Job, blocks: Blocks) -> Pieces:
    """Yield a .npy file [num_items, width] in the order of submission.

    The row of an item without a vector is NaN, or zeros for integer types.
    """
    kind = job.spec.delivered_type
    with closing(blocks):
        yield npy_header(job)
        for block in blocks:
            yield block.results.astype(kind.row).tobytes()


def npy_header(job: Job) -> bytes:
    header, kind = io.BytesIO(), job.spec.delivered_type
    write_header(header, job.num_items, kind.width(job.spec.dimensions), np.dtype(kind.row))
    return header.getvalue()


def measure_npy(job: Job) -> int:
    """Return the size of a job's .npy export in bytes."""
    kind = job.spec.delivered_type
    return len(npy_header(job)) + np.dtype(kind.row).itemsize * job.num_items * kind.width(
        job.spec.dimensions
    )


def write_job(job: Job, format: str, blocks: Blocks) -> Pieces:
    """Yield a job's results in a format. Items without a result are left out; only .npy has a row for each item."""
    if format == NPY:
        return write_npy(job, blocks)
    pages = make_pages(blocks)
    if format == PARQUET:
        pages = gather_pages(pages, choose_group_bytes(job))
    return ROW_FORMATS[format](job.spec, RESULT_ALONE, pages)


def make_pages(blocks: Blocks) -> Pages:
    """Yield the keys and results of the items that have one; then close `blocks`."""
    with closing(blocks):
        for block in blocks:
            keys = [key for key, is_present in zip(block.keys, block.present, strict=True) if is_present]
            if keys:
                yield RowPage(keys, block.results[block.present], [], {})


def choose_group_bytes(job: Job) -> int:
    """Return the size of row groups, in bytes, that minimizes the memory for copies of one group and for the footer."""
    if job.spec.result in VARYING:
        return RECORDS_GROUP_BYTES
    kind = job.spec.delivered_type
    total_bytes = job.num_items * kind.width(job.spec.dimensions) * np.dtype(kind.row).itemsize
    return max(SMALLEST_GROUP_BYTES, math.isqrt(total_bytes * FOOTER_BYTES // GROUP_COPIES))


def gather_pages(pages: Pages, group_bytes: int) -> Pages:
    """Yield pages of about this size: small ones together, and large ones cut into parts of nearly equal size."""
    held: list[RowPage] = []
    num_bytes = 0
    with closing(pages):
        for page in pages:
            held.append(page)
            num_bytes += _measure(page)
            if num_bytes >= group_bytes:
                yield from _cut_evenly(held, num_bytes // group_bytes)
                held, num_bytes = [], 0
    if held:
        yield from _cut_evenly(held, 1)


def _measure(page: RowPage) -> int:
    results: Any = page.results
    if results.dtype != object:
        return int(results.nbytes)
    return sum(map(len, page.keys)) + sum(map(len, results)) + ROW_BYTES * len(results)


def _cut_evenly(pages: Sequence[RowPage], num_parts: int) -> Iterator[RowPage]:
    keys = [key for page in pages for key in page.keys]
    results: Any = np.concatenate([page.results for page in pages])
    num_parts = min(num_parts, len(keys))
    for start, end in pairwise(len(keys) * part // num_parts for part in range(num_parts + 1)):
        yield RowPage(keys[start:end], results[start:end], [], {})


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

    def __init__(self, job: Job, format: str, blocks: Blocks) -> None:
        headers = {"Content-Disposition": f'attachment; filename="{job.id}.{format}"'}
        if format == NPY:  # its size is known before it is written
            headers["Content-Length"] = str(measure_npy(job))
        super().__init__(write_job(job, format, blocks), OUTPUT_FORMATS[format].media_type, headers)
