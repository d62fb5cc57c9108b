"""Round the weights of a model to whole numbers of 8 bits, with a scale for every few of them.

Both backends hold what is rounded here, so that a text gets the same vector from either; who plans asks it too. A
group of numbers that share a scale runs along what a product sums over. Cut there, a matrix keeps its numbers only
where no cut goes through a group.
"""

from dataclasses import dataclass
from math import gcd
from typing import Final

import numpy as np
from numpy.typing import NDArray

# Smallest cosine over 1,000 docstrings with all-MiniLM-L6-v2: 0.9982 with one scale a row, 0.9995 in groups of 128,
# 0.9996 of 64, 0.9997 of 32.
GROUP_SIZE: Final = 64
# Vocabularies; tables of positions and kinds are too small to matter.
SMALLEST_TABLE_ROWS: Final = 4096
SMALLEST_GROUP: Final = 16  # below, scales would take more room than they save


def find_group_size(num_inputs: int) -> int:
    """Return the group size of a whole matrix: all of a row if it has no even groups."""
    size = gcd(num_inputs, GROUP_SIZE)
    return size if size >= SMALLEST_GROUP else num_inputs


def find_cut_group(num_inputs: int, num_parts: int) -> int | None:
    """Return the size of the groups that a cut into so many parts goes through; None where it goes through none."""
    size = find_group_size(num_inputs)
    return size if (num_inputs // num_parts) % size else None


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """A rounded weight: numbers * scales is [rows, groups, group size], to be reshaped as the weight."""

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
