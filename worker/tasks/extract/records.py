"""Read records from the cells that the model returned for the windows of one text.

A span from token h to token t is of type q if the cells (h, t), (h, q) and (q, t) are positive, q being the
position of the type's [TYPE]. Spans are ordered by h, then t, then the order of types in the hint.

A text that contains [CLASSIFY] has one label, one that contains [MULTICLASSIFY] any number of labels. A label
is a path of types, and each window in which it was found gives it a confidence for every type of the path.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.schema import Schema, list_leaves
from vectormill.jobs.item import ENCODING_FAILED, ItemFailure
from worker.tasks.extract.prompts import CLASSIFY, MULTICLASSIFY, Prefix, Window

# A row of results: the number of the sequence's cells, then CELL_WIDTH numbers for each: row, column, its
# logit, and the logit of (column, row).
CELL_WIDTH: Final = 4
# This stands in place of the number of cells if a logit of the sequence was NaN or infinite.
NON_FINITE_ROW: Final = -1.0

Floats = NDArray[np.float32]
Places = NDArray[np.int64]


class NonFiniteLogits(Exception):
    """The model returned NaN or infinity."""


class TooManyCells(Exception):
    """The model found more cells in one window than are sent back."""


class UnreadablePrompt(Exception):
    """A special token in the text, or in a span used in a prompt, makes the prompt's types unreadable."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The spans found in a window, in order: span i reaches from token `heads[i]` to `tails[i]`.

    `questions[i]` is the number of the question that it answers. `confidences` are the mean probabilities of
    its three cells, and `transposed` those of the same cells with row and column exchanged, as the reference
    reads them; both are rounded to 4 decimals.
    """

    heads: list[int]
    tails: list[int]
    questions: list[int]
    confidences: list[float]
    transposed: list[float]


@dataclass(frozen=True, slots=True)
class Span:
    question: int
    text: str
    offset: tuple[int, int]  # in code points
    confidence: float
    transposed: float


def read_spans(window: Window, row: Floats, text: str) -> Iterator[Span]:
    """Yield the spans of a window, in order, without leading spaces; `text` is the text its offsets refer to.

    Raises NonFiniteLogits, TooManyCells and UnreadablePrompt before the first span.
    """
    found = find_candidates(read_cells(row), find_type_places(window), window.num_hint_tokens, len(window))
    starts, ends = window.tokens.starts, window.tokens.ends
    for head, tail, question, confidence, transposed in zip(
        found.heads, found.tails, found.questions, found.confidences, found.transposed, strict=True
    ):
        start, end = int(starts[head]), int(ends[tail])
        while text[start : start + 1] == " ":
            start += 1
        # The reference searches for the end of the spaces beyond the end of the text, fails, and skips the
        # span.
        if start < len(text):
            yield Span(question, text[start:end], (start, end), confidence, transposed)


def read_cells(row: Floats) -> Floats:
    """Return the cells [m, CELL_WIDTH] of a row of results. Raises NonFiniteLogits and TooManyCells."""
    count = float(row[0])
    if count == NON_FINITE_ROW:
        raise NonFiniteLogits("the model returned NaN or infinity")
    if len(row) != 1 + CELL_WIDTH * count:
        raise TooManyCells(
            f"the model found too many spans and ends of spans in one window of the text: {count:.0f}"
        )
    return row[1:].reshape(-1, CELL_WIDTH)


def find_type_places(window: Window) -> Places:
    """Return the position [questions] of each question's [TYPE] in the window. Raises UnreadablePrompt."""
    places, hint_end = window.hint.type_places, len(window.hint.tokens) + 2
    if window.num_hint_tokens < hint_end and (places >= window.num_hint_tokens).any():
        raise UnreadablePrompt(
            "a span of the text contains a special token such as [SEP], and a prompt with it cannot be read"
        )
    if window.num_hint_tokens > hint_end:
        # Text tokens with type id 0 count as hint; one that has the same character offset as a type replaces
        # that type's position.
        starts = window.tokens.starts[hint_end : window.num_hint_tokens].tolist()
        hidden = {start: hint_end + index for index, start in enumerate(starts)}
        places = np.array(
            [
                hidden.get(char, place)
                for char, place in zip(window.hint.type_chars, places.tolist(), strict=True)
            ]
        )
    return places


