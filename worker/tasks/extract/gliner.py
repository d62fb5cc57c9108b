"""Ask a GLiNER for the spans of labels, and decode its answers. Imports no framework.

A sequence is the labels, each behind a marker, a separator, and the words of a window of the text. The network gives
a logit for each span of words and each label. Of spans that overlap the most probable is kept, as in the package's
`inference(flat_ner=True, threshold=0.5)`, here over all windows of a text.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.schema import Schema
from vectormill.jobs.item import ENCODING_FAILED, NON_FINITE_VECTOR, TOO_MANY_TOKENS, ItemFailure
from vectormill.models.model_card import ModelCard
from vectormill.ragged import Ragged
from worker.batching.batch import WORD_MARKS
from worker.tasks.extract.extract import Course, Prompts
from worker.tasks.extract.records import (
    LimitExceeded,
    Limits,
    NonFiniteLogits,
    Record,
    TooManyCells,
    as_step,
    read_cells,
)
from worker.tokens.reference import Reference
from worker.tokens.tokenized import INPUT_IDS

# As the package splits words (`WhitespaceTokenSplitter`).
WORD: Final = re.compile(r"\w+(?:[-_]\w+)*|\S")
FIRST_OF_WORD, STANDS_FOR_LABEL = 1, 2
# The words that a window shares with the one before it, more than a span has.
OVERLAP_WORDS: Final = 32
# The largest share of a window that labels may take.
LABELS_SHARE: Final = 1 / 2

Ids = NDArray[np.int32]


@dataclass(slots=True)
class WordedText:
    """A text as words: where each begins and ends in it, and its tokens. Words without tokens are left out.

    `spans` are the found spans by (first word, last word, label), with their logits.
    """

    text: str
    places: list[tuple[int, int]]
    tokens: list[Ids]
    spans: dict[tuple[int, int, int], float] = field(default_factory=dict)
    failure: ItemFailure | None = None
    num_cut: int = 0


class Gliner:
    """A GLiNER as it asks for labels. Implements Author."""

    def __init__(self, card: ModelCard) -> None:
        assert card.gliner is not None
        self._config = card.gliner
        self._reference = Reference(card.path, special=card.special)
        self.max_tokens, self.max_words = card.max_tokens, self._config.max_words
        self.overlap = max(OVERLAP_WORDS, self._config.max_width)
        self._marker_id = self._reference.rust.token_to_id(self._config.marker)

    def begin(self, schema: Schema, texts: Sequence[str], *, with_confidences: bool) -> Course:
        labels = list(schema)
        return GlinerCourse(self, labels, self.read_words(texts), with_confidences=with_confidences)

    def write_prompt(self, labels: Sequence[str]) -> tuple[Ids, Ids]:
        """Return the tokens before a text's words, and their marks. Raises LimitExceeded."""
        words = [part for label in labels for part in (self._config.marker, label)]
        own = self._encode([[*words, self._config.separator]])[0]
        ids = np.concatenate([np.array(self._reference.prefix, np.int32), *own])
        places = np.flatnonzero(ids == self._marker_id) + self._config.reads_label
        if len(places) != len(labels):
            raise LimitExceeded(f"a label contains {self._config.marker}, which the model reads as structure")
        if len(ids) > LABELS_SHARE * self.max_tokens:
            raise LimitExceeded(
                f"the labels have {len(ids)} tokens, more than half of the {self.max_tokens} that the model reads; "
                "use fewer"
            )
        marks = np.zeros(len(ids), np.int32)
        marks[places] = STANDS_FOR_LABEL
        return ids, marks

    @property
    def suffix(self) -> Ids:
        return np.array(self._reference.suffix, np.int32)

    def read_words(self, texts: Sequence[str]) -> list[WordedText]:
        found = [[match.span() for match in WORD.finditer(text)] for text in texts]
        encoded = self._encode(
            [[text[start:end] for start, end in places] for text, places in zip(texts, found, strict=True)]
        )
        worded = []
        for text, places, tokens in zip(texts, found, encoded, strict=True):
            kept = [number for number, ids in enumerate(tokens) if len(ids)]
            worded.append(
                WordedText(text, [places[number] for number in kept], [tokens[number] for number in kept])
            )
        return worded

    def _encode(self, texts: Sequence[Sequence[str]]) -> list[list[Ids]]:
        """Return the tokens of each word of each text; a word's tokens do not depend on other words."""
        answers = []
        encodings = self._reference.rust.encode_batch(
            list(texts), is_pretokenized=True, add_special_tokens=False
        )
        for words, encoding in zip(texts, encodings, strict=True):
            counts = np.bincount(np.array(encoding.word_ids, np.int64), minlength=len(words))
            answers.append(
                np.split(np.array(encoding.ids, np.int32), np.cumsum(counts)[:-1]) if words else []
            )
        return answers


