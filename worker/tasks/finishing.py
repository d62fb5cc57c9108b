"""Prepare texts for the model, finish its answers as the spec asks, and judge answers to a text whose answer is known.

Pure; knows no engine and no devices. A sum is taken in another order in another batch, so that hardly any answer is
the same to the bit.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.item import (
    ITEM_ERROR_CODES,
    NON_FINITE_VECTOR,
    ItemFailure,
    find_text_failure,
)
from vectormill.ragged import Ragged

SMALLEST_NORM: Final = 1e-12
# The size of texts that are read at once: a book would be in memory four times.
MOST_BYTES_AT_ONCE: Final = 1 << 21


def find_unique(texts: Sequence[bytes]) -> tuple[Sequence[bytes], NDArray[np.int64]]:
    """Return the distinct texts in order of first occurrence, and each text's place among them."""
    unique = dict.fromkeys(texts)
    if len(unique) == len(texts):
        return texts, np.arange(len(texts))
    indexes = {text: index for index, text in enumerate(unique)}
    return list(unique), np.fromiter(map(indexes.__getitem__, texts), np.int64, count=len(texts))


def read_texts(texts: Sequence[bytes], max_chars: int) -> tuple[list[str], dict[int, ItemFailure]]:
    """Return the texts that can be encoded, in order, and why others cannot, by place."""
    sound = _read_at_once(texts, max_chars)
    if sound is not None:
        return sound, {}
    failures = {
        index: failure
        for index, text in enumerate(texts)
        if (failure := find_text_failure(text, max_chars)) is not None
    }
    return [text.decode() for index, text in enumerate(texts) if index not in failures], failures


def _read_at_once(texts: Sequence[bytes], max_chars: int) -> list[str] | None:
    """Return all texts; None if one cannot be encoded. Texts without any fault are not checked one by one."""
    joined = b"\0".join(texts) if sum(map(len, texts)) <= MOST_BYTES_AT_ONCE else b""
    if not joined or joined.count(0) != len(texts) - 1:
        return None
    try:
        decoded = joined.decode().split("\0")
    except UnicodeDecodeError:
        return None
    is_sound = all(decoded) and not any(map(str.isspace, decoded)) and max(map(len, decoded)) <= max_chars
    return decoded if is_sound else None


def find_finite(vectors: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return which rows of [n, dim] are finite, by their sums of squares, which hardly ever overflow alone."""
    with np.errstate(over="ignore", invalid="ignore"):
        is_finite: NDArray[np.bool_] = np.isfinite(np.einsum("ij,ij->i", vectors, vectors))
    doubtful = np.flatnonzero(~is_finite)  # not finite, or so large that the sum is not
    is_finite[doubtful] = np.isfinite(vectors[doubtful]).all(axis=1)
    return is_finite


def find_finite_rows(results: Ragged) -> NDArray[np.bool_]:
    """Return which rows of any length are finite. Rows that are not floating-point always are."""
    is_finite = np.ones(len(results), dtype=np.bool_)
    if np.issubdtype(results.values.dtype, np.floating):
        places = np.flatnonzero(~np.isfinite(results.covered)) + results.offsets[0]
        is_finite[np.searchsorted(results.offsets, places, side="right") - 1] = False
    return is_finite


def fail_unless(is_finite: NDArray[np.bool_], failures: dict[int, ItemFailure]) -> None:
    """Add a failure for each row that is not finite and has none."""
    for index in np.flatnonzero(~is_finite).tolist():
        failures.setdefault(index, ItemFailure(NON_FINITE_VECTOR, ITEM_ERROR_CODES[NON_FINITE_VECTOR]))


def empty_rows(results: Ragged, rows: Sequence[int]) -> Ragged:
    """Return the rows with these ones empty; a copy if there are any."""
    if not rows:
        return results
    is_kept = np.ones(len(results), dtype=np.bool_)
    is_kept[list(rows)] = False
    lengths = results.lengths
    return Ragged.from_lengths(results.covered[np.repeat(is_kept, lengths)], np.where(is_kept, lengths, 0))


def finish_vectors(vectors: NDArray[np.float32], spec: EncodingSpec) -> NDArray[np.float32]:
    """Cut to the spec's dimensions (Matryoshka: the leading values), then to unit length if it asks for that. Not a
    copy: `vectors` may be changed.

    The order matters: a cut vector is shorter than 1. Source: Kusupati et al., Matryoshka Representation Learning.
    """
    finished = vectors[:, : spec.dimensions]
    if spec.normalize:
        # A value that is not finite is found and reported by the caller.
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.sqrt(np.einsum("ij,ij->i", finished, finished))
            finished /= np.maximum(norms, SMALLEST_NORM)[:, np.newaxis]
    return finished


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
