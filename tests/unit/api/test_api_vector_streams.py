"""Vectors become a file of each format, in pieces whose size does not depend on the job's."""

import asyncio
import io
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from starlette.requests import ClientDisconnect

from api.streams.row_streams import (
    ResultResponse,
    choose_group_bytes,
    gather_pages,
    make_pages,
    start_reading,
    write_job,
)
from tests.jobs import JOB, make_completed_job
from vectormill.files.formats import OUTPUT_FORMATS
from vectormill.jobs.export import ResultBlock

DIMENSIONS = JOB.spec.dimensions


def make_block(start: int, count: int, missing: tuple[int, ...] = ()) -> ResultBlock:
    vectors = np.arange(start, start + count * DIMENSIONS, dtype=np.float32).reshape(
        count, DIMENSIONS
    ) / np.float32(64)
    present = np.ones(count, dtype=np.bool_)
    present[list(missing)] = False
    vectors[~present] = np.nan
    vectors.setflags(write=False)  # as they come out of a buffer
    return ResultBlock(start, [f'k"{start + number}' for number in range(count)], vectors, present)


@pytest.mark.parametrize("name", OUTPUT_FORMATS)
def test_a_job_without_any_vector_is_a_whole_file_all_the_same(name: str) -> None:
    job = make_completed_job(2)
    blocks = start_reading(iter([make_block(0, 2, missing=(0, 1))]))
    content = b"".join(write_job(job, name, blocks))
    if name == "ndjson":
        assert content == b""
    elif name == "parquet":
        assert pq.read_table(io.BytesIO(content)).num_rows == 0
    else:
        assert np.isnan(np.load(io.BytesIO(content))).all()


def test_row_groups_are_gathered_from_blocks_and_bounded() -> None:
    blocks = (make_block(number * 10, 10) for number in range(100))
    pages = gather_pages(make_pages(blocks), 64 * 4 * DIMENSIONS)
    sizes = [len(page.keys) for page in pages]
    assert sizes == [70] * 14 + [20]


def test_large_blocks_are_cut_evenly_and_nothing_is_lost_between() -> None:
    blocks = [make_block(0, 512), make_block(512, 100)]
    groups = list(gather_pages(make_pages(start_reading(iter(blocks))), 170 * 4 * DIMENSIONS))
    assert [len(page.keys) for page in groups] == [170, 171, 171, 100]
    assert [key for page in groups for key in page.keys] == [key for block in blocks for key in block.keys]
    rows = np.concatenate([page.results for page in groups])
    assert np.array_equal(rows, np.concatenate([block.results for block in blocks]))


@pytest.mark.parametrize(
    ("num_items", "group_bytes"),
    [
        (1, 256 << 10),  # a small job: groups so small that their copies do not count
        (
            10_000_000,
            1_430_000,
        ),  # of 384 values: 13 MB in nine copies, and as much in the footer of 10,700 groups
    ],
)
def test_row_groups_grow_with_the_root_of_the_job(num_items: int, group_bytes: int) -> None:
    job = make_completed_job(num_items)
    job = replace(job, spec=replace(job.spec, dimensions=384))
    assert choose_group_bytes(job) == pytest.approx(group_bytes, rel=0.01)


class Source:
    """Blocks that notice when nobody wants more of them."""

    def __init__(self) -> None:
        self.num_read = 0
        self.is_closed = False

    def __iter__(self) -> Iterator[ResultBlock]:
        try:
            while True:
                self.num_read += 1
                yield make_block(0, 4)
        finally:
            self.is_closed = True


def test_a_client_that_leaves_ends_the_reading() -> None:
    source = Source()
    response = ResultResponse(make_completed_job(1 << 40), "ndjson", start_reading(iter(source)))
    num_sent = 0

    async def send(message: object) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 3:
            raise OSError("connection lost")

    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()  # a client that says nothing more
        raise AssertionError

    scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
    with pytest.raises(ClientDisconnect):
        asyncio.run(response(scope, receive, send))
    assert source.is_closed
    assert source.num_read <= 4
