"""Which vectors are known already, by what they were computed of; and that memory is bounded."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vectormill.ragged import Ragged
from worker.engine import reuse as reuse_module
from worker.engine.reuse import ENTRY_BYTES, WAYS, VectorReuse

DIMENSION = 4
ENTRY = 4 * DIMENSION + ENTRY_BYTES
ROOM = 1 << 20


def ragged(rows: list[list[int]]) -> Ragged:
    return Ragged.from_rows([np.array(row, np.int32) for row in rows], np.int32)


def digest(reuse: VectorReuse, rows: list[list[int]], prompt_length: int = 0) -> NDArray[np.uint64]:
    return reuse.digest({"input_ids": ragged(rows)}, np.arange(len(rows)), {"prompt_length": prompt_length})


def vectors(n: int) -> NDArray[np.float32]:
    return np.arange(n * DIMENSION, dtype=np.float32).reshape(n, DIMENSION)


def is_known(reuse: VectorReuse, row: list[int]) -> bool:
    return len(reuse.find(digest(reuse, [row]))[0]) == 1


@pytest.mark.parametrize("block_tokens", [1, 3, 1 << 15])
def test_equal_tokens_are_one_sequence_and_anything_else_is_another(
    block_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse_module, "BLOCK_TOKENS", block_tokens)
    reuse = VectorReuse(ROOM)
    rows = [[1, 2, 3], [1, 2], [1, 2, 3], [], [2, 1], [1], [0], [0, 0], [1, 2, 0], [3, 2, 1], [-1], [1, 2]]
    digests = [row.tobytes() for row in digest(reuse, rows)]
    for i, one in enumerate(rows):
        for j, other in enumerate(rows):
            assert (digests[i] == digests[j]) == (one == other), (one, other)
    assert digest(reuse, [[1, 2, 3]], 1).tobytes() != digests[0]
    assert digest(VectorReuse(ROOM), [[1, 2, 3]]).tobytes() != digests[0], "keys are drawn by chance"


def test_every_input_of_a_model_is_part_of_what_must_be_equal() -> None:
    reuse = VectorReuse(ROOM)
    inputs = {
        "input_ids": ragged([[1, 2], [1, 2], [0, 1]]),
        "token_type_ids": ragged([[0, 1], [0, 0], [1, 2]]),
    }
    exchanged = {"input_ids": inputs["token_type_ids"], "token_type_ids": inputs["input_ids"]}
    first, second = (reuse.digest(some, np.arange(3), {}) for some in (inputs, exchanged))
    names = [row.tobytes() for row in [*first, *second]]
    assert names[0] == names[5]
    assert names[2] == names[3]
    assert len(set(names)) == 4


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=300))
def test_digests_of_similar_sequences_differ_in_either_half(rows: list[list[int]]) -> None:
    different = len({tuple(row) for row in rows})
    digests = digest(VectorReuse(ROOM), rows)
    assert [len(np.unique(digests[:, half])) for half in (0, 1)] == [different, different]


def test_a_sequence_is_known_by_both_halves_of_its_digest() -> None:
    reuse = VectorReuse(ROOM)
    kept = digest(reuse, [[1]])
    reuse.keep(kept, vectors(1), np.array([0]))
    assert len(reuse.find(kept)[0]) == 1
    assert len(reuse.find(kept ^ np.array([0, 1], np.uint64))[0]) == 0


def test_what_was_computed_is_known_to_the_next_request() -> None:
    reuse = VectorReuse(ROOM)
    assert len(reuse.find(digest(reuse, [[1], [2]]))[0]) == 0
    computed = vectors(3)
    reuse.keep(digest(reuse, [[1], [2]]), computed, np.array([0, 2]))
    computed[:] = -1
    rows, found = reuse.find(digest(reuse, [[3], [2], [1], [2]]))
    assert rows.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(found, vectors(3)[[2, 0, 2]])


def test_nothing_is_reused_without_room() -> None:
    for max_bytes in (0, ENTRY - 1):
        reuse = VectorReuse(max_bytes)
        digests = digest(reuse, [[1]])
        assert len(reuse.find(digests)[0]) == 0
        reuse.keep(digests, vectors(1), np.array([0])[: len(digests)])
        assert len(reuse.find(digests)[0]) == 0
        assert reuse.num_bytes == 0


@given(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=20), max_size=60), st.integers(0, 5 * WAYS))
def test_memory_stays_within_its_bound_and_what_is_found_is_the_vector_that_was_kept(
    requests: list[list[int]], num_kept: int
) -> None:
    reuse = VectorReuse(num_kept * ENTRY)
    for letters in requests:
        digests = digest(reuse, [[letter] for letter in letters])
        kept = np.repeat(np.array(letters, np.float32)[:, np.newaxis], DIMENSION, axis=1)
        if len(digests):
            reuse.keep(digests, kept, np.arange(len(letters)))
        assert reuse.num_bytes <= num_kept * ENTRY
        if num_kept:
            rows, found = reuse.find(digests)
            assert (found == kept[rows]).all()
            assert (
                is_known(reuse, [letters[-1]]) or len(letters) > 1
            )  # its set may be full of those beside it


def test_of_a_full_set_the_sequence_goes_that_was_not_used_for_longest() -> None:
    reuse = VectorReuse(3 * ENTRY)
    for number in range(3):
        reuse.keep(digest(reuse, [[number]]), vectors(1), np.array([0]))
    assert is_known(reuse, [0])
    reuse.keep(digest(reuse, [[3]]), vectors(1), np.array([0]))
    assert [is_known(reuse, [number]) for number in range(4)] == [True, False, True, True]
