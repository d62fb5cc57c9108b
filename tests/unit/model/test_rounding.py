"""Weights as whole numbers with scales."""

import numpy as np
import pytest

from worker.model.weights.rounding import RoundedWeight, pack_int4, round_linear, round_table


def restore(rounded: RoundedWeight) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    zeros = 0.0 if rounded.zeros is None else rounded.zeros.astype(np.float32)
    restored: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = (
        rounded.numbers.astype(np.float32) - zeros
    ) * rounded.scales
    return restored


@pytest.mark.parametrize(
    ("num_inputs", "precision", "group_size"),
    [
        (384, "int8", 64),
        (384, "int4", 32),
        (48, "int8", 16),  # the largest group that divides a row evenly
        (100, "int8", 100),  # groups of 4 would have more scales than they save
        (7, "int4", 7),
    ],
)
def test_no_number_is_further_from_its_weight_than_half_a_step(
    num_inputs: int, precision: str, group_size: int
) -> None:
    weight = np.random.default_rng(0).standard_normal((5, num_inputs)).astype(np.float32)
    rounded = round_linear(weight, precision)
    assert rounded.numbers.shape == (5, num_inputs // group_size, group_size)
    error = np.abs(restore(rounded) - weight.reshape(rounded.numbers.shape))
    # With a zero point that is rounded too, a number at the end of the range may be a whole step away.
    assert (error <= rounded.scales * (0.501 if precision == "int8" else 1.001)).all()


def test_a_group_of_zeros_stays_zero() -> None:
    weight = np.zeros((2, 64), np.float32)
    for precision in ("int8", "int4"):
        assert not restore(round_linear(weight, precision)).any()
    assert not restore(round_table(weight)).any()


def test_a_table_has_one_scale_a_row() -> None:
    table = np.array([[1.0, -2.0], [100.0, 50.0]], np.float32)
    rounded = round_table(table)
    assert rounded.scales.shape == (2, 1, 1)
    np.testing.assert_allclose(restore(rounded)[:, 0], table, atol=0.5 * rounded.scales.max())


def test_two_numbers_share_a_byte_and_the_first_has_the_lower_half() -> None:
    assert pack_int4(np.array([[1, 2], [15, 0]], np.uint8)).tolist() == [0x21, 0x0F]
    assert pack_int4(np.array([3, 4, 5], np.uint8)).tolist() == [0x43, 0x05]
