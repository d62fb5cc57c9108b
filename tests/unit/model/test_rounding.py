"""Weights as whole numbers with scales."""

import numpy as np
import pytest
from numpy.typing import NDArray

from vectormill.models.rounding import RoundedWeight, round_linear, round_table


def restore(rounded: RoundedWeight) -> NDArray[np.float32]:
    return rounded.numbers.astype(np.float32) * rounded.scales


@pytest.mark.parametrize(
    ("num_inputs", "group_size"),
    [
        (384, 64),
        (48, 16),  # the largest group that divides a row evenly
        (100, 100),  # groups of 4 would have more scales than they save
        (7, 7),
    ],
)
def test_no_number_is_further_from_its_weight_than_half_a_step(num_inputs: int, group_size: int) -> None:
    weight = np.random.default_rng(0).standard_normal((5, num_inputs)).astype(np.float32)
    rounded = round_linear(weight)
    assert rounded.numbers.shape == (5, num_inputs // group_size, group_size)
    error = np.abs(restore(rounded) - weight.reshape(rounded.numbers.shape))
    assert (error <= rounded.scales * 0.501).all()


def test_a_group_of_zeros_stays_zero() -> None:
    weight = np.zeros((2, 64), np.float32)
    assert not restore(round_linear(weight)).any()
    assert not restore(round_table(weight)).any()


def test_a_table_has_one_scale_a_row() -> None:
    table = np.array([[1.0, -2.0], [100.0, 50.0]], np.float32)
    rounded = round_table(table)
    assert rounded.scales.shape == (2, 1, 1)
    np.testing.assert_allclose(restore(rounded)[:, 0], table, atol=0.5 * rounded.scales.max())
