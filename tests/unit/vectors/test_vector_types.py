"""Rows of every vector type survive the way into a column or a chunk's block, and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vectormill.db.rows.vectors import pack_copy_rows
from vectormill.domain.encoding import VECTOR_TYPES
from vectormill.vectors.quantization import measure_ranges
from vectormill.vectors.vector_types import (
    VECTOR_TYPE_BY_NAME,
    VectorType,
    make_rows,
    measure_item,
    missing_rows,
    pack_block,
    read_block,
    read_columns,
)

DIMENSIONS = 13  # not a multiple of eight
VECTORS = np.random.default_rng(0).standard_normal((6, DIMENSIONS)).astype(np.float32)
RANGES = measure_ranges(VECTORS)
KINDS = [VECTOR_TYPE_BY_NAME[name] for name in VECTOR_TYPES]


@pytest.mark.parametrize(
    ("name", "dtype", "width", "bytes_of_1024"),
    [
        ("float32", np.float32, 13, 4096),
        ("float16", np.float16, 13, 2048),
        ("int8", np.int8, 13, 1024),
        ("binary", np.uint8, 2, 128),
    ],
)
def test_a_row_has_the_numbers_of_its_type(name: str, dtype: type, width: int, bytes_of_1024: int) -> None:
    kind = VECTOR_TYPE_BY_NAME[name]
    rows = make_rows(VECTORS, kind, RANGES)
    assert rows.dtype == np.dtype(dtype)
    assert rows.shape == (6, width)
    assert kind.width(1024) * rows.itemsize == bytes_of_1024


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_copy_is_given_is_what_a_column_sends(kind: VectorType) -> None:
    rows = make_rows(VECTORS, kind, RANGES)
    hashes = np.frombuffer(bytes(range(96)), dtype="V16")
    wire = pack_copy_rows(np.arange(6, dtype=np.int32), hashes, rows, kind, DIMENSIONS)
    lines = np.frombuffer(wire[19:-2], dtype="u1").reshape(6, -1)
    assert np.array_equal(read_columns(lines[:, 34:].tobytes(), kind, DIMENSIONS), rows)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_block_tells_which_items_have_no_vector(kind: VectorType) -> None:
    block, present = missing_rows(8, kind, DIMENSIONS), np.zeros(8, dtype=np.bool_)
    places = [0, 2, 3, 5, 6, 7]
    block[places], present[places] = make_rows(VECTORS, kind, RANGES), True
    rows, is_there = read_block(pack_block(block, present, kind), kind, 8, DIMENSIONS)
    assert is_there.tolist() == present.tolist()
    assert np.array_equal(rows[is_there], make_rows(VECTORS, kind, RANGES))
    assert rows.dtype == block.dtype


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_block_cut_between_two_items_is_two_blocks(kind: VectorType) -> None:
    rows, present = make_rows(VECTORS, kind, RANGES), np.array([True] * 6)
    block = pack_block(rows, present, kind)
    size = measure_item(kind, DIMENSIONS)
    assert len(block) == 6 * size
    first, last = block[: 2 * size], block[2 * size :]
    assert np.array_equal(read_block(first, kind, 2, DIMENSIONS)[0], rows[:2])
    assert np.array_equal(read_block(last, kind, 4, DIMENSIONS)[0], rows[2:])


@given(
    kind=st.sampled_from(KINDS),
    vectors=arrays(
        np.float32, st.tuples(st.integers(1, 5), st.integers(1, 20)), elements=st.floats(-2, 2, width=32)
    ),
)
def test_any_rows_survive_column_and_block(kind: VectorType, vectors: np.ndarray) -> None:
    num_rows, dimensions = vectors.shape
    rows = make_rows(vectors, kind, measure_ranges(vectors))
    hashes = np.frombuffer(bytes(16 * num_rows), dtype="V16")
    wire = pack_copy_rows(np.arange(num_rows, dtype=np.int32), hashes, rows, kind, dimensions)
    lines = np.frombuffer(wire[19:-2], dtype="u1").reshape(num_rows, -1)
    assert np.array_equal(read_columns(lines[:, 34:].tobytes(), kind, dimensions), rows)
    kept, present = read_block(
        pack_block(rows, np.ones(num_rows, dtype=np.bool_), kind), kind, num_rows, dimensions
    )
    assert present.all()
    assert np.array_equal(kept, rows)


def test_a_block_of_float32_is_what_the_first_release_wrote() -> None:
    kind = VECTOR_TYPE_BY_NAME["float32"]
    vectors = VECTORS.copy()
    vectors[1] = np.nan
    rows, present = read_block(vectors.astype("<f4").tobytes(), kind, 6, DIMENSIONS)
    assert present.tolist() == [True, False, True, True, True, True]
    assert np.array_equal(rows, vectors, equal_nan=True)
    assert pack_block(vectors, present, kind) == vectors.astype("<f4").tobytes()
