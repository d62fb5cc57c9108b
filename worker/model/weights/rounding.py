"""Rounding: the numbers of a weight as whole numbers with a scale for every few of them. Knows no framework.

Both backends hold what is rounded here, so that a text gets the same vector from either.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.encoder.choice import INT8
from worker.placement.sizes.weight_groups import find_group_size


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """restored = (numbers - zeros) * scales, [rows, groups, group size], and then the shape of the weight.

    `numbers` are int8 without `zeros`, or uint8 from 0 to 15 with them.
    """

    numbers: NDArray[np.int8] | NDArray[np.uint8]
    scales: NDArray[np.float32]  # [rows, groups, 1]
    zeros: NDArray[np.uint8] | None  # [rows, groups, 1]


def round_linear(weight: NDArray[np.float32], precision: str, group_size: int | None = None) -> RoundedWeight:
    """[out, in], in groups along what a product sums over.

    `group_size` is that of the whole matrix, where this is a part of it that cuts no group.
    """
    num_outputs, num_inputs = weight.shape
    size = group_size or find_group_size(num_inputs, precision)
    grouped = weight.reshape(num_outputs, num_inputs // size, size)
    return _round_int8(grouped) if precision == INT8 else _round_int4(grouped)


def round_table(table: NDArray[np.float32]) -> RoundedWeight:
    """[rows, dim], one scale a row."""
    return _round_int8(table[:, None])


def _round_int8(values: NDArray[np.float32]) -> RoundedWeight:
    """-127 to 127, symmetric."""
    scales = _avoid_zero(np.abs(values).max(axis=-1, keepdims=True) / 127)
    return RoundedWeight(np.rint(values / scales).astype(np.int8), scales, None)


def _round_int4(values: NDArray[np.float32]) -> RoundedWeight:
    """0 to 15 with a zero point: sixteen levels are too few to waste some of them on one side."""
    low = np.minimum(values.min(axis=-1, keepdims=True), 0)
    high = np.maximum(values.max(axis=-1, keepdims=True), 0)
    scales = _avoid_zero((high - low) / 15)
    zeros = np.rint(-low / scales)
    numbers = np.clip(np.rint(values / scales + zeros), 0, 15)
    return RoundedWeight(numbers.astype(np.uint8), scales, zeros.astype(np.uint8))


def pack_int4(numbers: NDArray[Any]) -> NDArray[np.uint8]:
    """Two numbers a byte, the first in the lower half; flat."""
    halves = numbers.ravel().astype(np.uint8, copy=False)
    if len(halves) % 2:
        halves = np.append(halves, np.uint8(0))
    packed: NDArray[np.uint8] = halves[0::2] | halves[1::2] << np.uint8(4)
    return packed


def _avoid_zero(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """A group of zeros has any scale but zero."""
    return np.where(scales > 0, scales, 1).astype(np.float32)
