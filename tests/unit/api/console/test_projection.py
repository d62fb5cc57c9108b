"""A map of vectors: against NumPy's own SVD, on rows whose picture is known, and on all that can be odd about rows."""

from dataclasses import replace

import numpy as np
import pytest

from api.console.pictures.projection import find_clusters, project, read_rows
from tests.protocol import SPEC
from vectormill.domain.encoding import BINARY


def draw(num_rows: int, width: int) -> np.ndarray:
    """Rows whose directions count for less and less."""
    random = np.random.default_rng(3)
    rows = random.standard_normal((num_rows, width)) * np.geomspace(8, 0.1, width)
    return (rows + random.standard_normal(width)).astype(np.float32)


@pytest.mark.parametrize(("num_rows", "width"), [(500, 64), (40, 300), (3, 2)])
def test_the_plane_is_that_of_the_first_two_principal_components(num_rows: int, width: int) -> None:
    rows = draw(num_rows, width)
    found = project(rows)
    centred = rows - rows.mean(axis=0)
    left, singular, _ = np.linalg.svd(centred.astype(np.float64), full_matrices=False)
    for axis in range(2):
        assert abs(np.corrcoef(found.points[:, axis], left[:, axis])[0, 1]) > 0.999
    assert found.share == pytest.approx((singular[:2] ** 2).sum() / (singular**2).sum(), rel=0.01)
    assert found.points.min() == 0
    assert found.points.max() == 1


def test_a_map_drawn_again_of_other_rows_is_not_mirrored() -> None:
    rows = draw(2000, 64)
    first, second = project(rows[:1500]), project(rows[500:])
    for axis in range(2):
        assert np.corrcoef(first.points[500:, axis], second.points[:1000, axis])[0, 1] > 0.99


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((0, 8)),  # an empty collection
        np.ones((1, 8)),
        np.ones((5, 8)),  # all alike
        np.arange(6).reshape(6, 1),  # of one dimension
        np.zeros((4, 2)),
    ],
)
def test_rows_that_span_no_plane_have_a_map_all_the_same(rows: np.ndarray) -> None:
    found = project(rows.astype(np.float32))
    assert found.points.shape == (len(rows), 2)
    assert np.isfinite(found.points).all()
    assert 0 <= found.share <= 1
    numbers, _ = find_clusters(rows.astype(np.float32), 6)
    assert len(numbers) == len(rows)


def test_bits_are_signs_and_what_is_not_finite_is_nothing() -> None:
    packed = np.array([[0b10100000], [0b01000000]], dtype=np.uint8)
    assert read_rows(packed, replace(SPEC, dimensions=3, vector_type=BINARY)).tolist() == [
        [1, -1, 1],
        [-1, 1, -1],
    ]
    halves = np.array([[np.nan, 1, np.inf]], dtype=np.float16)
    assert read_rows(halves, SPEC).tolist() == [[0, 1, 0]]


def test_clusters_that_lie_apart_are_found_the_largest_first() -> None:
    random = np.random.default_rng(5)
    centres = np.eye(16)[:3] * 10
    truth = np.repeat([0, 1, 2], [20, 200, 80])
    rows = (centres[truth] + random.standard_normal((300, 16))).astype(np.float32)
    numbers, found = find_clusters(rows, 3)
    assert [len(set(numbers[truth == each])) for each in range(3)] == [1, 1, 1]
    assert np.bincount(numbers).tolist() == [200, 80, 20]
    assert found[0] == pytest.approx(centres[1], abs=0.6)
