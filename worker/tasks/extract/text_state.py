"""TextState: how far one text is. Knows what was found and what is asked next; nothing of sequences or other texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from vectormill.domain.tasks.schema import Schema, list_leaves
from vectormill.jobs.item import ENCODING_FAILED, ItemFailure
from worker.tasks.extract.classification import (
    Label,
    Path,
    as_record,
    choose_at_last,
    choose_of_level,
)
from worker.tasks.extract.decode import Floats, Span, as_step, read_spans
from worker.tasks.extract.hints import Prefix
from worker.tasks.extract.prompt_tokenizer import CLASSIFY, MULTICLASSIFY
from worker.tasks.extract.windows import Window

# A record is a path of steps {"type", "span", "offset"}, as JSON has it.
Record = list[dict[str, Any]]


class LimitExceeded(Exception):
    """More was found in the text than is kept of one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on what is kept of one text: a model that says yes to everything finds n²/2 spans in n tokens."""

    max_spans: int = 50_000  # on all levels; about 400 bytes each
    max_prefixes: int = 4_096  # on one level, each with types of its own: some hundred hints
    max_windows: int = 4_096  # on one level, of all hints: 40 MB of inputs at 512 tokens


class TextState:
    """One text. `text` is the one that the next window refers to, longer by a token for each window of a classified
    text after the first; `token` is its classification token, if any. `asked` are the types below each path.
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
        # A property of each path of spans, without being part of it: the order of prompts must not hang on them.
        self._confidences: dict[Prefix, float] = {}

    @property
    def is_asking(self) -> bool:
        return not self._is_done and self.failure is None

    def begin_level(self, num_left_out: int) -> None:
        self._level_text = self.text
        self.num_left_out += num_left_out

    def check_windows(self, num_windows: int) -> None:
        """Raise LimitExceeded when a level has too many windows."""
        if num_windows > self._limits.max_windows:
            raise LimitExceeded(
                f"what is asked of the text on one level takes more than {self._limits.max_windows} prompts; use a "
                "shorter text or fewer types"
            )

    def grow(self, window: Window) -> None:
        """Insert the classification token that the window has inserted."""
        self.text = self._grown(self.text, window)

    def read_level(self, windows: Sequence[Window], rows: Sequence[Floats]) -> None:
        """Read the results of all windows of the level, in order. Raises as `read_spans`, and LimitExceeded."""
        if self.token is None:
            below = self._read_spans(windows, rows)
        else:
            below = self._read_labels(self.token, windows, rows)
        if len(below) > self._limits.max_prefixes:
            raise LimitExceeded(
                f"the model finds {len(below)} spans that have types below them on one level of the text, and at "
                f"most {self._limits.max_prefixes} are followed"
            )
        self.asked = below
        if not below:
            self._end_pass()

    def answer(self) -> list[Record] | ItemFailure:
        """Return the records in the reference's order, or why there are none."""
        if self.failure is not None:
            return self.failure
        if self.token is None:
            return self._records
        if self._with_confidences:
            return [as_record(self.token, label, with_confidences=True) for label in self._labels]
        if self.token == CLASSIFY and MULTICLASSIFY in self._original and self._labels:
            return ItemFailure(
                ENCODING_FAILED, f"the text has both {CLASSIFY} and {MULTICLASSIFY} in it; use one of them."
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
        """End the last level. A classified text in which nothing was found is asked again, whatever the signs."""
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
            raise LimitExceeded(f"the model finds more than {self._limits.max_spans} spans in the text")
