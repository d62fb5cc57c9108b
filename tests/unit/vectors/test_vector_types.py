"""Rows of every vector type on their way into a column or a block and back, and the codes of int8 and binary."""

import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vectormill.domain.vector_type import VECTOR_TYPES, VectorType
from vectormill.vectors.quantization import (
    Ranges,
    measure_ranges,
    pack_signs,
    quantize,
    restore,
    widen_ranges,
)
from vectormill.vectors.vector_types import (
    MAX_HALF,
    find_unfit,
    make_column_rows,
    make_rows,
    measure_item,
    missing_rows,
    pack_block,
    read_block,
    read_columns,
    write_columns,
)

DIMENSIONS = 13  # not a multiple of eight
VECTORS = np.random.default_rng(0).standard_normal((6, DIMENSIONS)).astype(np.float32)
RANGES = measure_ranges(VECTORS)
KINDS = [VECTOR_TYPES[name] for name in VECTOR_TYPES]


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
    kind = VECTOR_TYPES[name]
    rows = make_rows(VECTORS, kind, RANGES)
    assert rows.dtype == np.dtype(dtype)
    assert rows.shape == (6, width)
    assert kind.width(1024) * rows.itemsize == bytes_of_1024


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_a_column_is_given_is_what_it_sends(kind: VectorType) -> None:
    rows = make_rows(VECTORS, kind, RANGES)
    columns = np.zeros((6, kind.column_bytes(DIMENSIONS)), dtype=np.uint8)
    write_columns(columns, rows, kind, DIMENSIONS)
    assert columns.tobytes() == b"".join(write_plainly(row, kind) for row in rows)
    assert np.array_equal(read_columns(columns.tobytes(), kind, DIMENSIONS), rows)


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_vectors_are_copied_once_on_their_way_into_a_column(name: str) -> None:
    kind, vectors = VECTOR_TYPES[name], np.ones((500, 768), dtype=np.float32)
    columns = np.zeros((500, kind.column_bytes(768)), dtype=np.uint8)
    tracemalloc.start()
    try:
        write_columns(columns, make_column_rows(vectors, kind, None), kind, 768)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < columns.nbytes / 10  # buffers of some rows, and no matrix


@given(
    vectors=arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 20)),
        elements=st.floats(-65504, 65504, width=32),
    )
)
def test_halves_made_in_the_column_are_those_of_rows(vectors: np.ndarray) -> None:
    kind = VECTOR_TYPES["float16"]
    num_rows, dimensions = vectors.shape
    columns = np.zeros((2, num_rows, kind.column_bytes(dimensions)), dtype=np.uint8)
    write_columns(columns[0], make_rows(vectors, kind, None), kind, dimensions)
    write_columns(columns[1], make_column_rows(vectors, kind, None), kind, dimensions)
    assert columns[0].tobytes() == columns[1].tobytes()


@given(
    vectors=arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 20)),
        elements=st.sampled_from(
            (0.0, 0.0, 2e-8, 2.0**-25, 3.1e-8, 6e-8, 1.0, 65504, 65505, 1e30, np.nan, -np.inf)
        ),
    ),
    signs=st.sampled_from((-1, 1)),
)
def test_what_has_no_direction_in_a_type_is_told(vectors: np.ndarray, signs: int) -> None:
    vectors = vectors * np.float32(signs)
    for kind in KINDS:
        with np.errstate(over="ignore", invalid="ignore"):
            stored = vectors.astype(np.float16 if kind.row == "<f2" else np.float32)
            squares = np.square(stored.astype(np.float32)).sum(axis=1)
        too_large, is_zero = find_unfit(vectors, kind)
        is_beyond = np.abs(vectors).max(axis=1) > MAX_HALF if kind.row == "<f2" else np.isinf(squares)
        assert too_large.tolist() == (is_beyond | np.isnan(vectors).any(axis=1)).tolist()
        assert is_zero.tolist() == (~stored.any(axis=1)).tolist()


