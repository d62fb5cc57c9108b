"""Memory of batches that is used again."""

import numpy as np

from worker.openvino.encoder import Buffers


def test_a_buffer_comes_back_in_another_shape_and_is_lent_to_one_at_a_time() -> None:
    buffers = Buffers(2)
    first = buffers.take((4, 8, 2))
    second = buffers.take((4, 8, 2))
    assert not np.shares_memory(first, second)
    buffers.give_back(first)
    again = buffers.take((3, 5, 2))
    assert np.shares_memory(again, first)
    assert again.flags.c_contiguous
    buffers.give_back(again)
    assert np.shares_memory(buffers.take((4, 8, 2)), first)  # whole, though a part of it was lent


def test_a_buffer_that_is_too_small_makes_room_for_a_larger_one() -> None:
    buffers = Buffers(1)
    small = buffers.take((2, 2))
    buffers.give_back(small)
    large = buffers.take((8, 8))
    assert large.shape == (8, 8)
    buffers.give_back(large)
    assert np.shares_memory(buffers.take((2, 2)), large)


def test_no_more_are_kept_than_are_used_at_a_time_and_none_when_they_are_released() -> None:
    buffers = Buffers(1)
    taken = [buffers.take((4, 4)) for _ in range(3)]
    for each in taken:
        buffers.give_back(each)
    assert np.shares_memory(buffers.take((4, 4)), taken[0])
    assert not any(np.shares_memory(buffers.take((4, 4)), each) for each in taken)
    buffers.give_back(taken[1])
    buffers.release()
    assert not np.shares_memory(buffers.take((4, 4)), taken[1])
