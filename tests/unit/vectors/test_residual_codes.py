"""Residual codes, compared with a plain computation, and what they change in the order of MaxSim."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from vectormill.domain.errors import CodebookMissing
from vectormill.search.late_interaction import measure_maxsim
from vectormill.vectors.residual_codes import Codebook, find_digest, measure_codebook, restore

Vectors = npt.NDArray[np.float32]


def draw_tokens(number: int, width: int = 32, seed: int = 3) -> Vectors:
    """Return unit vectors around some directions, as token vectors are."""
    numbers = np.random.default_rng(seed)
    directions = np.random.default_rng(0).standard_normal((40, width))
    drawn = directions[numbers.integers(40, size=number)] + 0.5 * numbers.standard_normal((number, width))
    unit: Vectors = (
        (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float16).astype(np.float32)
    )
    return unit


def code(codebook: Codebook, vectors: npt.NDArray[np.floating[Any]]) -> bytes:
    (codes,) = codebook.encode([vectors.astype(np.float16)])
    return codes


def code_plainly(vectors: Vectors, codebook: Codebook) -> tuple[list[int], list[list[int]], Vectors]:
    """Return the number of each vector's centroid, the bucket of each value, and what these stand for."""
    numbers, buckets, restored = [], [], []
    for vector in vectors:
        distances = [float(((vector - centroid) ** 2).sum()) for centroid in codebook.centroids]
        number = distances.index(min(distances))
        rest = vector - codebook.centroids[number]
        own = [sum(bool(value > cutoff) for cutoff in codebook.cutoffs) for value in rest]
        whole = codebook.centroids[number] + np.array([codebook.values[bucket] for bucket in own])
        numbers.append(number)
        buckets.append(own)
        restored.append(whole / np.linalg.norm(whole) if codebook.is_unit else whole)
    return numbers, buckets, np.array(restored)


@pytest.mark.parametrize("width", [32, 30, 4, 3])
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_codes_are_those_of_a_plain_computation(width: int, scale: float) -> None:
    codebook = measure_codebook(draw_tokens(2000, width) * scale)
    assert codebook.is_unit == (scale == 1)
    vectors = (draw_tokens(50, width, seed=4) * scale).astype(np.float16).astype(np.float32)
    codes = code(codebook, vectors)
    numbers, buckets, restored = code_plainly(vectors, codebook)
    num_bytes = -(-width // 4)
    assert codes[:8] == codebook.digest == find_digest(codebook.to_bytes())
    assert len(codes) == 8 + 50 * (2 + num_bytes)
    assert np.frombuffer(codes, "<u2", 50, 8).tolist() == numbers
    packed = np.frombuffer(codes, np.uint8, offset=108).reshape(50, num_bytes)
    assert [
        [int(row[place // 4]) >> place % 4 * 2 & 3 for place in range(width)] for row in packed
    ] == buckets
    np.testing.assert_allclose(restore(codes, codebook), restored, atol=1e-5)


def test_a_codebook_is_measured_from_its_sample() -> None:
    sample = draw_tokens(20_000)
    codebook = measure_codebook(sample)
    assert len(codebook.centroids) == 128  # at least 128 tokens for each, and a power of two
    restored = restore(code(codebook, sample), codebook)
    cosines = np.einsum("nd,nd->n", restored, sample)
    assert cosines.mean() > 0.96
    nearest = codebook.centroids / np.linalg.norm(codebook.centroids, axis=1, keepdims=True)
    assert cosines.mean() > (sample @ nearest.T).max(axis=1).mean() + 0.05, "residuals add nothing"
    buckets = np.frombuffer(code(codebook, sample), np.uint8, offset=8 + 2 * 20_000)
    shares = np.bincount((buckets[:, np.newaxis] >> np.arange(0, 8, 2) & 3).ravel()) / sample.size
    assert shares == pytest.approx([0.25] * 4, abs=0.01)


def test_a_codebook_is_the_same_after_it_was_stored() -> None:
    codebook = measure_codebook(draw_tokens(500))
    read = Codebook.from_bytes(codebook.to_bytes())
    vectors = draw_tokens(20, seed=5).astype(np.float16)
    assert read.digest == codebook.digest
    assert code(read, vectors) == code(codebook, vectors)
    np.testing.assert_array_equal(
        restore(code(codebook, vectors), read), restore(code(codebook, vectors), codebook)
    )


def test_few_or_equal_tokens_have_a_codebook_too() -> None:
    for sample in (draw_tokens(1), np.ones((200, 8), np.float32)):
        codebook = measure_codebook(sample)
        np.testing.assert_allclose(restore(code(codebook, sample), codebook), sample, atol=1e-3)
        assert restore(code(codebook, sample[:0]), codebook).shape == sample[:0].shape


def test_the_best_rows_by_codes_are_those_by_halves() -> None:
    codebook = measure_codebook(draw_tokens(20_000))
    rows = [draw_tokens(30, seed=100 + row).astype(np.float16) for row in range(100)]
    coded = [restore(codes, codebook) for codes in codebook.encode(rows)]
    numbers = np.random.default_rng(9)
    for target in range(0, 100, 10):
        noise = 0.05 * numbers.standard_normal((8, 32))
        query = (rows[target][:8] + noise).astype(np.float32)
        by_halves, by_codes = measure_maxsim(query, rows), measure_maxsim(query, coded)
        assert by_codes.argmax() == by_halves.argmax() == target
        assert np.corrcoef(by_halves, by_codes)[0, 1] > 0.97


def test_rows_that_are_coded_together_have_the_codes_that_each_has_alone() -> None:
    codebook = measure_codebook(draw_tokens(2000))
    rows = [draw_tokens(number, seed=number).astype(np.float16) for number in (3, 1500, 0, 7)]
    rows[2] = np.zeros((0, 0), np.float16)  # a row without tokens, as a packed form gives it back
    assert codebook.encode(rows) == [codebook.encode([row])[0] for row in rows]
    assert codebook.encode([]) == []


def test_codes_of_another_codebook_are_refused() -> None:
    first, second = (measure_codebook(draw_tokens(500, seed=seed)) for seed in (1, 2))
    codes = code(first, draw_tokens(5))
    with pytest.raises(
        CodebookMissing, match=f"{first.digest.hex()}.* has {second.digest.hex()} for its vector"
    ):
        restore(codes, second)
    with pytest.raises(CodebookMissing, match="has none for its vector space"):
        restore(codes, None)
