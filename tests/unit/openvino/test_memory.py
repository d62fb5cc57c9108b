"""Memory of a model with openvino: buffers that are used again, mapped weights, and words that are read by row."""

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker.openvino.encoder import Buffers
from worker.openvino.network import MappedWeights
from worker.openvino.word_table import KEPT_BYTES, EmbeddingRows


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


def test_what_was_forgotten_reads_as_before(tmp_path: Path) -> None:
    path = tmp_path / "network.bin"
    content = np.random.default_rng(0).integers(0, 256, 100_001, dtype=np.uint8)
    path.write_bytes(content.tobytes())
    weights = MappedWeights(path)
    assert np.array_equal(weights.bytes, content)
    weights.forget()
    assert np.array_equal(weights.bytes, content)


MEBIBYTE = 1 << 20
DIM = 384


def write_table(path: Path, num_words: int, dim: int = DIM) -> NDArray[np.float32]:
    table = np.random.default_rng(0).standard_normal((num_words, dim), dtype=np.float32)
    path.write_bytes(table.tobytes())
    return table


@pytest.mark.parametrize("word", [-1, 100])
def test_an_id_that_the_vocabulary_does_not_have_is_an_error(word: int, tmp_path: Path) -> None:
    write_table(tmp_path / "words.bin", 100)
    with pytest.raises(IndexError, match=f"id {word} is outside the vocabulary of 100 words"):
        EmbeddingRows(tmp_path / "words.bin", DIM).read(np.array([[5, word]]))


def test_rows_of_late_are_read_once_and_the_others_leave_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write_table(tmp_path / "words.bin", 100)
    words = EmbeddingRows(tmp_path / "words.bin", DIM, kept_bytes=8 * DIM * 4)
    found: list[int] = []
    pread = os.pread

    def note(file: int, size: int, at: int) -> bytes:
        found.append(at // size)
        return pread(file, size, at)

    monkeypatch.setattr(os, "pread", note)
    for ids, expected, reason in [
        ([1, 2, 3, 4], [1, 2, 3, 4], "all are new"),
        ([4, 3, 2, 1, 1], [], "all are kept"),
        ([5, 6, 7, 8], [5, 6, 7, 8], "there is room for eight"),
        ([1, 2], [], "still"),
        ([1, 2, 9], [9], "one of the others has left"),
        ([1, 2, 9], [], "and none of these"),
        ([10, 11, 12, 13, 14, 1, 2, 9], [10, 11, 12, 13, 14], "what the same batch wants stays"),
        (list(range(20)), list(range(20)), "more than there is room for are all read"),
        ([1, 2, 9], [], "and none is kept of them"),
    ]:
        found.clear()
        assert np.array_equal(words.read(np.array(ids)), table[ids]), reason
        assert sorted(found) == expected, reason


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=30), min_size=1, max_size=20))
def test_whatever_was_read_before_every_id_gets_its_row(batches: list[list[int]]) -> None:
    with TemporaryDirectory() as folder:
        table = write_table(Path(folder) / "words.bin", 40, 3)
        words = EmbeddingRows(Path(folder) / "words.bin", 3, kept_bytes=12 * 3 * 4)
        for ids in batches:
            out = np.full((len(ids), 1, 3), np.nan, dtype=np.float32)
            assert words.read(np.array(ids).reshape(-1, 1), out=out) is out
            assert np.array_equal(out[:, 0], table[ids])


def test_rows_that_were_read_do_not_stay_in_memory_as_those_of_a_mapping_do(tmp_path: Path) -> None:
    num_words = 20_000
    write_table(tmp_path / "words.bin", num_words)
    words = EmbeddingRows(tmp_path / "words.bin", DIM)
    mapped = np.memmap(tmp_path / "words.bin", np.float32, mode="r", shape=(num_words, DIM))

    def growth(read: Callable[[NDArray[np.int64]], object]) -> int:
        before = psutil.Process().memory_info().rss
        for input_ids in np.split(np.arange(num_words), 100):
            read(input_ids)
        return int(psutil.Process().memory_info().rss - before)

    assert growth(words.read) < KEPT_BYTES + 2 * MEBIBYTE
    assert growth(lambda input_ids: mapped[input_ids]) > 20 * MEBIBYTE
