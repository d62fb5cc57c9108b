"""Rounding: the numbers of a weight as whole numbers with a scale for every few of them. Knows no framework.

Both backends hold what is rounded here, so that a text gets the same vector from either.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.placement.sizes.weight_groups import find_group_size


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """restored = numbers * scales, [rows, groups, group size], and then the shape of the weight."""

    numbers: NDArray[np.int8]  # [rows, groups, group size], -127 to 127
    scales: NDArray[np.float32]  # [rows, groups, 1]


def round_linear(weight: NDArray[np.float32], group_size: int | None = None) -> RoundedWeight:
    """Round a weight [out, in], in groups along the inputs.

    `group_size` is that of the whole matrix, where this is a part of it that cuts no group.
    """
    num_outputs, num_inputs = weight.shape
    size = group_size or find_group_size(num_inputs)
    return _round(weight.reshape(num_outputs, num_inputs // size, size))


def round_table(table: NDArray[np.float32]) -> RoundedWeight:
    """Round a table [rows, dim], with one scale a row."""
    return _round(table[:, None])


def _round(values: NDArray[np.float32]) -> RoundedWeight:
    """Round symmetrically around zero."""
    scales = _avoid_zero(np.abs(values).max(axis=-1, keepdims=True) / 127)
    return RoundedWeight(np.rint(values / scales).astype(np.int8), scales)


def _avoid_zero(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the scales with any other number in place of zero, for groups of zeros."""
    return np.where(scales > 0, scales, 1).astype(np.float32)
