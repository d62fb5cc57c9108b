"""Representations: the outputs of one text, dense, sparse and multi-vector, and their packed form.

The packed form is what a model process returns for a text and what a job keeps with its chunks: four uint32, the
numbers of dense values d, of sparse weights k, of token vectors t and their length m; then float32 [d], uint32 [k]
indices, float32 [k] weights and float16 [t, m], all little-endian and without gaps.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.task import DENSE, MULTI_VECTOR, SPARSE

# The most non-zero values of pgvector's sparsevec (SPARSEVEC_MAX_NNZ in src/sparsevec.h).
MAX_WEIGHTS: Final = 16_000

SMALLEST_NORM: Final = 1e-12  # avoids division by zero, as in torch.nn.functional.normalize
# Rounding a vector of length 1, for example to halves, may change its length by this much.
NORM_TOLERANCE: Final = 0.01

_HEADER: Final = np.dtype("<u4")
_HEADER_FIELDS: Final = 4
NO_NUMBERS: Final = np.zeros(0, np.float32)
NO_INDICES: Final = np.zeros(0, np.uint32)
_NO_VECTORS: Final = np.zeros((0, 0), np.float16)


# The dimensions of the rows whose token vectors are in memory at once: 100 rows of 300 tokens and 128 dimensions are
# 15 MB as float32, and 12 rows of 8,192 tokens and 1,024 dimensions, which bge-m3 may have, are 400 MB.
_DIMENSIONS_AT_ONCE: Final = 12_800


def limit_rows(width: int) -> int:
    """Return the number of rows whose token vectors, of `width` dimensions, are in memory at once."""
    return max(1, _DIMENSIONS_AT_ONCE // width)


@dataclass(frozen=True, slots=True, eq=False)
class Representations:
    """The outputs of one text; those that were not asked for are empty.

    `indices` are ascending places in the vocabulary, from 0, and `weights` their weights, none of them 0.
    """

    dense: NDArray[np.float32] = field(default_factory=lambda: NO_NUMBERS)  # [d]
    indices: NDArray[np.uint32] = field(default_factory=lambda: NO_INDICES)  # [k]
    weights: NDArray[np.float32] = field(default_factory=lambda: NO_NUMBERS)  # [k]
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


def measure_agreement(first: Representations, second: Representations) -> dict[str, float]:
    """Return how well two representations of one text agree, by output: 1 if they are equal or neither has it.

    Of dense vectors it is the cosine, of sparse ones the cosine less a part for unlike lengths, and of multi-vectors
    the smallest such number of a token's vectors. It is 0 if they have other dimensions or another number of tokens.
    """
    dense = tokens = 0.0
    if len(first.dense) == len(second.dense):
        dense = _measure(first.dense[np.newaxis], second.dense[np.newaxis], by_length=False)
    places = np.union1d(first.indices, second.indices)
    weights = np.zeros((2, len(places)), np.float32)
    for row, own in zip(weights, (first, second), strict=True):
        row[np.searchsorted(places, own.indices)] = own.weights
    if first.vectors.shape == second.vectors.shape:
        tokens = _measure(first.vectors.astype(np.float32), second.vectors.astype(np.float32), by_length=True)
    return {DENSE: dense, SPARSE: _measure(weights[:1], weights[1:], by_length=True), MULTI_VECTOR: tokens}


def _measure(first: NDArray[np.float32], second: NDArray[np.float32], *, by_length: bool) -> float:
    """Return the smallest agreement of rows [n, d], NaN if a row has NaN.

    By direction it is the cosine. By length too, as for vectors whose inner products are compared, it is the cosine
    less the squared difference of the lengths divided by twice their product: 0.75 if one is twice as long.
    """
    if not first.size:
        return 1.0
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    if by_length:
        squares = np.square(first - second).sum(axis=1)
        return float(np.maximum(1 - squares / np.maximum(2 * norms, SMALLEST_NORM), -1.0).min())
    return float((np.einsum("nd,nd->n", first, second) / np.maximum(norms, SMALLEST_NORM)).min())


def send_sparse(indices: NDArray[np.uint32], weights: NDArray[np.float32], dimensions: int) -> bytes:
    """Return a sparse vector as pgvector's sparsevec in binary form.

    Source: sparsevec_recv in pgvector's src/sparsevec.c: the numbers of dimensions and of weights and a zero in int32,
    then the indices from 0 in int32, and the weights in float4.
    """
    header = np.array([dimensions, len(indices), 0], ">i4")
    return b"".join((header.tobytes(), indices.astype(">i4").tobytes(), weights.astype(">f4").tobytes()))


def read_sparse(wire: bytes) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """Return the indices and weights of a sparsevec in binary form."""
    num_weights = int(np.frombuffer(wire, ">i4", 1, 4)[0])
    indices = np.frombuffer(wire, ">i4", num_weights, 12)
    return indices.astype(np.uint32), np.frombuffer(wire, ">f4", num_weights, 12 + indices.nbytes).astype(
        np.float32
    )


def send_vectors(vectors: NDArray[np.float16], half_oid: int) -> bytes:
    """Return token vectors [t, m] as an array of halfvec in binary form; `half_oid` is the OID of halfvec."""
    if not len(vectors):
        return np.array([0, 0, half_oid], ">i4").tobytes()
    columns = np.empty(len(vectors), _array_element(vectors.shape[1]))
    columns["bytes"], columns["dimensions"], columns["zero"] = columns.itemsize - 4, vectors.shape[1], 0
    columns["values"] = vectors
    return np.array([1, 0, half_oid, len(vectors), 1], ">i4").tobytes() + columns.tobytes()


def read_vectors(wire: bytes, width: int) -> NDArray[np.float16]:
    """Return the token vectors [t, m] of an array of halfvec in binary form; `width` is m, for an empty one too."""
    num_axes = int(np.frombuffer(wire, ">i4", 1)[0])
    if not num_axes:
        return np.zeros((0, width), np.float16)
    return np.frombuffer(wire, _array_element(width), offset=20)["values"].astype(np.float16)


def _array_element(width: int) -> "np.dtype[np.void]":
    return np.dtype([("bytes", ">i4"), ("dimensions", ">i2"), ("zero", ">i2"), ("values", ">f2", (width,))])