class GlinerCourse:
    """The extraction of labels from many texts, in one round. Implements Course."""

    def __init__(
        self, author: Gliner, labels: Sequence[str], texts: Sequence[WordedText], *, with_confidences: bool
    ) -> None:
        self._author, self._labels, self._texts = author, labels, texts
        self._with_confidences = with_confidences
        self._limits = Limits()
        self._windows: list[tuple[int, int]] = []  # the text of each sequence, and its first word

    @property
    def num_left_out(self) -> list[int]:
        return [text.num_cut for text in self._texts]

    def start(self) -> Prompts | None:
        try:
            ids, marks = self._author.write_prompt(self._labels)
        except LimitExceeded as error:
            for text in self._texts:
                text.failure = ItemFailure(TOO_MANY_TOKENS, f"{error}.")
            return None
        suffix = self._author.suffix
        rows, marked = [], []
        for index, text in enumerate(self._texts):
            for first, end in self._cut(text, self._author.max_tokens - len(ids) - len(suffix)):
                words = text.tokens[first:end]
                starts = np.cumsum([0, *map(len, words[:-1])]) + len(ids)
                rows.append(np.concatenate([ids, *words, suffix]))
                own = np.zeros(len(rows[-1]), np.int32)
                own[: len(ids)] = marks
                own[starts] = FIRST_OF_WORD
                marked.append(own)
                self._windows.append((index, first))
        if not rows:
            return None
        inputs = {INPUT_IDS: Ragged.from_rows(rows, np.int32), WORD_MARKS: Ragged.from_rows(marked, np.int32)}
        return Prompts(inputs, np.array([index for index, _ in self._windows], np.int32))

    def take(self, results: Ragged, failures: Mapping[int, ItemFailure] | None = None) -> None:
        for number, (index, first) in enumerate(self._windows):
            text = self._texts[index]
            text.failure = text.failure or (failures or {}).get(number)
            if text.failure is None:
                try:
                    self._read(text, first, results.row(number))
                except NonFiniteLogits as error:
                    text.failure = ItemFailure(NON_FINITE_VECTOR, f"{error}.")
                except (TooManyCells, LimitExceeded) as error:
                    text.failure = ItemFailure(ENCODING_FAILED, f"{error}.")

    def finish(self) -> list[list[Record] | ItemFailure]:
        return [self._decode(text) if text.failure is None else text.failure for text in self._texts]

    def _cut(self, text: WordedText, room: int) -> Iterator[tuple[int, int]]:
        """Yield the first word of each window and the word behind it. A word longer than `room` is cut."""
        text.num_cut = sum(len(ids) > room for ids in text.tokens)
        if text.num_cut:
            text.tokens = [ids[:room] for ids in text.tokens]
        ends = np.cumsum([len(ids) for ids in text.tokens])
        first, num_windows = 0, 0
        while first < len(ends):
            before = ends[first - 1] if first else 0
            end = min(int(np.searchsorted(ends, before + room, side="right")), first + self._author.max_words)
            num_windows += 1
            if num_windows > self._limits.max_windows:
                text.failure = ItemFailure(
                    ENCODING_FAILED, f"the text has more than {self._limits.max_windows} windows."
                )
                return
            yield first, end
            if end == len(ends):
                return
            first = max(first + 1, end - min(self._author.overlap, (end - first) // 2))

    def _read(self, text: WordedText, first: int, row: NDArray[np.float32]) -> None:
        for start, end, label, logit in read_cells(row).tolist():
            span = (first + int(start), first + int(end), int(label))
            text.spans[span] = max(logit, text.spans.get(span, -math.inf))
        if len(text.spans) > self._limits.max_spans:
            raise LimitExceeded(f"the model found more than {self._limits.max_spans} spans in the text")

    def _decode(self, text: WordedText) -> list[Record]:
        """Return the spans in order of the text, of those that overlap the most probable."""
        spans = sorted(text.spans)
        logits = np.array([text.spans[span] for span in spans], np.float64)
        # Equally probable in float32, as the package compares them, means the first.
        probabilities = (1 / (1 + np.exp(-logits))).astype(np.float32)
        is_taken = np.zeros(len(text.places), np.bool_)
        kept = []
        for number in np.argsort(-probabilities, kind="stable").tolist():
            start, end, _ = spans[number]
            if not is_taken[start : end + 1].any():
                is_taken[start : end + 1] = True
                kept.append(number)
        records = []
        for number in sorted(kept):
            start, end, label = spans[number]
            place = (text.places[start][0], text.places[end][1])
            step = as_step(self._labels[label], text.text[slice(*place)], place)
            if self._with_confidences:
                step["confidence"] = round(float(probabilities[number]), 4)
            records.append([step])
        return records
