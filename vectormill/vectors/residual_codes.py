"""Residual codes of token vectors: the nearest of some centroids, and two bits for each value of what remains.

Source: Santhanam et al., ColBERTv2, NAACL 2022, section 3.3, and `colbert/indexing/codecs/residual.py` of its authors.
A residual's value falls into one of four buckets, which are equally frequent, and is restored as its bucket's median.
Knows nothing of tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from vectormill.domain.errors import CodebookMissing
from vectormill.vectors.representations import SMALLEST_NORM

BITS: Final = 2
NUM_BUCKETS: Final = 1 << BITS
VALUES_PER_BYTE: Final = 8 // BITS
DIGEST_BYTES: Final = 8
MOST_CENTROIDS: Final = 1024
# The fewest sampled tokens for each centroid; with fewer, buckets become too narrow for other tokens. With 1,024
# centroids of 43,000 tokens of MiniLM rows ranked no better than with 256, and the worst token was restored less well.
TOKENS_PER_CENTROID: Final = 128
_ROUNDS: Final = 8
# Products with all centroids are computed of so many tokens at once: 4 MiB, for which no new pages have to be mapped.
_TOKENS_AT_ONCE: Final = 1024
# Buckets are measured on so many tokens, whose values are sorted.
_BUCKET_TOKENS: Final = 16_384
# Token vectors are stored as halves, which change a length of 1 by less than this.
_UNIT_TOLERANCE: Final = 0.01

_HEADER: Final = np.dtype("<u4")
_NUMBER: Final = np.dtype("<u2")
_SHIFTS: Final = np.arange(VALUES_PER_BYTE, dtype=np.uint8) * BITS

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Codebook:
    """The centroids and buckets that codes of one vector space refer to. The codes of each row begin with `digest`.

    `cutoffs` [3] divide the buckets, and `values` [4] are restored for them. With `is_unit` all vectors have length 1,
    and so have restored ones.
    """

    centroids: Vectors  # [centroids, width]
    cutoffs: npt.NDArray[np.float32]
    values: npt.NDArray[np.float32]
    is_unit: bool
    digest: bytes

    def to_bytes(self) -> bytes:
        """Return the content, whose digest is the codebook's."""
        return _join(self.centroids, self.cutoffs, self.values, is_unit=self.is_unit)

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        number, width, is_unit = map(int, np.frombuffer(content, _HEADER, 3))
        numbers = np.frombuffer(content, "<f4", NUM_BUCKETS * 2 - 1, 3 * _HEADER.itemsize)
        start = 3 * _HEADER.itemsize + numbers.nbytes
        centroids = np.frombuffer(content, "<f2", number * width, start).reshape(number, width)
        cutoffs, values = np.split(numbers.astype(np.float32), [NUM_BUCKETS - 1])
        return cls(centroids.astype(np.float32), cutoffs, values, bool(is_unit), find_digest(content))

    def encode(self, rows: Sequence[npt.NDArray[np.float16]]) -> list[bytes]:
        """Return the codes of each row's token vectors [t, width]: the digest, uint16 [t] centroids, packed buckets.

        Rows are computed together, since a product of few tokens takes as long as one of many.
        """
        filled = [row for row in rows if len(row)]
        width = self.centroids.shape[1]
        tokens = np.concatenate([np.zeros((0, width), np.float16), *filled])
        nearest = np.empty(len(tokens), _NUMBER)
        packed = np.empty((len(tokens), _count_bytes(width)), np.uint8)
        for start in range(0, len(tokens), _TOKENS_AT_ONCE):
            part = slice(start, start + _TOKENS_AT_ONCE)
            own = tokens[part].astype(np.float32)
            nearest[part] = find_nearest(own, self.centroids)
            own -= self.centroids[nearest[part]]
            buckets = np.zeros((len(own), packed.shape[1] * VALUES_PER_BYTE), np.uint8)
            for cutoff in self.cutoffs:
                buckets[:, :width] += own > cutoff
            shifted = buckets.reshape(len(own), packed.shape[1], VALUES_PER_BYTE) << _SHIFTS
            packed[part] = np.bitwise_or.reduce(shifted, axis=2)
        bounds = np.cumsum([0, *map(len, rows)]).tolist()
        return [
            b"".join((self.digest, nearest[start:end].tobytes(), packed[start:end].tobytes()))
            for start, end in pairwise(bounds)
        ]

    def values_of_bytes(self) -> Vectors:
        """Return the values of each byte [256, 4]."""
        buckets = np.arange(256, dtype=np.uint8)[:, np.newaxis] >> _SHIFTS & NUM_BUCKETS - 1
        values: Vectors = self.values[buckets]
        return values


