"""int8 codes and packed signs are those of sentence-transformers, and come back as near as a step allows."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vectormill.vectors.quantization import (
    Ranges,
    measure_ranges,
    pack_signs,
    quantize,
    restore,
    widen_ranges,
)

SAMPLE = np.random.default_rng(1).standard_normal((300, 40), dtype=np.float32) / np.float32(6)
# A tenth of these lie outside the ranges of the sample.
VECTORS = np.random.default_rng(2).standard_normal((500, 40), dtype=np.float32) / np.float32(4)
RANGES = measure_ranges(SAMPLE)


def quantize_embeddings(*arguments: Any, **options: Any) -> np.ndarray[Any, Any]:
    """That of sentence-transformers, whose import takes 4 s: whoever collects this file only does without."""
    from sentence_transformers.util.quantization import quantize_embeddings as theirs

    return np.asarray(theirs(*arguments, **options))


def test_codes_are_those_of_sentence_transformers_for_the_same_ranges() -> None:
    theirs = quantize_embeddings(VECTORS, "int8", ranges=np.stack([RANGES.low, RANGES.high]))
    ours = quantize(VECTORS, RANGES)
    assert ours.dtype == np.int8
    assert np.array_equal(ours, theirs)
    assert (ours.min(), ours.max()) == (-128, 127)
    assert np.array_equal(ours, quantize_embeddings(VECTORS, "int8", calibration_embeddings=SAMPLE))


@pytest.mark.parametrize("dimensions", [8, 40, 39])
def test_packed_signs_are_the_ubinary_of_sentence_transformers(dimensions: int) -> None:
    vectors = VECTORS[:, :dimensions].copy()
    vectors[0] = 0  # zero is not above zero
    assert np.array_equal(pack_signs(vectors), quantize_embeddings(vectors, "ubinary"))


def test_a_code_does_not_depend_on_the_company_of_its_vector() -> None:
    alone = np.concatenate([quantize(vector[None], RANGES) for vector in VECTORS])
    assert np.array_equal(alone, quantize(VECTORS, RANGES))


@given(
    arrays(np.float32, (4, 3), elements=st.floats(-8, 8, width=32)),
    arrays(np.float32, (2, 3), elements=st.floats(-4, 4, width=32)),
)
def test_what_lies_in_the_ranges_comes_back_within_half_a_step(vectors: np.ndarray, ends: np.ndarray) -> None:
    ranges = Ranges(ends.min(axis=0), ends.max(axis=0))
    inside = np.clip(vectors, ranges.low, ranges.high)
    restored = restore(quantize(inside, ranges), ranges)
    # A dimension without a range has a step of 1 in which its only value lies at the start.
    allowed = 0.5 * ranges.steps * (1 + 1e-3) + 1e-6
    assert (np.abs(restored - inside) <= allowed).all()


def test_ranges_are_widened_at_both_ends() -> None:
    wider = widen_ranges(measure_ranges(np.array([[-1, 2], [1, 2]], dtype=np.float32)), 0.25)
    assert (wider.low.tolist(), wider.high.tolist()) == ([-1.5, 2], [1.5, 2])


def test_ranges_are_kept_to_the_last_bit() -> None:
    kept = Ranges.from_bytes(RANGES.to_bytes())
    assert np.array_equal(kept.low, RANGES.low)
    assert np.array_equal(kept.high, RANGES.high)
    assert len(RANGES.to_bytes()) == 2 * 4 * 40
