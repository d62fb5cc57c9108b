"""Weight groups: how many numbers of a compressed weight share one scale. Pure; whoever rounds and whoever plans ask.

A group runs along what a product sums over. Cut there, a matrix keeps its numbers only where no cut goes through a
group.
"""

from math import gcd
from typing import Final

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
