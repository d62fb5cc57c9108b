"""Representations: the outputs of one text, dense, sparse and multi-vector, and their packed form.

The packed form is what a model process returns for a text and what a job keeps with its chunks: four uint32, the
numbers of dense values d, of sparse weights k, of token vectors t and their length m; then float32 [d], uint32 [k]
indices, float32 [k] weights and float16 [t, m], all little-endian and without gaps.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

_HEADER: Final = np.dtype("<u4")
_HEADER_FIELDS: Final = 4
_NO_NUMBERS: Final = np.zeros(0, np.float32)
_NO_INDICES: Final = np.zeros(0, np.uint32)
_NO_VECTORS: Final = np.zeros((0, 0), np.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Representations:
    """The outputs of one text; those that were not asked for are empty.

    `indices` are ascending places in the vocabulary, from 0, and `weights` their weights, none of them 0.
    """

    dense: NDArray[np.float32] = field(default_factory=lambda: _NO_NUMBERS)  # [d]
    indices: NDArray[np.uint32] = field(default_factory=lambda: _NO_INDICES)  # [k]
    weights: NDArray[np.float32] = field(default_factory=lambda: _NO_NUMBERS)  # [k]
    vectors: NDArray[np.float16] = field(default_factory=lambda: _NO_VECTORS)  # [t, m]

    def pack(self) -> bytes:
        """Return the packed form."""
        header = np.array([len(self.dense), len(self.indices), *self.vectors.shape], _HEADER)
        return b"".join(
            (
                header.tobytes(),
                self.dense.astype("<f4", copy=False).tobytes(),
                self.indices.astype("<u4", copy=False).tobytes(),
                self.weights.astype("<f4", copy=False).tobytes(),
                self.vectors.astype("<f2", copy=False).tobytes(),
            )
        )


def unpack(content: bytes | memoryview) -> Representations:
    """Return the representations of a packed form, as views of it. Raise ValueError if it is not one."""
    num_dense, num_weights, num_vectors, width = map(int, np.frombuffer(content, _HEADER, _HEADER_FIELDS))
    bounds = np.cumsum(
        [
            _HEADER.itemsize * _HEADER_FIELDS,
            4 * num_dense,
            4 * num_weights,
            4 * num_weights,
            2 * num_vectors * width,
        ]
    ).tolist()
    if len(content) != bounds[-1]:
        raise ValueError(f"a packed form of {bounds[-1]} bytes has {len(content)}")
    return Representations(
        np.frombuffer(content, "<f4", num_dense, bounds[0]),
        np.frombuffer(content, "<u4", num_weights, bounds[1]),
        np.frombuffer(content, "<f4", num_weights, bounds[2]),
        np.frombuffer(content, "<f2", num_vectors * width, bounds[3]).reshape(num_vectors, width),
    )
