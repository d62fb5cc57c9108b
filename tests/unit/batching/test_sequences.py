"""Columns of sequences are taken apart and joined without a step a sequence, and each row stays whole."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker.batching.sequences import Sequences

Row = tuple[int, int, int, float]
ROWS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 100), st.integers(1, 600), st.floats(1, 1e6)), max_size=30
)


def sequences(rows: list[Row]) -> Sequences:
    requests, positions, lengths, costs = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Sequences(
        np.array(requests, np.int64),
        np.array(positions, np.int32),
        np.array(lengths, np.int32),
        np.array(costs, np.float64),
    )


def rows_of(some: Sequences) -> list[Row]:
    columns = (some.requests, some.positions, some.lengths, some.costs)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@given(ROWS, st.data())
def test_parts_are_joined_to_what_they_were_taken_from(rows: list[Row], data: st.DataObject) -> None:
    whole = sequences(rows)
    middle = data.draw(st.integers(0, len(rows)))
    parts = [whole.part(0, middle), whole.part(middle, len(rows))]
    assert rows_of(Sequences.join(parts)) == rows
    assert [column.dtype for column in (Sequences.join([]).requests, Sequences.join([]).positions)] == [
        np.int64,
        np.int32,
    ]


@given(ROWS.filter(bool), st.data())
def test_rows_are_taken_in_the_order_asked_for(rows: list[Row], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(rows) - 1)))
    taken = sequences(rows).take(np.array(places, np.int64))
    assert rows_of(taken) == [rows[place] for place in places]
    assert taken.max_length == max((row[2] for row in rows_of(taken)), default=0)


@given(ROWS)
def test_in_order_of_requests_each_has_one_run_of_rows_in_the_order_they_had(rows: list[Row]) -> None:
    ordered = sequences(rows).sorted_by_request()
    assert rows_of(ordered) == sorted(rows, key=lambda row: row[0])
    runs = list(ordered.by_request())
    assert [number for number, _ in runs] == sorted({row[0] for row in rows})
    for number, part in runs:
        assert rows_of(ordered)[part] == [row for row in rows if row[0] == number]
