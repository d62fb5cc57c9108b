"""How cells become spans and labels, where the golden data has no case of it."""

from dataclasses import replace

import numpy as np
import pytest

from tests.rexuninlu import find_case, load_tokenizer
from vectormill.domain.schema import Schema
from vectormill.ragged import Ragged
from worker.tasks.extract.extraction import Extraction
from worker.tasks.extract.prompts import CLASSIFY, HintWriter, Window, cut_windows
from worker.tasks.extract.records import Label, choose_at_last, choose_of_level, find_type_places, read_spans


def cut(model: str, types: list[str], text: str) -> list[Window]:
    tokenizer = load_tokenizer(model)
    hint = HintWriter(tokenizer, types).write([{(): dict.fromkeys(types)}])[0].hints[0]
    return list(cut_windows(hint, text, tokenizer.encode([text])[0], tokenizer, 32))


def row_of(*cells: tuple[int, int]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """A row of results with these cells, each of logit 2."""
    return np.array([len(cells), *(number for cell in cells for number in (*cell, 2, 2))], np.float32)


def row_of_span(
    window: Window, head: int, tail: int, question: int = 0
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    place = int(window.hint.type_places[question])
    return row_of((head, tail), (head, place), (place, tail))


def test_a_span_that_would_begin_behind_the_text_is_passed_over() -> None:
    """The closing [SEP] of a blank text stands at its beginning, and the spaces behind that reach to its end."""
    (window,) = cut("model", ["人物"], "   ")
    last = len(window) - 1
    assert list(read_spans(window, row_of_span(window, last, last), "   ")) == []


def test_text_tokens_that_count_as_hint_hide_the_type_at_their_character() -> None:
    """In later windows of a tokenizer that gives type id 0 everywhere, one token of the text does, and the reference
    finds [TYPE] by the character at which a token begins.
    """
    types, text = ["人物", "地点"], "林晓峰在苏州。" * 120
    first, second, *_ = cut("model_b", types, text)
    hint_end = len(second.hint.tokens) + 2
    assert (first.num_hint_tokens, second.num_hint_tokens) == (hint_end, hint_end + 1)
    assert find_type_places(second).tolist() == second.hint.type_places.tolist()
    begins_at = int(second.tokens.starts[hint_end])
    hidden = replace(second, hint=replace(second.hint, type_chars=(second.hint.type_chars[0], begins_at)))
    assert find_type_places(hidden).tolist() == [int(second.hint.type_places[0]), hint_end]


def test_a_text_that_has_grown_is_the_text_of_the_next_level() -> None:
    """The token that was put in before the second window is text below: a label found there counts."""
    schema: Schema = {"餐饮": {"正面": None}}
    text = find_case("s_cls_windows_mean")["text"][:700]
    extraction = Extraction(load_tokenizer("model"), schema, [text])
    assert extraction.start() is not None
    roots = [window for _, window in extraction._asked]
    assert len(roots) == 2
    first = roots[0].num_hint_tokens
    rows = [row_of_span(roots[0], first, first), row_of()]
    assert extraction.take(Ragged.from_rows(rows, np.float32)) is not None
    below = [window for _, window in extraction._asked]
    token = load_tokenizer("model").classify_ids[CLASSIFY]
    # In the text's part of the second window: the one that this level puts in, and the one that the level before did.
    places = [
        int(place)
        for place in np.flatnonzero(below[1].tokens.ids == token)
        if place >= below[1].num_hint_tokens
    ]
    assert len(places) == 2
    rows = [row_of() for _ in below]
    rows[1] = row_of_span(below[1], places[1], places[1])
    prompts = extraction.take(Ragged.from_rows(rows, np.float32))
    assert prompts is None
    assert extraction.finish() == [
        [[{"type": name, "span": CLASSIFY, "offset": [0, 10]} for name in ("餐饮", "正面")]]
    ]


@pytest.mark.parametrize(
    ("hints", "wanted"),
    [
        # Of several hints the greatest sum over the path wins, and so the longer path.
        ([{("甲", "乙"): [[0.5, 0.5]]}, {("丙",): [[0.9]]}], Label(("甲", "乙"), (0.5, 0.5))),
        # Of several paths of one hint too, by the means of their windows.
        (
            [{("丙",): [[0.9]], ("甲", "乙"): [[0.5, 0.6], [0.5, 0.4]]}],
            Label(("甲", "乙"), (0.5, 0.5)),
        ),
        # Of equal ones the first.
        ([{("甲",): [[0.5]]}, {("乙",): [[0.5]]}], Label(("甲",), (0.5,))),
        ([{}, {("乙",): [[0.5], [0.7]]}], Label(("乙",), (0.5,))),
    ],
)
def test_a_level_adds_the_label_with_the_greatest_sum(
    hints: list[dict[tuple[str, ...], list[list[float]]]], wanted: Label
) -> None:
    assert choose_of_level(CLASSIFY, hints) == [wanted]


def test_at_last_the_greatest_mean_wins_and_not_the_longest_path() -> None:
    labels = [Label(("甲", "乙"), (0.5, 0.5)), Label(("丙",), (0.6,)), Label(("丁",), (0.6,))]
    assert choose_at_last(CLASSIFY, labels) == [labels[1]]
    assert choose_at_last(CLASSIFY, []) == []