def measure_codebook(sample: Vectors) -> Codebook:
    """Return the codebook of a sample of token vectors [n, width], in random order, with n at least 1."""
    number = min(MOST_CENTROIDS, max(1, len(sample) // TOKENS_PER_CENTROID))
    centroids = _find_centroids(sample, 1 << number.bit_length() - 1).astype("<f2").astype(np.float32)
    tokens = sample[:_BUCKET_TOKENS]
    residuals = tokens - centroids[find_nearest(tokens, centroids)]
    bounds = np.quantile(residuals, np.arange(1, 2 * NUM_BUCKETS) / (2 * NUM_BUCKETS)).astype(np.float32)
    is_unit = bool(np.abs(np.linalg.norm(sample, axis=1) - 1).max() < _UNIT_TOLERANCE)
    return Codebook.from_bytes(_join(centroids, bounds[1::2], bounds[::2], is_unit=is_unit))


def restore(codes: bytes, codebook: Codebook | None) -> Vectors:
    """Return the token vectors [t, width] that the codes of a row stand for. Raise CodebookMissing.

    `codebook` is that of the row's vector space; None if it has none.
    """
    if codebook is None or codes[:DIGEST_BYTES] != codebook.digest:
        raise CodebookMissing(
            f"A row has residual codes of the codebook {codes[:DIGEST_BYTES].hex()}, but the database has "
            f"{'none' if codebook is None else codebook.digest.hex()} for its vector space. Restore the table "
            "vectormill.codebooks from a backup, or re-index the collection."
        )
    width = codebook.centroids.shape[1]
    num_bytes = _count_bytes(width)
    number = (len(codes) - DIGEST_BYTES) // (_NUMBER.itemsize + num_bytes)
    nearest = np.frombuffer(codes, _NUMBER, number, DIGEST_BYTES)
    packed = np.frombuffer(codes, np.uint8, number * num_bytes, DIGEST_BYTES + nearest.nbytes)
    residuals = codebook.values_of_bytes()[packed].reshape(number, num_bytes * VALUES_PER_BYTE)[:, :width]
    restored: Vectors = residuals + codebook.centroids[nearest]
    if codebook.is_unit:
        restored /= np.maximum(np.linalg.norm(restored, axis=1, keepdims=True), SMALLEST_NORM)
    return restored


def find_nearest(vectors: Vectors, centroids: Vectors) -> npt.NDArray[np.int64]:
    """Return for each vector the number of the nearest centroid, in bounded memory."""
    halves = np.square(centroids).sum(axis=1) / 2
    nearest = np.empty(len(vectors), np.int64)
    for start in range(0, len(vectors), _TOKENS_AT_ONCE):
        products = vectors[start : start + _TOKENS_AT_ONCE] @ centroids.T
        products -= halves
        products.argmax(axis=1, out=nearest[start : start + _TOKENS_AT_ONCE])
    return nearest


def find_digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


def _find_centroids(sample: Vectors, number: int) -> Vectors:
    """Return `number` centroids by the method of Lloyd, from the first vectors; an empty one becomes another vector."""
    centroids = sample[:number].copy()
    for turn in range(1, _ROUNDS + 1):
        nearest = find_nearest(sample, centroids)
        counts = np.bincount(nearest, minlength=number)
        order, filled = np.argsort(nearest, kind="stable"), counts > 0
        starts = (np.cumsum(counts) - counts)[filled]
        centroids[filled] = np.add.reduceat(sample[order], starts, axis=0) / counts[filled, np.newaxis]
        centroids[~filled] = sample[(turn * number + np.flatnonzero(~filled)) % len(sample)]
    return centroids


def _count_bytes(width: int) -> int:
    return -(-width // VALUES_PER_BYTE)


def _join(
    centroids: Vectors, cutoffs: npt.NDArray[np.float32], values: npt.NDArray[np.float32], *, is_unit: bool
) -> bytes:
    header = np.array([*centroids.shape, is_unit], _HEADER)
    return b"".join(
        (
            header.tobytes(),
            *(each.astype("<f4").tobytes() for each in (cutoffs, values)),
            centroids.astype("<f2").tobytes(),
        )
    )
