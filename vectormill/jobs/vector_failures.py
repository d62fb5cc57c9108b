"""The item errors of vectors that have no direction, which no collection stores."""

import numpy as np
import numpy.typing as npt

from vectormill.domain.encoding import FLOAT32
from vectormill.jobs.item import ITEM_ERROR_CODES, NON_FINITE_VECTOR, ZERO_VECTOR, ItemFailure
from vectormill.vectors.vector_types import VECTOR_TYPE_BY_NAME, VectorType, find_unfit


def find_vector_failures(
    vectors: npt.NDArray[np.float32], kind: VectorType = VECTOR_TYPE_BY_NAME[FLOAT32]
) -> dict[int, ItemFailure]:
    """Return the failures of the rows of [n, d] that cannot be compared with others once they are stored so."""
    if not vectors.size:
        return {}
    return {
        row: ItemFailure(code, ITEM_ERROR_CODES[code])
        for code, is_so in zip((NON_FINITE_VECTOR, ZERO_VECTOR), find_unfit(vectors, kind), strict=True)
        for row in np.flatnonzero(is_so).tolist()
    }
