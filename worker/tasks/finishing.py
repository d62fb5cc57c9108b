"""Prepare texts for the model, finish its results as the spec says, and check results of canary texts.

Results are compared with a tolerance: in another batch sums are taken in another order, so hardly any result
is equal bit by bit.
"""

from collections.abc import Collection, Sequence
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
from vectormill.vectors.representations import SMALLEST_NORM
from worker.encoder.choice import FP32

# The most bytes that are decoded at once: a longer input would be in memory four times.
MOST_BYTES_AT_ONCE: Final = 1 << 21


def find_unique(texts: Sequence[bytes]) -> tuple[Sequence[bytes], NDArray[np.int64]]:
    """Return the distinct texts in order of first occurrence, and for each text its index among them."""
    unique = dict.fromkeys(texts)
    if len(unique) == len(texts):
        return texts, np.arange(len(texts))
    indexes = {text: index for index, text in enumerate(unique)}
    return list(unique), np.fromiter(map(indexes.__getitem__, texts), np.int64, count=len(texts))


def read_texts(texts: Sequence[bytes], max_chars: int) -> tuple[list[str], dict[int, ItemFailure]]:
    """Return the texts that can be encoded, in order, and by index the failures of the others."""
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
    """Return all texts decoded together; None if any may be invalid or together they are too large."""
    joined = b"\0".join(texts) if sum(map(len, texts)) <= MOST_BYTES_AT_ONCE else b""
    if not joined or joined.count(0) != len(texts) - 1:
        return None
    try:
        decoded = joined.decode().split("\0")
    except UnicodeDecodeError:
        return None
    is_sound = all(decoded) and not any(map(str.isspace, decoded)) and max(map(len, decoded)) <= max_chars
    return decoded if is_sound else None


def find_finite_rows(results: Ragged) -> NDArray[np.bool_]:
    """Return bool [n]: True for rows, of any length, without NaN or infinity; always True for integers."""
    is_finite = np.ones(len(results), dtype=np.bool_)
    if np.issubdtype(results.values.dtype, np.floating):
        places = np.flatnonzero(~np.isfinite(results.covered)) + results.offsets[0]
        is_finite[np.searchsorted(results.offsets, places, side="right") - 1] = False
    return is_finite


def fail_unless(is_finite: NDArray[np.bool_], failures: dict[int, ItemFailure]) -> None:
    """Add a failure for each row that is not finite and has no failure yet."""
    for index in np.flatnonzero(~is_finite).tolist():
        failures.setdefault(index, ItemFailure(NON_FINITE_VECTOR, ITEM_ERROR_CODES[NON_FINITE_VECTOR]))


def empty_rows(results: Ragged, rows: Sequence[int]) -> Ragged:
    """Return the results with these rows emptied; a copy if there are any."""
    if not rows:
        return results
    is_kept = np.ones(len(results), dtype=np.bool_)
    is_kept[list(rows)] = False
    lengths = results.lengths
    return Ragged.from_lengths(results.covered[np.repeat(is_kept, lengths)], np.where(is_kept, lengths, 0))


def finish_vectors(vectors: NDArray[np.float32], spec: EncodingSpec) -> NDArray[np.float32]:
    """Cut vectors to the spec's dimensions, then normalize them if the spec says so. May change `vectors`.

    The leading values are kept (Matryoshka). Normalizing comes last, because a cut vector is shorter than 1.
    Source: Kusupati et al., Matryoshka Representation Learning.
    """
    finished = vectors[:, : spec.dimensions]
    if spec.normalize:
        # The caller finds and reports values that are not finite.
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.sqrt(np.einsum("ij,ij->i", finished, finished))
            finished /= np.maximum(norms, SMALLEST_NORM)[:, np.newaxis]
    return finished


Values = NDArray[Any]

# Vectors of a healthy process agree better than this in any precision; those of a broken one are far off.
SMALLEST_COSINE: Final = 0.99
# Invariant 5 (docs/ARCHITECTURE.md): the smallest cosine of a text's vectors, alone and in any batch.
PROMISE_FP32: Final = 0.9999
PROMISE: Final = 0.999
PROMISE_FP8: Final = 0.99
SMALLEST_SIZE: Final = float(np.finfo(np.float32).tiny)  # avoids division by zero
# The largest accepted change of numbers that are compared one by one, such as a classifier's: a share of the
# largest number, or this value itself where all are smaller than 1.
LARGEST_CHANGE: Final = 0.1


def find_least_cosine(precision: str, switches: Collection[str] = ()) -> float:
    """Return the smallest cosine that a precision promises with these switches."""
    if precision == FP32:
        return PROMISE_FP32
    return PROMISE_FP8 if "fp8" in switches else PROMISE


def find_turned(results: Ragged, expected: Values, least: float = SMALLEST_COSINE) -> str:
    """Return what is wrong with rows that should all equal the vector `expected`; empty if nothing is.

    float32 vectors of equal length are compared by their cosine. Rows may differ in length where a model
    keeps only nonzero weights and rounding has made one of them zero; these are compared by their norm alone.
    Rows of other types must be equal.
    """
    if expected.dtype != np.float32:
        is_same = all(np.array_equal(results.row(index), expected) for index in range(len(results)))
        return "" if is_same else "its answer has changed"
    if not np.isfinite(results.covered).all() or not np.isfinite(expected).all():
        return "its vector is not finite"
    size = float(np.linalg.norm(expected))
    if not size:  # a table of rows has the vector 0 for a text of unknown words
        return "its vector is not 0 any more" if results.covered.any() else ""
    if (results.lengths == len(expected)).all():
        vectors = results.matrix
        sizes = np.maximum(np.linalg.norm(vectors, axis=1), SMALLEST_SIZE)
        cosine = float((vectors @ expected / (sizes.astype(np.float64) * size)).min())
        return f"its vector has changed to a cosine of {cosine:.5f}" if cosine < least else ""
    sizes = np.array([np.linalg.norm(results.row(index)) for index in range(len(results))])
    change = float(np.abs(sizes / size - 1).max())
    return f"its answer has changed by {change:.0%}" if change > 1 - SMALLEST_COSINE else ""


def find_changed(results: Ragged, expected: Values) -> str:
    """Return what is wrong with rows of numbers that are compared one by one; empty if nothing is.

    A direction would say nothing about a single number, which is all that a reranker returns, and little
    about two.
    """
    if (results.lengths != len(expected)).any():
        return f"its answer does not have {len(expected)} values"
    if not np.isfinite(results.covered).all() or not np.isfinite(expected).all():
        return "its answer is not finite"
    if not len(expected):
        return ""
    change = float(np.abs(results.matrix - expected).max())
    most = LARGEST_CHANGE * max(1.0, float(np.abs(expected).max()))
    return f"a number in its answer has changed by {change:.3g}" if change > most else ""
