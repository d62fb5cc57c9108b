"""What is done to texts before and to vectors after the model, as the spec asks. Pure; knows no engine, no devices."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.encoding import EncodingSpec

SMALLEST_NORM: Final = 1e-12


def find_unique(texts: Sequence[bytes]) -> tuple[list[bytes], NDArray[np.int64]]:
    """The different texts in order of first occurrence, and for every text its place among them."""
    indexes: dict[bytes, int] = {}
    places = np.fromiter(
        (indexes.setdefault(text, len(indexes)) for text in texts), np.int64, count=len(texts)
    )
    return list(indexes), places


def finish_vectors(vectors: NDArray[np.float32], spec: EncodingSpec) -> NDArray[np.float32]:
    """Cut to the spec's dimensions (Matryoshka: the leading values), then to unit length if it asks for that.

    The order matters: a cut vector is shorter than 1. Source: Kusupati et al., Matryoshka Representation Learning.
    """
    finished = np.array(vectors[:, : spec.dimensions], dtype=np.float32)
    if spec.normalize:
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # what is not finite is found and reported by the caller
            norms = np.linalg.norm(finished, axis=1, keepdims=True)
            finished /= np.maximum(norms, SMALLEST_NORM)
    return finished
