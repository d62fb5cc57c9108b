"""Ragged against lists of lists."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vectormill.ragged import Ragged

ROWS = st.lists(st.lists(st.integers(0, 1000), max_size=5), max_size=8)


def make(rows: list[list[int]]) -> Ragged:
    return Ragged.from_rows([np.array(row, dtype=np.int32) for row in rows], np.int32)


def read(ragged: Ragged) -> list[list[int]]:
    return [ragged.row(index).tolist() for index in range(len(ragged))]


@given(ROWS, st.data())
def test_rows_are_kept_taken_and_cut_as_those_of_a_list(rows: list[list[int]], data: st.DataObject) -> None:
    ragged = make(rows)
    assert read(ragged) == rows
    assert ragged.lengths.tolist() == [len(row) for row in rows]
    start = data.draw(st.integers(0, len(rows)))
    end = data.draw(st.integers(start, len(rows)))
    assert read(ragged.part(start, end)) == rows[start:end]
    assert ragged.part(start, end).covered.tolist() == [value for row in rows[start:end] for value in row]
    places = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9)) if rows else []
    taken = ragged.take(np.array(places, dtype=np.int64))
    assert read(taken) == [rows[place] for place in places]
    assert taken.values.dtype == np.int32


@given(st.lists(ROWS, min_size=1, max_size=4))
def test_parts_are_joined_in_order(lists: list[list[list[int]]]) -> None:
    parts = [make([[9], *rows]).part(1, len(rows) + 1) for rows in lists]
    assert read(Ragged.join(parts)) == [row for rows in lists for row in rows]


def test_a_matrix_goes_in_and_out_without_a_copy() -> None:
    matrix = np.arange(12, dtype=np.float32).reshape(4, 3)
    ragged = Ragged.from_matrix(matrix)
    assert np.shares_memory(ragged.matrix, matrix)
    np.testing.assert_array_equal(ragged.part(1, 3).matrix, matrix[1:3])
    assert read(Ragged.from_scalars(np.array([7, 8]))) == [[7], [8]]


def test_rows_of_different_lengths_are_no_matrix() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        make([[1], [2, 3]]).matrix  # noqa: B018
