"""Weight groups: how many numbers of a compressed weight share one scale. Pure; whoever rounds and whoever plans ask.

A group runs along what a product sums over. Cut there, a matrix keeps its numbers only where no cut goes through a
group.
"""

from collections.abc import Mapping
from math import gcd
from typing import Final

# Smallest cosine over 1,000 docstrings with all-MiniLM-L6-v2: int8 0.9982 with one scale a row, 0.9995 in groups of
# 128, 0.9996 of 64, 0.9997 of 32; int4 0.940 in groups of 64, 0.955 of 32, 0.959 of 16.
GROUP_SIZES: Final[Mapping[str, int]] = {"int8": 64, "int4": 32}
# Vocabularies; tables of positions and kinds are too small to matter. int8 in either precision: a token's own vector
# is one row, whose error no sum averages.
SMALLEST_TABLE_ROWS: Final = 4096
SMALLEST_GROUP: Final = 16  # below, scales would take more room than they save


def find_group_size(num_inputs: int, precision: str) -> int:
    """Of a whole matrix; all of a row where it has no even groups."""
    size = gcd(num_inputs, GROUP_SIZES[precision])
    return size if size >= SMALLEST_GROUP else num_inputs


def find_cut_group(num_inputs: int, num_parts: int, precision: str) -> int | None:
    """The size of the groups that a cut into so many parts goes through; None where it goes through none."""
    size = find_group_size(num_inputs, precision)
    return size if (num_inputs // num_parts) % size else None
