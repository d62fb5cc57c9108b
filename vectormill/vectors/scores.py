"""Convert an item's number for each label to its score, its label and its probabilities."""

from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float32]


class Numbered(TypedDict):
    """A score in API results.

    `label` and `probabilities` are None for a model with one number and no labels.
    """

    score: float
    label: str | None
    probabilities: dict[str, float] | None


def names_labels(labels: tuple[str, ...]) -> bool:
    """Return True if scores are reported with their label and each label's probability."""
    return len(labels) > 1


def choose_scores(numbers: Numbers, labels: tuple[str, ...]) -> tuple[Numbers, "NDArray[np.int64]"]:
    """Return the score of each row [n] of `numbers` [n, labels], and the index of its best label [n].

    A single number is the score. With two labels the second is the positive one, and its number is the score
    (https://huggingface.co/docs/transformers/tasks/sequence_classification: 0 negative, 1 positive); with
    more it is the best label's number.
    """
    best = numbers.argmax(axis=1) if len(numbers) else np.zeros(0, dtype=np.int64)
    if len(labels) == 2:
        return numbers[:, 1], best
    return np.take_along_axis(numbers, best[:, np.newaxis], axis=1)[:, 0], best


def rank_scores(
    numbers: Numbers, labels: tuple[str, ...], limit: int | None = None
) -> list[tuple[int, float]]:
    """Return (index, score) of the rows, the best first; equal scores keep their order."""
    scores, _ = choose_scores(numbers, labels)
    order = np.argsort(-scores, kind="stable")[:limit]
    return [(place, _shorten(scores[place])) for place in order.tolist()]


def describe_numbers(numbers: Numbers, labels: tuple[str, ...]) -> list[Numbered]:
    """Return a score for each row; numbers have as many digits as float32 needs."""
    scores, best = choose_scores(numbers, labels)
    rows: list[list[Any]] = [[_shorten(number) for number in row] for row in numbers.tolist()]
    has_labels = names_labels(labels)
    return [
        {
            "score": _shorten(score),
            "label": labels[place] if has_labels else None,
            "probabilities": dict(zip(labels, row, strict=True)) if has_labels else None,
        }
        for score, place, row in zip(scores.tolist(), best.tolist(), rows, strict=True)
    ]


def _shorten(number: float) -> float:
    """Round to nine digits, which distinguish any two float32 values."""
    return float(f"{number:.9g}")
