"""Round the weights of a model to 8-bit integers, with one scale per small group of values.

Both backends use these rounded weights, so that a text gets the same vector from either; the planner uses the
group sizes too. A group of values that share a scale runs along the dimension that a product sums over. A
matrix split along that dimension keeps its values only if no split goes through a group.
"""

from dataclasses import dataclass
from math import gcd
from typing import Final

import numpy as np
from numpy.typing import NDArray

# Smallest cosine over 1,000 docstrings with all-MiniLM-L6-v2: 0.9982 with one scale per row, 0.9995 in groups
# of 128, 0.9996 of 64, 0.9997 of 32.
GROUP_SIZE: Final = 64
# Vocabulary tables have at least this many rows; those of positions and types are too small to matter.
SMALLEST_TABLE_ROWS: Final = 4096
SMALLEST_GROUP: Final = 16  # below, scales would take more memory than they save


def find_group_size(num_inputs: int) -> int:
    """Return the group size of a whole matrix: a full row if its rows do not divide into groups."""
    size = gcd(num_inputs, GROUP_SIZE)
    return size if size >= SMALLEST_GROUP else num_inputs


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """A rounded weight: numbers * scales, [rows, groups, group size], reshaped to the weight's shape."""

    numbers: NDArray[np.int8]  # [rows, groups, group size], -127 to 127
    scales: NDArray[np.float32]  # [rows, groups, 1]


def round_linear(weight: NDArray[np.float32], group_size: int | None = None) -> RoundedWeight:
    """Round a weight [out, in] in groups along the inputs.

    `group_size` is that of the whole matrix, if this is a part of it that cuts no group.
    """
    num_outputs, num_inputs = weight.shape
    size = group_size or find_group_size(num_inputs)
    return _round(weight.reshape(num_outputs, num_inputs // size, size))


def round_table(table: NDArray[np.float32]) -> RoundedWeight:
    """Round a table [rows, dim] with one scale per row."""
    return _round(table[:, None])


def _round(values: NDArray[np.float32]) -> RoundedWeight:
    """Round values symmetrically around zero."""
    scales = np.abs(values).max(axis=-1, keepdims=True) / 127
    scales = np.where(scales > 0, scales, 1).astype(np.float32)  # a group may have only zeros
    return RoundedWeight(np.rint(values / scales).astype(np.int8), scales)
