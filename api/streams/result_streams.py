"""Result streams: write a job's results as NDJSON, Parquet or .npy, block by block, in constant memory."""

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any, Final

import numpy as np

from api.streams.row_streams import ROW_FORMATS, Pages
from api.streams.vector_streams import PieceResponse, Pieces, delivered_type, measure_npy, write_npy
from vectormill.collections.exports import Inclusion, RowPage
from vectormill.domain.task import VARYING
from vectormill.files.formats import OUTPUT_FORMATS
from vectormill.jobs.export import ResultBlock
from vectormill.jobs.job import Job
from vectormill.rows.decoding import PARQUET

Blocks = Generator[ResultBlock, None, None]

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


def write_results(job: Job, format: str, blocks: Blocks) -> Pieces:
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
    kind = delivered_type(job)
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


class ResultResponse(PieceResponse):
    """The response with a job's results in one format. If the job is removed meanwhile, the connection breaks."""

    def __init__(self, job: Job, format: str, blocks: Blocks) -> None:
        headers = {"Content-Disposition": f'attachment; filename="{job.id}.{format}"'}
        if format == NPY:  # its size is known before it is written
            headers["Content-Length"] = str(measure_npy(job))
        super().__init__(write_results(job, format, blocks), OUTPUT_FORMATS[format].media_type, headers)
