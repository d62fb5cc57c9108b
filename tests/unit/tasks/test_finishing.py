"""What is done to texts before the model and to vectors after it is, all at once, what it is one by one."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.item import find_text_failure
from worker.tasks import finishing
from worker.tasks.finishing import find_finite, find_unique, finish_vectors, read_texts

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


@given(st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), max_size=10))
def test_a_row_is_finite_when_each_of_its_values_is_however_large(rows: list[list[float]]) -> None:
    vectors = np.array(rows, dtype=np.float32).reshape(-1, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_finite(vectors).tolist() == np.isfinite(vectors).all(axis=1).tolist()


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
