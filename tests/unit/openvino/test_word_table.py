"""Word embeddings that are read from a file by row."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from worker.openvino.word_table import WordTable

MEBIBYTE = 1 << 20
DIM = 384


def write_table(path: Path, num_words: int, dim: int = DIM) -> NDArray[np.float32]:
    table = np.random.default_rng(0).standard_normal((num_words, dim), dtype=np.float32)
    path.write_bytes(table.tobytes())
    return table


def test_every_id_gets_its_row_however_often_it_occurs(tmp_path: Path) -> None:
    table = write_table(tmp_path / "words.bin", 100)
    input_ids = np.array([[99, 0, 7], [7, 7, 0]], dtype=np.int64)
    found = WordTable(tmp_path / "words.bin", DIM).read(input_ids)
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    assert np.array_equal(found, table[input_ids])


@pytest.mark.parametrize("word", [-1, 100])
def test_an_id_that_the_vocabulary_does_not_have_is_an_error(word: int, tmp_path: Path) -> None:
    write_table(tmp_path / "words.bin", 100)
    with pytest.raises(IndexError, match=f"vocabulary of 100 words has no id {word}"):
        WordTable(tmp_path / "words.bin", DIM).read(np.array([[5, word]]))


def test_a_conversion_that_is_deleted_is_still_read(tmp_path: Path) -> None:
    table = write_table(tmp_path / "words.bin", 10)
    words = WordTable(tmp_path / "words.bin", DIM)
    (tmp_path / "words.bin").unlink()
    assert np.array_equal(words.read(np.array([[3]])), table[[[3]]])


def test_rows_that_were_read_do_not_stay_in_memory_as_those_of_a_mapping_do(tmp_path: Path) -> None:
    num_words = 20_000
    write_table(tmp_path / "words.bin", num_words)
    words = WordTable(tmp_path / "words.bin", DIM)
    mapped = np.memmap(tmp_path / "words.bin", np.float32, mode="r", shape=(num_words, DIM))

    def growth(read: Callable[[NDArray[np.int64]], object]) -> int:
        before = psutil.Process().memory_info().rss
        for input_ids in np.split(np.arange(num_words), 100):
            read(input_ids)
        return int(psutil.Process().memory_info().rss - before)

    assert growth(words.read) < 4 * MEBIBYTE
    assert growth(lambda input_ids: mapped[input_ids]) > 20 * MEBIBYTE