def find_candidates(cells: Floats, type_places: Places, num_hint_tokens: int, length: int) -> Candidates:
    """Return the spans that the positive cells [m, CELL_WIDTH] form; `type_places` is [questions]."""
    rows, columns = cells[:, 0].astype(np.int64), cells[:, 1].astype(np.int64)
    question = np.full(length, -1)
    question[type_places] = np.arange(len(type_places))
    row_in_text, column_in_text = rows >= num_hint_tokens, columns >= num_hint_tokens
    is_head = row_in_text & ~column_in_text & (question[columns] >= 0)
    is_tail = ~row_in_text & column_in_text & (question[rows] >= 0)
    is_span = row_in_text & column_in_text & (rows <= columns)
    # Index into `cells` of each (token, question), or -1 if it has no cell.
    heads = np.full((length, len(type_places)), -1)
    heads[rows[is_head], question[columns[is_head]]] = np.flatnonzero(is_head)
    tails = np.full((length, len(type_places)), -1)
    tails[columns[is_tail], question[rows[is_tail]]] = np.flatnonzero(is_tail)
    spans = np.flatnonzero(is_span)
    spans = spans[np.lexsort((columns[spans], rows[spans]))]
    head_cells, tail_cells = heads[rows[spans]], tails[columns[spans]]  # [spans, questions]
    which, questions = np.nonzero((head_cells >= 0) & (tail_cells >= 0))
    three = (spans[which], head_cells[which, questions], tail_cells[which, questions])
    return Candidates(
        heads=rows[three[0]].tolist(),
        tails=columns[three[0]].tolist(),
        questions=questions.tolist(),
        confidences=_mean_probabilities(cells[:, 2], *three),
        transposed=_mean_probabilities(cells[:, 3], *three),
    )


def _mean_probabilities(logits: Floats, spans: Places, heads: Places, tails: Places) -> list[float]:
    """Return the mean probability of each span's three cells, rounded to 4 decimals.

    As in the reference, the mean is computed in float32 before it is rounded.
    """
    probabilities = (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)
    means = (probabilities[spans] + probabilities[heads] + probabilities[tails]) / np.float32(3)
    return [round(mean, 4) for mean in means.tolist()]


def as_step(name: str, span: str, offset: tuple[int, int]) -> dict[str, Any]:
    """Return one step of a record as a JSON object."""
    return {"type": name, "span": span, "offset": list(offset)}


# With several labels allowed, all labels whose probability exceeds this are answers.
SURE: Final = 0.9

Path = tuple[str, ...]
# For one hint: the confidences of each path, for each window that found it, in order.
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
    """Return the classification token that the text contains; None if its spans are wanted."""
    return next((token for token in (CLASSIFY, MULTICLASSIFY) if token in text), None)


def choose_of_level(token: str, hints: Sequence[Found]) -> list[Label]:
    """Return the labels that a level adds: at most one, or all labels of all hints for [MULTICLASSIFY]."""
    if token == MULTICLASSIFY:
        return [Label(path, tuple(windows[0])) for found in hints for path, windows in found.items()]
    best = [_choose_of_hint(found) for found in hints if found]
    return [_first_greatest(best, [label.total for label in best])] if best else []


def choose_at_last(token: str, labels: Sequence[Label]) -> list[Label]:
    """Return the labels of the whole text. Of equally probable labels the first is taken."""
    if not labels:
        return []
    means = [label.mean for label in labels]
    sure = [label for label, mean in zip(labels, means, strict=True) if mean > SURE]
    if token == MULTICLASSIFY and sure:
        return sure
    return [_first_greatest(labels, means)]


def as_record(token: str, label: Label, *, with_confidences: bool) -> list[dict[str, Any]]:
    """Return a label as a list of JSON steps. The token's offset is always the beginning of the text."""
    steps = [as_step(name, token, (0, len(token))) for name in label.path]
    if with_confidences:
        for step, confidence in zip(steps, label.confidences, strict=True):
            step["confidence"] = confidence
    return steps


def _choose_of_hint(found: Found) -> Label:
    """Return the best label of a hint.

    A single path has the confidences of its first window; several paths have the means over their windows.
    """
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


# A record is a list of JSON steps {"type", "span", "offset"}.
Record = list[dict[str, Any]]


class LimitExceeded(Exception):
    """The extraction from one text exceeded one of the limits of `Limits`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on what is kept of one text: n tokens have up to n²/2 spans if the model accepts every pair."""

    max_spans: int = 50_000  # over all levels; about 400 bytes each
    max_prefixes: int = 4_096  # per level, each with its own types: some hundred hints
    max_windows: int = 4_096  # per level, over all hints: 40 MB of inputs at 512 tokens


