"""Classification: one answer out of what windows and hints found for the classification token. Pure; knows no tokens.

A text with [CLASSIFY] in it has one label, one with [MULTICLASSIFY] any number. A label is a path of types, and each
window in which it was found gives it a confidence for every type of the path.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from worker.tasks.extract.decode import as_step
from worker.tasks.extract.prompt_tokenizer import CLASSIFY, MULTICLASSIFY

# Labels of a text with several that are more probable are all of them answers.
SURE: Final = 0.9

Path = tuple[str, ...]
# For one hint: for each path the confidences of each window that found it, in order.
Found = Mapping[Path, Sequence[Sequence[float]]]


@dataclass(frozen=True, slots=True)
class Label:
    path: Path
    confidences: tuple[float, ...]  # one for each type of the path

    @property
    def mean(self) -> float:
        return sum(self.confidences) / len(self.confidences)

    @property
    def total(self) -> float:
        return sum(self.confidences)


def find_token(text: str) -> str | None:
    """Return the classification token that the text has; None where spans are looked for."""
    return next((token for token in (CLASSIFY, MULTICLASSIFY) if token in text), None)


def choose_of_level(token: str, hints: Sequence[Found]) -> list[Label]:
    """Return the labels that a level adds: one at most, or with several allowed every one of every hint."""
    if token == MULTICLASSIFY:
        return [Label(path, tuple(windows[0])) for found in hints for path, windows in found.items()]
    best = [_choose_of_hint(found) for found in hints if found]
    return [_first_greatest(best, [label.total for label in best])] if best else []


def choose_at_last(token: str, labels: Sequence[Label]) -> list[Label]:
    """Return the answer of the whole text. Ties go to the first."""
    if not labels:
        return []
    means = [label.mean for label in labels]
    sure = [label for label, mean in zip(labels, means, strict=True) if mean > SURE]
    if token == MULTICLASSIFY and sure:
        return sure
    return [_first_greatest(labels, means)]


def as_record(token: str, label: Label, *, with_confidences: bool) -> list[dict[str, Any]]:
    """Return a label as a path of JSON steps. The token counts as the beginning of the text wherever it stands."""
    steps = [as_step(name, token, (0, len(token))) for name in label.path]
    if with_confidences:
        for step, confidence in zip(steps, label.confidences, strict=True):
            step["confidence"] = confidence
    return steps


def _choose_of_hint(found: Found) -> Label:
    """Return a hint's label. One path has its first window's confidences; of several each has the means."""
    if len(found) == 1:
        ((path, windows),) = found.items()
        return Label(path, tuple(windows[0]))
    labels = [
        Label(path, tuple(sum(column) / len(column) for column in zip(*windows, strict=True)))
        for path, windows in found.items()
    ]
    return _first_greatest(labels, [label.total for label in labels])


def _first_greatest(labels: Sequence[Label], values: Sequence[float]) -> Label:
    return labels[values.index(max(values))]
