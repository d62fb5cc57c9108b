"""By what a model process is told to be sound: its answers to a known text, by the kind of answer."""

import numpy as np
import pytest

from tests.rexuninlu import GOLDEN
from vectormill.ragged import Ragged
from worker.tasks.extract.extraction import Extract
from worker.tasks.extract.prompts import IS_BLANK
from worker.tasks.finishing import find_changed, find_turned


def rows_of(rows: list[list[float]]) -> Ragged:
    return Ragged.from_rows([np.array(row, np.float32) for row in rows], np.float32)


@pytest.mark.parametrize(
    ("rows", "known", "flaw"),
    [
        ([[3, 4], [3, 4.01]], [3, 4], ""),
        ([[3, 4], [4, -3]], [3, 4], "cosine of 0.000"),
        ([[3, 4, 0.01], [3, 4]], [3, 4], ""),  # rounding made one of them zero
        ([[3, 4, 5], [3, 4]], [3, 4], "changed by 41%"),
        ([[3, np.inf, 5], [3, 4]], [3, 4], "not finite"),
        ([[], []], [3, 4], "changed by 100%"),
    ],
)
def test_vectors_are_compared_by_direction_or_where_lengths_differ_by_size(
    rows: list[list[float]], known: list[float], flaw: str
) -> None:
    found = find_turned(rows_of(rows), np.array(known, np.float32))
    assert flaw in found
    assert bool(flaw) == bool(found)


def test_answers_of_bytes_are_to_be_the_same() -> None:
    known = np.frombuffer(b"known", np.uint8)
    assert not find_turned(Ragged.from_rows([known, known], np.uint8), known)
    assert find_turned(Ragged.from_rows([known, known[:3]], np.uint8), known)


@pytest.mark.parametrize(
    ("rows", "known", "flaw"),
    [
        ([[4.1], [4.0]], [4], ""),  # rounding in 16 bit
        ([[1.0], [4.0]], [4], "changed by 3"),  # of the same direction
        ([[0.05], [0.01]], [0.01], ""),  # near zero an error has the size of the terms of its sum
        ([[0.5], [0.01]], [0.01], "changed by 0.49"),
        ([[8.2, -7.1, 0.1]], [8, -7, -0.1], ""),
        ([[8, -7, 3]], [8, -7, -0.1], "changed by 3.1"),
        ([[1, 1], [1, 1]], [2.5, 1.9], "changed by 1.5"),  # nonsense that points nearly the same way
        ([[np.nan]], [1], "not finite"),
        ([[1, 2]], [1], "another number of values"),
    ],
)
def test_numbers_are_compared_each_for_itself(rows: list[list[float]], known: list[float], flaw: str) -> None:
    found = find_changed(rows_of(rows), np.array(known, np.float32))
    assert flaw in found
    assert bool(flaw) == bool(found)


@pytest.mark.parametrize(
    ("row", "flaw"),
    [
        ([1, 5, 7, 2.05, -30.5], ""),  # 16 bit
        ([1, 5, 7, 2.0, -20.0], "changed by 10"),
        ([1, 5, 8, 2.0, -30.0], "other cells"),
        ([0], "another number of cells"),
        ([-1], "another number of cells"),  # NaN
    ],
)
def test_cells_are_the_same_and_their_logits_nearly(row: list[float], flaw: str) -> None:
    known = [1.0, 5, 7, 2.0, -30.0]
    found = Extract(GOLDEN / "model").find_flaw(rows_of([row]), np.array(known, np.float32))
    assert flaw in found
    assert bool(flaw) == bool(found)


def test_the_known_text_of_an_extraction_has_cells_whatever_the_model_finds() -> None:
    assert Extract(GOLDEN / "model").canary("a text").get(IS_BLANK) is not None
