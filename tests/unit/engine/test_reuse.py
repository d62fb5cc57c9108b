"""Which sequences are computed, which are awaited and which are known; and that memory is bounded."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker.engine.reuse import ENTRY_BYTES, VectorReuse, digest_sequences
from worker.tokens.tokenized import TokenizedTexts

DIMENSION = 4
ROOM = 1 << 20


def tokenize(rows: list[list[int]]) -> TokenizedTexts:
    arrays = [np.array(row, dtype=np.int32) for row in rows]
    return TokenizedTexts.from_rows(arrays, np.zeros(len(rows), dtype=np.bool_), {})


def vectors(n: int) -> NDArray[np.float32]:
    return np.arange(n * DIMENSION, dtype=np.float32).reshape(n, DIMENSION)


def name(letters: str) -> dict[int, bytes]:
    return dict(enumerate(letter.encode() for letter in letters))


def test_equal_tokens_are_one_sequence_and_another_prompt_length_is_another() -> None:
    texts = tokenize([[1, 2, 3], [1, 2], [1, 2, 3], []])
    digests = digest_sequences(texts, [0, 1, 2], 0)
    assert digests[0] == digests[2] != digests[1]
    assert digest_sequences(texts, [0], 1)[0] != digests[0]


def test_what_was_computed_is_known_to_the_next_request() -> None:
    reuse = VectorReuse(ROOM)
    first = reuse.divide(name("ab"), may_wait=True)
    assert (first.known, first.awaited, first.flight.rows) == ({}, {}, {b"a": 0, b"b": 1})
    reuse.land(first.flight, vectors(2), [0, 1])
    second = reuse.divide(name("cb"), may_wait=True)
    assert second.flight.rows == {b"c": 0}
    np.testing.assert_array_equal(second.known[1], vectors(2)[1])


def test_what_another_request_computes_is_awaited_but_not_by_one_in_a_hurry() -> None:
    reuse = VectorReuse(ROOM)
    leader = reuse.divide(name("ab"), may_wait=True)
    follower = reuse.divide(name("b"), may_wait=True)
    assert (follower.awaited, follower.flight.rows) == ({0: leader.flight}, {})
    hurried = reuse.divide(name("b"), may_wait=False)
    assert hurried.flight.rows == {b"b": 0}
    reuse.land(hurried.flight, vectors(1), [0])
    assert not leader.flight.landed.is_set()
    reuse.land(leader.flight, vectors(2), [0, 1])
    assert follower.awaited[0].landed.is_set()
    np.testing.assert_array_equal(leader.flight.vectors[b"b"], vectors(2)[1])


def test_a_request_awaits_its_own_second_occurrence() -> None:
    division = VectorReuse(0).divide(name("aa"), may_wait=False)
    assert (division.flight.rows, division.awaited) == ({b"a": 0}, {1: division.flight})


def test_a_row_that_failed_is_not_shared_and_whoever_awaited_it_computes_it() -> None:
    reuse = VectorReuse(ROOM)
    leader = reuse.divide(name("ab"), may_wait=True)
    follower = reuse.divide(name("a"), may_wait=True)
    reuse.land(leader.flight, vectors(2), [1])
    assert b"a" not in follower.awaited[0].vectors
    assert reuse.divide(name("a"), may_wait=True).flight.rows == {b"a": 0}


def test_nothing_is_reused_across_requests_without_room() -> None:
    reuse = VectorReuse(0)
    leader = reuse.divide(name("a"), may_wait=True)
    assert reuse.divide(name("a"), may_wait=True).flight.rows == {b"a": 0}
    reuse.land(leader.flight, vectors(1), [0])
    assert not reuse.divide(name("a"), may_wait=True).known


def test_a_shared_vector_outlives_the_array_it_came_from() -> None:
    reuse = VectorReuse(ROOM)
    division = reuse.divide(name("a"), may_wait=True)
    array = vectors(1)
    reuse.land(division.flight, array, [0])
    array[:] = -1
    np.testing.assert_array_equal(reuse.divide(name("a"), may_wait=True).known[0], vectors(1)[0])


@given(st.lists(st.integers(0, 9), max_size=200), st.integers(0, 5))
def test_memory_stays_within_its_bound_and_the_sequence_used_last_is_kept(
    letters: list[int], num_kept: int
) -> None:
    reuse = VectorReuse(num_kept * (4 * DIMENSION + ENTRY_BYTES))
    for letter in letters:
        division = reuse.divide({0: bytes([letter])}, may_wait=True)
        reuse.land(division.flight, vectors(1), [0])
        assert reuse.num_bytes <= num_kept * (4 * DIMENSION + ENTRY_BYTES)
        if num_kept:
            assert 0 in reuse.divide({0: bytes([letter])}, may_wait=True).known