def write_plainly(row: np.ndarray, kind: VectorType) -> bytes:
    """One row's column, a number at a time."""
    if kind.name == "binary":
        return struct.pack(f">i{len(row)}B", DIMENSIONS, *row.tolist())
    return struct.pack(
        f">hh{len(row)}{'f' if kind.column == 'vector' else 'e'}", DIMENSIONS, 0, *row.tolist()
    )


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
    columns = np.zeros((num_rows, kind.column_bytes(dimensions)), dtype=np.uint8)
    write_columns(columns, rows, kind, dimensions)
    assert np.array_equal(read_columns(columns.tobytes(), kind, dimensions), rows)
    kept, present = read_block(
        pack_block(rows, np.ones(num_rows, dtype=np.bool_), kind), kind, num_rows, dimensions
    )
    assert present.all()
    assert np.array_equal(kept, rows)


SAMPLE = np.random.default_rng(1).standard_normal((300, 40), dtype=np.float32) / np.float32(6)
# A tenth of these lie outside the ranges of the sample.
CODED = np.random.default_rng(2).standard_normal((500, 40), dtype=np.float32) / np.float32(4)
CODE_RANGES = measure_ranges(SAMPLE)


def quantize_embeddings(*arguments: Any, **options: Any) -> np.ndarray[Any, Any]:
    """That of sentence-transformers, whose import takes 4 s: whoever collects this file only does without."""
    from sentence_transformers.util.quantization import quantize_embeddings as theirs

    return np.asarray(theirs(*arguments, **options))


def test_codes_are_those_of_sentence_transformers_for_the_same_ranges() -> None:
    theirs = quantize_embeddings(CODED, "int8", ranges=np.stack([CODE_RANGES.low, CODE_RANGES.high]))
    ours = quantize(CODED, CODE_RANGES)
    assert ours.dtype == np.int8
    assert np.array_equal(ours, theirs)
    assert (ours.min(), ours.max()) == (-128, 127)
    assert np.array_equal(ours, quantize_embeddings(CODED, "int8", calibration_embeddings=SAMPLE))


@pytest.mark.parametrize("dimensions", [8, 40, 39])
def test_packed_signs_are_the_ubinary_of_sentence_transformers(dimensions: int) -> None:
    vectors = CODED[:, :dimensions].copy()
    vectors[0] = 0  # zero is not above zero
    assert np.array_equal(pack_signs(vectors), quantize_embeddings(vectors, "ubinary"))


@given(
    arrays(np.float32, (4, 3), elements=st.floats(-8, 8, width=32)),
    arrays(np.float32, (2, 3), elements=st.floats(-4, 4, width=32)),
)
def test_what_lies_in_the_ranges_comes_back_within_half_a_step(vectors: np.ndarray, ends: np.ndarray) -> None:
    ranges = Ranges(ends.min(axis=0), ends.max(axis=0))
    inside = np.clip(vectors, ranges.low, ranges.high)
    restored = restore(quantize(inside, ranges), ranges)
    # A dimension without a range has a step of 1 in which its only value lies at the start.
    allowed = 0.5 * ranges.steps * (1 + 1e-3) + 1e-6
    assert (np.abs(restored - inside) <= allowed).all()


def test_ranges_are_widened_at_both_ends() -> None:
    wider = widen_ranges(measure_ranges(np.array([[-1, 2], [1, 2]], dtype=np.float32)), 0.25)
    assert (wider.low.tolist(), wider.high.tolist()) == ([-1.5, 2], [1.5, 2])


def test_ranges_are_kept_to_the_last_bit_and_a_code_depends_on_its_own_vector_alone() -> None:
    kept = Ranges.from_bytes(RANGES.to_bytes())
    assert np.array_equal(kept.low, RANGES.low)
    assert np.array_equal(kept.high, RANGES.high)
    alone = np.concatenate([quantize(vector[None], RANGES) for vector in VECTORS])
    assert np.array_equal(alone, quantize(VECTORS, RANGES))