class TextState:
    """The progress of one text's extraction: what was found so far and what is asked next.

    `text` is the text that the next window's offsets refer to; each window of a classified text after the
    first adds a token to it. `token` is the classification token, if any. `asked` are the types below each
    path.
    """

    def __init__(
        self, text: str, schema: Schema, limits: Limits, token: str | None, *, with_confidences: bool
    ) -> None:
        self.text = self._original = text
        self.token = token
        self.asked: dict[Prefix, Schema] = {(): schema}
        self.is_blank = False
        self.failure: ItemFailure | None = None
        self.num_left_out = 0
        self._schema, self._limits = schema, limits
        self._leaves = frozenset(list_leaves(schema))
        self._with_confidences = with_confidences
        self._level_text = text
        self._is_done = False
        self._num_spans = 0
        self._records: list[Record] = []
        self._labels: list[Label] = []
        # Kept separate from the paths of spans, so that the order of prompts does not depend on confidences.
        self._confidences: dict[Prefix, float] = {}

    @property
    def is_asking(self) -> bool:
        return not self._is_done and self.failure is None

    def begin_level(self, num_left_out: int) -> None:
        self._level_text = self.text
        self.num_left_out += num_left_out

    def check_windows(self, num_windows: int) -> None:
        """Raise LimitExceeded if a level has too many windows."""
        if num_windows > self._limits.max_windows:
            raise LimitExceeded(
                f"one level of the schema needs more than {self._limits.max_windows} prompts for this text; use a "
                "shorter text or fewer types"
            )

    def grow(self, window: Window) -> None:
        """Insert the classification token into the text where the window has inserted it."""
        self.text = self._grown(self.text, window)

    def read_level(self, windows: Sequence[Window], rows: Sequence[Floats]) -> None:
        """Read the results of all windows of the level, in order.

        Raises LimitExceeded and as `read_spans` does.
        """
        if self.token is None:
            below = self._read_spans(windows, rows)
        else:
            below = self._read_labels(self.token, windows, rows)
        if len(below) > self._limits.max_prefixes:
            raise LimitExceeded(
                f"the model found {len(below)} spans with nested types on one level of the schema; at most "
                f"{self._limits.max_prefixes} are allowed"
            )
        self.asked = below
        if not below:
            self._end_pass()

    def answer(self) -> list[Record] | ItemFailure:
        """Return the records in the reference's order, or the text's failure."""
        if self.failure is not None:
            return self.failure
        if self.token is None:
            return self._records
        if self._with_confidences:
            return [as_record(self.token, label, with_confidences=True) for label in self._labels]
        if self.token == CLASSIFY and MULTICLASSIFY in self._original and self._labels:
            return ItemFailure(
                ENCODING_FAILED, f"the text contains both {CLASSIFY} and {MULTICLASSIFY}; use one of them."
            )
        chosen = choose_at_last(self.token, self._labels)
        return [as_record(self.token, label, with_confidences=False) for label in chosen]

    def _read_spans(self, windows: Sequence[Window], rows: Sequence[Floats]) -> dict[Prefix, Schema]:
        below: dict[Prefix, Schema] = {}
        for window, row in zip(windows, rows, strict=True):
            for span in read_spans(window, row, self.text):
                self._count_span()
                prefix, name = window.hint.questions[span.question]
                path = (*prefix, (name, span.text, span.offset))
                if children := self.asked[prefix][name]:
                    below[path] = children
                    self._confidences[path] = max(span.confidence, self._confidences.get(path, 0.0))
                if (*(step[0].strip() for step in prefix), name) in self._leaves:
                    self._records.append(self._as_record(prefix, name, span))
        return below

    def _read_labels(
        self, token: str, windows: Sequence[Window], rows: Sequence[Floats]
    ) -> dict[Prefix, Schema]:
        below: dict[Prefix, Schema] = {}
        hints: list[dict[Path, list[list[float]]]] = []
        text = self._level_text
        for _, part in groupby(zip(windows, rows, strict=True), key=lambda pair: id(pair[0].hint)):
            found: dict[Path, list[list[float]]] = {}
            for window, row in part:
                text = self._grown(text, window)
                for span in read_spans(window, row, text):
                    self._count_span()
                    prefix, name = window.hint.questions[span.question]
                    if children := self.asked[prefix][name]:
                        below[(*prefix, (name, span.text, span.offset, span.transposed))] = children
                    labels = [step for step in prefix if step[1] == token]
                    path = (*(step[0].strip() for step in labels), name)
                    if path in self._leaves and span.text == token:
                        found.setdefault(path, []).append([*(step[3] for step in labels), span.transposed])
            hints.append(found)
        self._labels += choose_of_level(token, hints)
        return below

    def _end_pass(self) -> None:
        """End the last level.

        A classified text without labels is asked once more, whatever the logits' signs.
        """
        if self.token is None or self.is_blank or self._labels:
            self._is_done = True
            return
        self.is_blank = True
        self.asked = {(): self._schema}
        self.text = self._original

    def _as_record(self, prefix: Prefix, name: str, span: Span) -> Record:
        steps = [as_step(step[0].strip(), step[1], step[2]) for step in prefix]
        steps.append(as_step(name, span.text, span.offset))
        if self._with_confidences:
            for number, step in enumerate(steps[:-1], start=1):
                step["confidence"] = self._confidences[prefix[:number]]
            steps[-1]["confidence"] = span.confidence
        return steps

    def _grown(self, text: str, window: Window) -> str:
        if window.grows_at is None:
            return text
        return text[: window.grows_at] + str(self.token) + text[window.grows_at :]

    def _count_span(self) -> None:
        self._num_spans += 1
        if self._num_spans > self._limits.max_spans:
            raise LimitExceeded(f"the model found more than {self._limits.max_spans} spans in the text")
