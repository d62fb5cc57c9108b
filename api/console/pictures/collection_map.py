"""CollectionMap: a sample of vectors as points in a plane, in colours that say something; and scores as bars. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from api.console.pictures.grouping import Grouping, group_by_value
from api.console.pictures.projection import Rows, find_clusters, project, read_rows
from vectormill.db.measures.row_samples import RowSample
from vectormill.domain.encoding import EncodingSpec
from vectormill.vectors.scores import choose_scores, names_labels

# Of the picture, in which a point is some units wide.
WIDTH: Final = 1000
HEIGHT: Final = 600
NUM_CLUSTERS: Final = 6
NUM_NEAR: Final = 5
NUM_BARS: Final = 20


@dataclass(frozen=True, slots=True)
class Point:
    """Where a row is drawn, and of which group it is."""

    x: float
    y: float
    group: int
    key: str


@dataclass(frozen=True, slots=True)
class Group:
    """Points of one colour. `near` are the keys of rows nearest to the middle of them, the nearest first."""

    number: int
    label: str
    count: int
    near: list[str]


@dataclass(frozen=True, slots=True)
class CollectionMap:
    """`shown_share` is how much of the vectors' variance the plane shows."""

    points: list[Point]
    groups: list[Group]
    shown_share: float


@dataclass(frozen=True, slots=True)
class Bar:
    """Scores from `low` to below `high`; of the last bar, `high` with them."""

    low: float
    high: float
    count: int
    share: float  # of the highest bar


@dataclass(frozen=True, slots=True)
class Histogram:
    """`labels` are how often each was the best, where the collection has labels."""

    bars: list[Bar]
    labels: list[tuple[str, int]]


def draw_map(sample: RowSample, spec: EncodingSpec, field: str | None) -> CollectionMap:
    """Coloured by the values of the sample's field, or by clusters of the vectors where none was asked for."""
    rows = read_rows(sample.results, spec)
    found = project(rows)
    if field is None:
        numbers, _ = find_clusters(rows, NUM_CLUSTERS)
        places = numbers.tolist()
        grouping = Grouping(
            [f"cluster {number + 1}" for number in range(max(places, default=-1) + 1)], places
        )
    else:
        grouping = group_by_value(sample.values)
    points = [
        Point(round(x * WIDTH, 1), round((1 - y) * HEIGHT, 1), group, key)
        for (x, y), group, key in zip(found.points.tolist(), grouping.numbers, sample.keys, strict=True)
    ]
    return CollectionMap(points, _list_groups(rows, grouping, sample.keys), found.share)


def _list_groups(rows: Rows, grouping: Grouping, keys: Sequence[str]) -> list[Group]:
    numbers = np.array(grouping.numbers, dtype=np.int64)
    groups = []
    for number, label in enumerate(grouping.labels):
        (members,) = np.nonzero(numbers == number)
        distances = np.square(rows[members] - rows[members].mean(axis=0)).sum(axis=1)
        near = members[np.argsort(distances, kind="stable")[:NUM_NEAR]]
        groups.append(Group(number, label, len(members), [keys[place] for place in near]))
    return groups


def draw_histogram(sample: RowSample, spec: EncodingSpec) -> Histogram:
    """Of the scores, and of their labels where there are any."""
    numbers = read_rows(sample.results, spec)
    if not len(numbers):
        return Histogram([], [])
    scores, best = choose_scores(numbers, spec.labels)
    counts, edges = np.histogram(scores, bins=NUM_BARS)
    highest = max(1, int(counts.max()))
    bars = [
        Bar(float(edges[place]), float(edges[place + 1]), int(count), int(count) / highest)
        for place, count in enumerate(counts)
    ]
    labels = []
    if names_labels(spec.labels):
        often = np.bincount(best, minlength=len(spec.labels)).tolist()
        labels = [(spec.labels[place], often[place]) for place in np.argsort([-count for count in often])]
    return Histogram(bars, labels)
