"""Numbers written by table look-up are the numbers that were meant, bit for bit."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vectormill.vectors.decimals import (
    HALF_SLOT_BYTES,
    SLOT_BYTES,
    SMALLEST,
    STRIP,
    write_decimals,
    write_halves,
    write_wholes,
)


def read_rows(vectors: np.ndarray) -> np.ndarray:
    rows = [json.loads(b"[" + row.tobytes()) for row in write_decimals(vectors)]
    return np.array(rows, dtype=np.float64).astype(np.float32)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_any_finite_float32_is_read_back_as_it_was(values: list[float]) -> None:
    vectors = np.array([values, values[::-1]], dtype=np.float32)
    assert read_rows(vectors).tobytes() == vectors.tobytes()


@given(st.floats(width=32, min_value=SMALLEST, max_value=1, exclude_max=True))
def test_the_common_range_is_exact_to_the_last_bit(value: float) -> None:
    vectors = np.array([[value, -value]], dtype=np.float32)
    assert read_rows(vectors).tobytes() == vectors.tobytes()


def test_unit_vectors_longer_than_a_strip_come_back_whole() -> None:
    vectors = np.random.default_rng(0).standard_normal((3, STRIP + 5)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors[1, STRIP - 1 : STRIP + 1] = (3e38, -1.17549435e-38)
    assert read_rows(vectors).tobytes() == vectors.tobytes()


def test_every_number_fills_its_slot() -> None:
    for value, written in (
        (0.5, " 0.500000000000]"),
        (-0.25, "-0.250000000000]"),
        (0.0, " 0.000000000000]"),
        (-0.0, "-0.000000000000]"),  # the sign of zero is a bit too
        (1.0, "1.0            ]"),  # outside the tables: the shortest form, padded
        (-1.1754944e-38, "-1.1754944e-38 ]"),  # the longest of the shortest forms
    ):
        row = write_decimals(np.array([[value]], dtype=np.float32))[0].tobytes().decode()
        assert row == written
        assert len(row) == SLOT_BYTES


def test_every_float16_is_read_back_as_it_was() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    (row,) = write_halves(halves[None])
    assert row.size == halves.size * HALF_SLOT_BYTES
    numbers = json.loads(b"[" + row.tobytes())
    # Read as float64, or first as float32: both round to the same float16.
    for width in (np.float64, np.float32):
        assert np.array(numbers, dtype=width).astype(np.float16).tobytes() == halves.tobytes()


def test_rows_of_float16_are_written_apart_and_whatever_the_layout_in_memory() -> None:
    vectors = np.array([[0.5, -0.08154], [1, 6e-8]], dtype=np.float16)
    rows = [row.tobytes().decode() for row in write_halves(vectors)]
    assert rows == ["0.5        ,-0.08154   ]", "1          ,5.96e-08   ]"]
    assert [row.tobytes() for row in write_halves(vectors.T)] != [row.encode() for row in rows]
    assert np.array_equal(write_halves(np.asfortranarray(vectors)), write_halves(vectors))


def test_every_whole_number_is_written_as_such() -> None:
    for number in (np.int8, np.uint8):
        limits = np.iinfo(number)
        numbers: np.ndarray = np.arange(limits.min, limits.max + 1).astype(number).reshape(2, 128)
        for row, written in zip(numbers, write_wholes(numbers), strict=True):
            assert json.loads(b"[" + written.tobytes()) == row.tolist()
