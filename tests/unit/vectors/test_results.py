"""Scores, records and ragged rows: how results are told, kept and joined."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vectormill.ragged import Ragged
from vectormill.results.kind import pack_objects, read_objects
from vectormill.results.scores import describe_numbers

NUMBERS = np.array([[0.25, 0.75], [0.9, 0.1]], dtype=np.float32)


def test_of_two_labels_the_second_one_says_that_something_holds() -> None:
    first, second = describe_numbers(NUMBERS, ("no", "yes"))
    assert first == {"score": 0.75, "label": "yes", "probabilities": {"no": 0.25, "yes": 0.75}}
    assert (second["label"], np.float32(second["score"])) == ("no", np.float32(0.1))


def test_of_more_labels_the_best_one_is_told() -> None:
    (only,) = describe_numbers(np.array([[0.2, 0.5, 0.3]], dtype=np.float32), ("x", "y", "z"))
    assert (only["score"], only["label"]) == (0.5, "y")


def test_one_number_has_no_label() -> None:
    for labels in ((), ("LABEL_0",)):
        (only,) = describe_numbers(np.array([[-3.5]], dtype=np.float32), labels)
        assert only == {"score": -3.5, "label": None, "probabilities": None}


def test_numbers_are_written_with_as_many_digits_as_tell_them_apart() -> None:
    numbers = np.random.default_rng(1).random((200, 2), dtype=np.float32)
    written = describe_numbers(numbers, ("no", "yes"))
    assert np.array_equal(np.array([row["score"] for row in written], dtype=np.float32), numbers[:, 1])


def test_records_are_read_as_they_were_packed() -> None:
    records = [b"[]", None, b'[{"a":"\xe4\xba\xba"}]', b""]
    assert read_objects(pack_objects(records), 4) == records
    for nothing in (None, b""):
        assert read_objects(nothing, 2) == [None, None]


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
