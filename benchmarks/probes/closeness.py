"""Closeness: how near two sets of vectors of the same texts are. Knows nothing of who made them."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Closeness:
    """Cosines over all pairs of rows."""

    smallest: float
    mean: float

    @classmethod
    def between(cls, ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> Self:
        """Row by row, in float64. A row that is not finite makes both numbers NaN, so that it cannot go unseen."""
        left, right = ours.astype(np.float64), theirs.astype(np.float64)
        lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
        cosines = np.einsum("nd,nd->n", left, right) / np.maximum(lengths, np.finfo(np.float64).tiny)
        return cls(float(cosines.min()), float(cosines.mean()))
