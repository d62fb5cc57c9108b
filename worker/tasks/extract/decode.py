"""Decode: the cells that came back for a window, as spans of its text. Knows the reference's rules, and no level.

A span from token h to token t is of type q where the cells (h, t), (h, q) and (q, t) are positive, q being the place of
the type's [TYPE]. Spans come in the order of h, then t, then the types of the hint.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from worker.tasks.extract.windows import Window

# A row of results: how many cells the sequence has, then CELL_WIDTH numbers for each: row, column, its logit, and the
# logit of (column, row).
CELL_WIDTH: Final = 4
# Instead of a number of cells: a logit of the sequence was NaN or infinite.
NON_FINITE_ROW: Final = -1.0

Floats = NDArray[np.float32]
Places = NDArray[np.int64]


class NonFiniteLogits(Exception):
    """The model answered NaN or infinity."""


class TooManyCells(Exception):
    """The model finds more in one window than is sent back."""


class UnreadablePrompt(Exception):
    """A special token in the text, or in a span that became part of a prompt, hides the prompt's types."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The spans found in a window, in order: from token `heads[i]` to `tails[i]`, of question `questions[i]`.

    `confidences` are the mean probability of its three cells, `transposed` that of the same cells with row and column
    exchanged, as the reference reads them; both rounded to 4 decimals.
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
    """Yield the spans of a window, in order; `text` is what its offsets refer to. Spaces before a span are not part of
    it.

    Raises NonFiniteLogits, TooManyCells and UnreadablePrompt, before the first span.
    """
    found = find_candidates(read_cells(row), find_type_places(window), window.num_hint_tokens, len(window))
    starts, ends = window.tokens.starts, window.tokens.ends
    for head, tail, question, confidence, transposed in zip(
        found.heads, found.tails, found.questions, found.confidences, found.transposed, strict=True
    ):
        start, end = int(starts[head]), int(ends[tail])
        while text[start : start + 1] == " ":
            start += 1
        # The reference looks for the end of the spaces beyond the end of the text, fails, and passes over the span.
        if start < len(text):
            yield Span(question, text[start:end], (start, end), confidence, transposed)


def read_cells(row: Floats) -> Floats:
    """Return the cells of a row of results, [m, CELL_WIDTH]. Raises NonFiniteLogits and TooManyCells."""
    count = float(row[0])
    if count == NON_FINITE_ROW:
        raise NonFiniteLogits("the model answered NaN or infinity")
    if len(row) != 1 + CELL_WIDTH * count:
        raise TooManyCells(f"the model finds {count:.0f} spans and ends of spans in one window of the text")
    return row[1:].reshape(-1, CELL_WIDTH)


def find_type_places(window: Window) -> Places:
    """Return the place [questions] of each question's [TYPE] in the window. Raises UnreadablePrompt."""
    places, hint_end = window.hint.type_places, len(window.hint.tokens) + 2
    if window.num_hint_tokens < hint_end and (places >= window.num_hint_tokens).any():
        raise UnreadablePrompt(
            "the text has a special token such as [SEP] in a span, and a prompt with it cannot be read"
        )
    if window.num_hint_tokens > hint_end:
        # Text tokens that count as hint hide the type that stands where they do, by number of character.
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
    """Return the candidates of the positive cells [m, CELL_WIDTH]; `type_places` is [questions]."""
    rows, columns = cells[:, 0].astype(np.int64), cells[:, 1].astype(np.int64)
    question = np.full(length, -1)
    question[type_places] = np.arange(len(type_places))
    row_in_text, column_in_text = rows >= num_hint_tokens, columns >= num_hint_tokens
    is_head = row_in_text & ~column_in_text & (question[columns] >= 0)
    is_tail = ~row_in_text & column_in_text & (question[rows] >= 0)
    is_span = row_in_text & column_in_text & (rows <= columns)
    # Cell of each (token, question) among `cells`, or -1.
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
    """Return the mean of each three cells, in float32 and then rounded to 4 decimals, as the reference does."""
    probabilities = (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)
    means = (probabilities[spans] + probabilities[heads] + probabilities[tails]) / np.float32(3)
    return [round(mean, 4) for mean in means.tolist()]


def as_step(name: str, span: str, offset: tuple[int, int]) -> dict[str, Any]:
    """Return one step of a record, as JSON has it."""
    return {"type": name, "span": span, "offset": list(offset)}
