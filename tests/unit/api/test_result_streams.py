"""Scores and records become a file of each format, whatever labels are called and however long a record is."""

import io
import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.streams.row_streams import PIECE_BYTES, start_reading, write_job
from tests.jobs import make_completed_job
from vectormill.domain.errors import JobNotFound
from vectormill.domain.task import EXTRACT, JUDGE
from vectormill.files.formats import OUTPUT_FORMATS
from vectormill.jobs.export import ResultBlock
from vectormill.jobs.job import Job
from vectormill.objects.manifest import make_part_schema
from vectormill.results.kind import take_objects
from vectormill.results.table import describe_first

# What a model's files may call its labels.
LABELS = ("", "a.b", 'no "quotes"', "日本 \U0001f600", "score", "list.element")
NUM_CHUNKS, NUM_ITEMS = 300, 4


def judged(labels: tuple[str, ...] = LABELS) -> Job:
    job = make_completed_job(NUM_ITEMS)
    return replace(job, spec=replace(job.spec, task=JUDGE, labels=labels, dimensions=len(labels)))


def extracted(num_items: int) -> Job:
    job = make_completed_job(num_items)
    return replace(job, spec=replace(job.spec, task=EXTRACT, dimensions=0))


def test_scores_have_their_labels_whatever_these_are_called() -> None:
    numbers = np.random.default_rng(3).random((NUM_ITEMS, len(LABELS)), dtype=np.float32)
    present = np.array([True, True, False, True])
    block = ResultBlock(0, ["a", "b", "c", "d"], numbers, present)
    content = b"".join(write_job(judged(), "ndjson", start_reading(iter([block]))))
    rows = [json.loads(line) for line in content.splitlines()]
    whole = b"".join(write_job(judged(), "parquet", start_reading(iter([block]))))
    table = pq.read_table(io.BytesIO(whole)).to_pylist()
    assert [row["key"] for row in rows] == [row["key"] for row in table] == ["a", "b", "d"]
    for row, written, expected in zip(rows, table, numbers[present], strict=True):
        assert list(row["probabilities"]) == list(written["probabilities"]) == list(LABELS)
        assert np.array_equal(np.array(list(row["probabilities"].values()), np.float32), expected)
        assert np.array_equal(np.array(list(written["probabilities"].values()), np.float32), expected)
        assert row["label"] == written["label"] == LABELS[int(expected.argmax())]


def record_block(first_item: int, keys: list[str], records: list[bytes | None]) -> ResultBlock:
    present = np.array([record is not None for record in records])
    return ResultBlock(first_item, keys, take_objects(records), present)


def blocks_of(record: bytes) -> Iterator[ResultBlock]:
    for chunk in range(NUM_CHUNKS):
        keys = [f"{chunk}/{item}" for item in range(NUM_ITEMS)]
        yield record_block(chunk * NUM_ITEMS, keys, [record, None, b"[]", record])


def test_records_of_many_small_chunks_share_a_row_group() -> None:
    """The footer names every group, and is in memory to the end: a group for each chunk grows with the job."""
    record = b'[[{"type":"a"}]]'
    job = extracted(NUM_CHUNKS * NUM_ITEMS)
    content = b"".join(write_job(job, "parquet", start_reading(blocks_of(record))))
    file = pq.ParquetFile(io.BytesIO(content))
    assert (file.num_row_groups, file.metadata.num_rows) == (1, 3 * NUM_CHUNKS)
    table = file.read().to_pylist()
    assert [row["key"] for row in table[:4]] == ["0/0", "0/2", "0/3", "1/0"]
    assert table[-1]["output"] == record.decode()


@pytest.mark.parametrize("format", ["ndjson", "parquet"])
def test_a_job_without_any_record_is_an_empty_file(format: str) -> None:
    block = record_block(0, ["a", "b"], [None, None])
    content = b"".join(write_job(extracted(2), format, start_reading(iter([block]))))
    if format == "parquet":
        assert pq.read_table(io.BytesIO(content)).num_rows == 0
    else:
        assert content == b""


def test_records_of_megabytes_are_sent_piece_by_piece() -> None:
    """Joined, a chunk of them would be in memory a second and a third time."""
    record = b'["' + b"x" * PIECE_BYTES + b'"]'
    block = record_block(0, [str(number) for number in range(9)], [record] * 9)
    pieces = list(write_job(extracted(9), "ndjson", start_reading(iter([block]))))
    assert max(map(len, pieces)) < 2 * PIECE_BYTES + 100
    assert [json.loads(line)["key"] for line in b"".join(pieces).splitlines()] == block.keys
    groups = pq.ParquetFile(
        io.BytesIO(b"".join(write_job(extracted(9), "parquet", start_reading(iter([block] * 40)))))
    )
    assert groups.metadata.num_rows == 360
    assert groups.num_row_groups > 1


@pytest.mark.parametrize("format", ["ndjson", "parquet"])
def test_records_of_a_job_that_is_removed_meanwhile_are_no_whole_file(format: str) -> None:
    def broken() -> Iterator[ResultBlock]:
        yield record_block(0, ["a"], [b"[]"])
        raise JobNotFound

    pieces: list[bytes] = []
    with pytest.raises(JobNotFound):
        pieces.extend(write_job(extracted(2), format, start_reading(broken())))
    assert not b"".join(pieces).endswith(b"PAR1")


NUMBERS = {
    None: np.float32,
    "float32": np.float16,  # as a collection of halves keeps them
    "float16": np.float16,
    "int8": np.int8,
    "binary": np.uint8,
}
HOSTILE = [0.1, -0.0, 1e-7, 65504.0, 1 / 3, -1.0, 0.0, 6.1e-5]


@given(data=st.data(), name=st.sampled_from(list(NUMBERS)))
def test_every_format_and_an_item_spell_a_vector_alike(data: st.DataObject, name: str | None) -> None:
    number = np.dtype(NUMBERS[name])
    elements = (
        st.sampled_from(HOSTILE)
        if number.kind == "f"
        else st.integers(*((-128, 127) if name == "int8" else (0, 255)))
    )
    drawn = data.draw(st.lists(st.lists(elements, min_size=8, max_size=8), min_size=1, max_size=4))
    rows = np.array(drawn, number)
    job = make_completed_job(len(rows))
    width = 64 if name == "binary" else 8
    job = replace(job, spec=replace(job.spec, vector_type=name, dimensions=width))
    block = ResultBlock(0, [f"k{place}" for place in range(len(rows))], rows, np.ones(len(rows), np.bool_))
    written = {
        format: b"".join(write_job(job, format, start_reading(iter([block])))) for format in OUTPUT_FORMATS
    }
    lines = [json.loads(line) for line in written["ndjson"].splitlines()]
    items = [describe_first(rows[place : place + 1], job.spec) for place in range(len(rows))]
    assert items == [{"embedding": line["embedding"]} for line in lines]
    table = pq.read_table(io.BytesIO(written["parquet"]))
    matrix = np.load(io.BytesIO(written["npy"]))
    assert np.array_equal(np.array(table["embedding"].to_pylist(), number), rows)
    assert np.array_equal(matrix.astype(number), rows)
    assert np.array_equal(np.array([line["embedding"] for line in lines]).astype(number), rows)
    assert matrix.dtype == table.schema.field("embedding").type.value_type.to_pandas_dtype()
    part = make_part_schema(job.spec)
    assert part.field("embedding") == table.schema.field("embedding")
