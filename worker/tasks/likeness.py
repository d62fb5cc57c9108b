"""Likeness: what is wrong with a model's answers to a text whose answer is known. By the kind of answer, of which each
task has one; a sum is taken in another order in another batch, so that hardly any answer is the same to the bit.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.ragged import Ragged

Values = NDArray[Any]

# Two batches of one process, in whatever precision, are nearer; what a sick one answers is far off.
SMALLEST_COSINE: Final = 0.99
SMALLEST_SIZE: Final = float(np.finfo(np.float32).tiny)  # of what is divided by
# Of numbers that are read each for itself, as a classifier's: a share of the largest, or this where all are smaller.
LARGEST_CHANGE: Final = 0.1


def find_turned(results: Ragged, expected: Values) -> str:
    """Return what is wrong with rows that should all be the vector `expected`; empty if nothing is.

    Vectors are compared by their direction. Where rows of float32 have not all as many values as before, rounding may
    have made one of them zero, as of weights that are kept where they are not: these are compared by their size alone.
    Bytes are the same.
    """
    if expected.dtype != np.float32:
        is_same = all(np.array_equal(results.row(index), expected) for index in range(len(results)))
        return "" if is_same else "its answer has turned to another"
    if not np.isfinite(results.covered).all() or not np.isfinite(expected).all():
        return "its vector is not finite"
    size = max(float(np.linalg.norm(expected)), SMALLEST_SIZE)
    if (results.lengths == len(expected)).all():
        vectors = results.matrix
        sizes = np.maximum(np.linalg.norm(vectors, axis=1), SMALLEST_SIZE)
        cosine = float((vectors @ expected / (sizes * size)).min())
        return f"its vector has turned to a cosine of {cosine:.3f}" if cosine < SMALLEST_COSINE else ""
    sizes = np.array([np.linalg.norm(results.row(index)) for index in range(len(results))])
    change = float(np.abs(sizes / size - 1).max())
    return f"its answer has changed by {change:.0%}" if change > 1 - SMALLEST_COSINE else ""


def find_changed(results: Ragged, expected: Values) -> str:
    """Return what is wrong with rows of numbers that are compared one by one; empty if nothing is. A direction would
    say nothing of one number, which is all that a reranker answers, and little of two.
    """
    if (results.lengths != len(expected)).any():
        return f"its answer has another number of values than {len(expected)}"
    if not np.isfinite(results.covered).all() or not np.isfinite(expected).all():
        return "its answer is not finite"
    if not len(expected):
        return ""
    change = float(np.abs(results.matrix - expected).max())
    most = LARGEST_CHANGE * max(1.0, float(np.abs(expected).max()))
    return f"a number of its answer has changed by {change:.3g}" if change > most else ""
