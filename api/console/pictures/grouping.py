"""Grouping: which rows of a sample get one colour, by a value of their metadata. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

# So many colours can be told apart; the rest share one, and rows without a value another.
MOST_GROUPS: Final = 7
OTHERS: Final = "other values"
NOTHING: Final = "no value"
_MOST_CHARS: Final = 60


@dataclass(frozen=True, slots=True)
class Grouping:
    """`labels` name the groups; `numbers` has the group of each row."""

    labels: list[str]
    numbers: list[int]


def group_by_value(values: Sequence[str | None]) -> Grouping:
    """Numbers of many sizes by their quantiles, anything else by the commonest values."""
    found = Counter(value for value in values if value is not None)
    if len(found) > MOST_GROUPS and (parsed := _read_numbers(values)) is not None:
        return _group_numbers(parsed)
    kept = [value for value, _ in found.most_common(MOST_GROUPS)]
    labels = [value if len(value) <= _MOST_CHARS else f"{value[: _MOST_CHARS - 1]}…" for value in kept]
    places = {value: number for number, value in enumerate(kept)}
    numbers = [
        len(kept) + 1 if value is None else places.get(value, len(kept))  # others, then those without
        for value in values
    ]
    return _drop_empty([*labels, OTHERS, NOTHING], numbers)


def _read_numbers(values: Sequence[str | None]) -> list[float | None] | None:
    """None unless all values are finite numbers."""
    numbers: list[float | None] = []
    for value in values:
        try:
            numbers.append(None if value is None else float(value))
        except ValueError:
            return None
    finite = np.isfinite([number for number in numbers if number is not None])
    return numbers if finite.all() else None


def _group_numbers(values: Sequence[float | None]) -> Grouping:
    known = [value for value in values if value is not None]
    bounds = np.unique(np.quantile(known, np.linspace(0, 1, MOST_GROUPS + 1)))
    labels = [f"{low:g} to {high:g}" for low, high in pairwise(bounds)]
    numbers = [
        len(labels) if value is None else min(len(labels) - 1, int(np.searchsorted(bounds[1:-1], value)))
        for value in values
    ]
    return _drop_empty([*labels, NOTHING], numbers)


def _drop_empty(labels: Sequence[str], numbers: Sequence[int]) -> Grouping:
    used = sorted(set(numbers))
    places = {number: place for place, number in enumerate(used)}
    return Grouping([labels[number] for number in used], [places[number] for number in numbers])
