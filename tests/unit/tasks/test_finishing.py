"""What is done to texts before the model and to answers after it, and by what a sick process is told."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rexuninlu import GOLDEN
from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.item import find_text_failure
from vectormill.ragged import Ragged
from worker.tasks import finishing
from worker.tasks.extract.extract import Extract
from worker.tasks.extract.extraction import RexUniNLU
from worker.tasks.extract.prompts import IS_BLANK
from worker.tasks.finishing import (
    find_changed,
    find_turned,
    find_unique,
    finish_vectors,
    read_texts,
)

SPEC = EncodingSpec("m", "r", "mean", True, 2, "", 16)
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.text(st.characters(categories=["Cs", "Cc", "Zs", "Lu"]), max_size=4),
        st.sampled_from(["", " ", "\u2003\n", "\x1c", "a\0b", "\ud800", "plain"]),
    ),
    max_size=12,
)


@given(TEXTS, st.sampled_from([4, 1000]), st.sampled_from([0, 1 << 21]))
def test_texts_are_read_together_as_each_is_read_alone(
    texts: list[str], max_chars: int, most_bytes: int
) -> None:
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    alone = [find_text_failure(text, max_chars) for text in encoded]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finishing, "MOST_BYTES_AT_ONCE", most_bytes)
        sound, failures = read_texts(encoded, max_chars)
    assert failures == {index: failure for index, failure in enumerate(alone) if failure is not None}
    assert sound == [text for text, failure in zip(texts, alone, strict=True) if failure is None]


@given(st.lists(st.binary(max_size=2), max_size=30))
def test_every_text_is_found_in_its_place_among_the_different_ones(texts: list[bytes]) -> None:
    unique, places = find_unique(texts)
    assert [unique[place] for place in places.tolist()] == texts
    assert list(unique) == list(dict.fromkeys(texts))


def test_vectors_are_cut_before_they_are_brought_to_unit_length() -> None:
    raw = np.array([[3.0, 4.0, 12.0]], dtype=np.float32)
    np.testing.assert_allclose(finish_vectors(raw.copy(), SPEC), [[0.6, 0.8]], rtol=1e-6)
    np.testing.assert_allclose(finish_vectors(raw.copy(), replace(SPEC, normalize=False)), [[3.0, 4.0]])
    assert finish_vectors(np.zeros((1, 3), np.float32), SPEC).tolist() == [[0.0, 0.0]]


@given(
    st.lists(st.floats(-100, 100, width=32).filter(lambda value: abs(value) > 1e-3), min_size=2, max_size=2)
)
def test_a_vector_brought_to_unit_length_keeps_its_direction(values: list[float]) -> None:
    exact = np.array(values, np.float64)
    finished = finish_vectors(np.array([values], dtype=np.float32), SPEC)[0]
    np.testing.assert_allclose(finished, exact / np.linalg.norm(exact), rtol=1e-5)


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
        ([[1, 2]], [1], "does not have 1 values"),
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
        ([1, 5, 8, 2.0, -30.0], "different cells"),
        ([0], "a different number of cells"),
        ([-1], "a different number of cells"),  # NaN
    ],
)
def test_cells_are_the_same_and_their_logits_nearly(row: list[float], flaw: str) -> None:
    known = [1.0, 5, 7, 2.0, -30.0]
    found = Extract(RexUniNLU(GOLDEN / "model")).find_flaw(rows_of([row]), np.array(known, np.float32))
    assert flaw in found
    assert bool(flaw) == bool(found)


def test_the_known_text_of_an_extraction_has_cells_whatever_the_model_finds() -> None:
    assert Extract(RexUniNLU(GOLDEN / "model")).make_known_inputs("a text").get(IS_BLANK) is not None


def test_a_known_text_with_the_vector_0_must_keep_it() -> None:
    zero = np.zeros(3, np.float32)
    assert not find_turned(rows_of([[0, 0, 0], [0, 0, 0]]), zero)
    assert "not 0 any more" in find_turned(rows_of([[0, 0, 0], [0, 1, 0]]), zero)
    tiny = np.array([1e-15, 0, 0], np.float32)
    assert "cosine of 0.0" in find_turned(rows_of([[0, 0, 0]]), tiny)
