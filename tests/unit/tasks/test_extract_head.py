"""What of a matrix of logits comes back from the device, and what spans are made of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.rexuninlu import extract_of, find_case, load_tokenizer, read_head
from vectormill.domain.schema import Schema
from worker.batching.batch import Batch
from worker.tasks.extract.extraction import Extraction
from worker.tasks.extract.prompts import Window
from worker.tasks.extract.records import (
    NonFiniteLogits,
    TooManyCells,
    find_candidates,
    find_type_places,
    read_cells,
)


def start(model: str, schema: Schema, texts: list[str]) -> tuple[Batch, list[Window]]:
    extraction = Extraction(load_tokenizer(model), schema, texts)
    prompts = extraction.start()
    assert prompts is not None
    return Batch(prompts.inputs), [window for _, window in extraction._asked]


def find_spans(logits: NDArray[np.float32], window: Window) -> list[tuple[int, int, int]]:
    """The reference's rule, cell by cell: head, tail, question."""
    first, places = window.num_hint_tokens, find_type_places(window).tolist()
    texts = range(first, len(window))
    return [
        (head, tail, question)
        for head in texts
        for tail in texts
        if head <= tail and logits[head, tail] > 0
        for question, place in enumerate(places)
        if logits[head, place] > 0 and logits[place, tail] > 0
    ]


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from(["model", "model_b"]),
    types=st.lists(
        st.sampled_from(["人物", "地点", "机构", "时间", "[旧]"]), min_size=1, max_size=5, unique=True
    ),
    texts=st.lists(st.text("林晓峰在苏州 a[TYPE]", max_size=12), min_size=1, max_size=4),
    share=st.sampled_from([0.02, 0.2, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_spans_of_the_cells_that_come_back_are_those_of_all_cells(
    model: str, types: list[str], texts: list[str], share: float, seed: int
) -> None:
    """In a padded batch, in order. Padding is positive where it can be."""
    batch, windows = start(model, dict.fromkeys(types), texts)
    length = batch.max_length
    random = np.random.default_rng(seed)
    logits = np.where(random.random((len(batch), length, length)) < share, 1, -1).astype(np.float32)
    logits *= 1 + random.random(logits.shape, np.float32)
    for number, window in enumerate(windows):
        logits[number, len(window) :] = logits[number, :, len(window) :] = 9
    rows = read_head(batch, logits)
    for number, window in enumerate(windows):
        cells = read_cells(rows.row(number))
        found = find_candidates(cells, find_type_places(window), window.num_hint_tokens, len(window))
        wanted = find_spans(logits[number], window)
        assert list(zip(found.heads, found.tails, found.questions, strict=True)) == wanted
        places = find_type_places(window)
        for (head, tail, question), mean, turned in zip(
            wanted, found.confidences, found.transposed, strict=True
        ):
            three = [(head, tail), (head, places[question]), (places[question], tail)]
            for value, cell_values in (
                (mean, [logits[number, row, column] for row, column in three]),
                (turned, [logits[number, column, row] for row, column in three]),
            ):
                assert abs(value - np.mean([1 / (1 + np.exp(-logit)) for logit in cell_values])) < 1e-4


def test_cells_of_spans_without_a_type_do_not_come_back() -> None:
    """With a model that finds every second cell positive, and no end of any type, nothing is sent but the count."""
    batch, windows = start("model", {"人物": None}, ["林晓峰上周在苏州参观了晨光机械厂。"])
    logits = np.ones((1, batch.max_length, batch.max_length), np.float32)
    (place,) = windows[0].hint.type_places.tolist()
    logits[:, :, place] = -1
    logits[:, place, :] = -1
    assert read_head(batch, logits).covered.tolist() == [0.0]


def test_a_blank_sequence_sends_the_first_tokens_cells_whatever_their_signs() -> None:
    case = find_case("s_cls_blank")
    extraction = extract_of(case)
    prompts = extraction.start()
    assert prompts is not None
    assert "is_blank" not in prompts.inputs
    length = Batch(prompts.inputs).max_length
    blank = extraction.take(read_head(Batch(prompts.inputs), np.full((1, length, length), -1, np.float32)))
    assert blank is not None
    window = extraction._asked[0][1]
    first = window.num_hint_tokens
    logits = np.arange(length * length, dtype=np.float32).reshape(1, length, length) - length * length
    cells = read_cells(read_head(Batch(blank.inputs), logits).row(0))
    places = window.hint.type_places.tolist()
    wanted = {(first, first), *((first, place) for place in places), *((place, first) for place in places)}
    assert {(int(row), int(column)) for row, column, _, _ in cells} == wanted
    for row, column, logit, turned in cells:
        assert logit == logits[0, int(row), int(column)]
        assert turned == logits[0, int(column), int(row)]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_logit_that_is_not_finite_is_told_and_only_of_its_own_sequence(value: float) -> None:
    batch, _ = start("model", {"人物": None}, ["林晓峰", "林晓峰在苏州。"])
    logits = np.full((2, batch.max_length, batch.max_length), -1, np.float32)
    logits[0, 0, -1] = value  # padding of the first
    logits[1, 3, 3] = value
    rows = read_head(batch, logits)
    assert read_cells(rows.row(0)).shape == (0, 4)
    with pytest.raises(NonFiniteLogits):
        read_cells(rows.row(1))


def test_more_cells_than_the_bound_are_counted_and_not_sent() -> None:
    batch, windows = start("model", {"人物": None}, ["林晓峰", "林晓峰在苏州。"])
    logits = np.ones((2, batch.max_length, batch.max_length), np.float32)
    num_text = [len(window) - window.num_hint_tokens for window in windows]
    counts = [number * (number + 1) // 2 + 2 * number for number in num_text]
    rows = read_head(batch, logits, max_cells=counts[0])
    assert rows.lengths.tolist() == [1 + 4 * counts[0], 1]
    assert rows.row(1).tolist() == [counts[1]]
    assert len(read_cells(rows.row(0))) == counts[0]
    with pytest.raises(TooManyCells, match=str(counts[1])):
        read_cells(rows.row(1))


def test_type_tokens_in_a_text_ask_nothing() -> None:
    """A [TYPE] typed into a text is read as structure by the model, but is no question."""
    batch, windows = start("model", {"人物": None}, ["林[TYPE]晓峰"])
    logits = np.ones((1, batch.max_length, batch.max_length), np.float32)
    cells = read_cells(read_head(batch, logits).row(0))
    in_hint = {int(row) for row, column, _, _ in cells if row < windows[0].num_hint_tokens}
    assert in_hint == set(windows[0].hint.type_places.tolist())
