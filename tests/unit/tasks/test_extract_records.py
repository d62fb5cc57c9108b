"""Records of the golden data, alone and among others; texts that fail without harm to others; and shared batches."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch

from tests.protocol import SPEC
from tests.rexuninlu import (
    CPU,
    GOLDEN,
    MODELS,
    Case,
    FromCase,
    by_network,
    compute_cells,
    describe,
    drive,
    extract_of,
    find_case,
    has_all_logits,
    is_certain,
    join_inputs,
    list_cases,
    load,
    load_tokenizer,
    summarize,
)
from tests.rounds import ask
from vectormill.domain.schema import EMPTY_HINT_COST, MAX_HINT_COST, Schema
from vectormill.jobs.item import ENCODING_FAILED, NON_FINITE_VECTOR, OUT_OF_MEMORY, ItemFailure
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.batching.pool import BatchLimits
from worker.engine.request_queue import RequestQueue, Ticket
from worker.tasks.extract.extract import Extract, Prompts
from worker.tasks.extract.extraction import Extraction, RexUniNLU
from worker.tasks.extract.model.network import RexNetwork
from worker.tasks.extract.prompts import CLASSIFY, IS_BLANK, HintWriter, Window, cut_windows
from worker.tasks.extract.records import (
    NON_FINITE_ROW,
    Label,
    Limits,
    choose_at_last,
    choose_of_level,
    find_type_places,
    read_spans,
)
from worker.tasks.task import Finished, Rounds, advance
from worker.tokens.tokenized import TokenizedTexts

# Where arithmetic decides a sign, long texts have so many records more or less.
UNCERTAIN_SHARE = 0.02


def check_records(case: Case, answer: object, *, is_exact: bool) -> None:
    output = case["output"]
    if output is None:
        assert isinstance(answer, ItemFailure)
        assert case["raises"]
    elif is_exact:
        assert describe(answer) == summarize(output), case["id"]
    else:
        assert isinstance(answer, list)
        assert abs(len(answer) - output["count"]) <= max(1, UNCERTAIN_SHARE * output["count"])


def test_records_of_the_references_logits_are_the_references() -> None:
    for case in filter(has_all_logits, list_cases()):
        extraction = extract_of(case)
        drive(extraction, FromCase(case))
        check_records(case, extraction.finish()[0], is_exact=True)


def test_labels_with_confidences_are_the_references_before_it_chooses() -> None:
    for case in filter(has_all_logits, list_cases()):
        if "output_with_confidence" in case:
            extraction = extract_of(case, with_confidences=True)
            drive(extraction, FromCase(case))
            assert describe(extraction.finish()[0]) == summarize(case["output_with_confidence"]), case["id"]


@pytest.mark.parametrize("size", [3, 1, 8])
@pytest.mark.parametrize("model", MODELS)
def test_records_do_not_depend_on_the_batches(model: str, size: int) -> None:
    """All natural cases at once: those of a schema in one extraction, and the sequences of all mixed."""
    cases = sorted(list_cases("natural", model), key=lambda case: str(case["schema"]))
    groups = [list(group) for _, group in groupby(cases, key=lambda case: str(case["schema"]))]
    assert any(len(group) > 2 for group in groups)
    extractions = [
        Extraction(load_tokenizer(model), group[0]["schema"], [case["text"] for case in group])
        for group in groups
    ]
    advance_together(extractions, load(model), size)
    for group, extraction in zip(groups, extractions, strict=True):
        for case, answer in zip(group, extraction.finish(), strict=True):
            check_records(case, answer, is_exact=is_certain(case))


def advance_together(extractions: Sequence[Extraction], net: RexNetwork, size: int) -> None:
    """Takes all to their ends, the sequences of all in batches of so many, in any order."""
    asking = {number: extraction.start() for number, extraction in enumerate(extractions)}
    while live := {number: prompts for number, prompts in asking.items() if prompts is not None}:
        batch = join_inputs(list(live.values()))
        order = random.Random(size).sample(range(len(batch)), len(batch))
        parts = [np.array(order[start : start + size]) for start in range(0, len(batch), size)]
        rows = Ragged.join([compute_cells(net, batch.take(part), CPU) for part in parts])
        rows = rows.take(np.argsort(order))
        start = 0
        asking = {}
        for number, prompts in live.items():
            asking[number] = extractions[number].take(rows.part(start, start + len(prompts)))
            start += len(prompts)


def test_a_text_of_a_schema_that_asks_nothing_costs_no_forward_pass() -> None:
    extraction = extract_of(find_case("all_types_too_long"))
    assert extraction.start() is None
    assert extraction.finish() == [[]]
    assert extraction.num_left_out == [1]


# Failures of one text among others.

SCHEMA: Schema = {"人物": {"职务": None}, "地点": None}
TEXTS = ["林晓峰上周在苏州。", "郭明远任教授。", "周海棠在杭州。"]


def say_yes(prompts: Prompts, yes: int) -> Ragged:
    """Every cell of the text with this index is positive, and no other's."""
    logits = [
        np.full((length, length), 1.0 if text == yes else -1.0, np.float32)
        for length, text in zip(prompts.inputs["input_ids"].lengths, prompts.texts, strict=True)
    ]
    rows = []
    for matrix in logits:
        cells = np.argwhere(matrix > 0).astype(np.float32)
        rows.append(np.concatenate([[len(cells)], np.c_[cells, np.ones((len(cells), 2))].reshape(-1)]))
    return Ragged.from_rows(rows, np.float32)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(max_spans=20), "more than 20 spans"),
        (Limits(max_prefixes=5), "at most 5 are allowed"),
    ],
)
def test_a_text_in_which_everything_is_found_fails_alone(limits: Limits, words: str) -> None:
    extraction = Extraction(load_tokenizer("model"), SCHEMA, TEXTS, limits=limits)
    prompts = extraction.start()
    while prompts is not None:
        prompts = extraction.take(say_yes(prompts, yes=1))
    first, failed, last = extraction.finish()
    assert first == last == []
    assert isinstance(failed, ItemFailure)
    assert failed.code == ENCODING_FAILED
    assert words in failed.detail


def test_a_text_that_takes_too_many_prompts_fails_before_they_are_computed() -> None:
    texts = [TEXTS[0], TEXTS[0] * 1000, TEXTS[2]]
    extraction = Extraction(load_tokenizer("model"), SCHEMA, texts, limits=Limits(max_windows=10))
    prompts = extraction.start()
    assert prompts is not None
    assert prompts.texts.tolist() == [0, 2]
    failed = extraction.finish()[1]
    assert isinstance(failed, ItemFailure)
    assert "more than 10 prompts" in failed.detail


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ([NON_FINITE_ROW], NON_FINITE_VECTOR),
        ([100_000.0], ENCODING_FAILED),  # more cells than come back
    ],
)
def test_a_text_whose_logits_cannot_be_read_fails_alone(row: list[float], code: str) -> None:
    extraction = Extraction(load_tokenizer("model"), SCHEMA, TEXTS)
    assert extraction.start() is not None
    assert extraction.take(Ragged.from_rows([np.zeros(1), np.array(row), np.zeros(1)], np.float32)) is None
    first, failed, last = extraction.finish()
    assert first == last == []
    assert isinstance(failed, ItemFailure)
    assert failed.code == code


def test_a_sequence_that_failed_elsewhere_fails_its_text_and_no_other() -> None:
    extraction = Extraction(load_tokenizer("model"), SCHEMA, TEXTS)
    assert extraction.start() is not None
    failure = ItemFailure(OUT_OF_MEMORY, "too little memory")
    prompts = extraction.take(Ragged.from_rows([np.zeros(1)] * 3, np.float32), {0: failure})
    assert prompts is None
    assert extraction.finish() == [failure, [], []]


def test_results_of_other_sequences_are_refused() -> None:
    extraction = Extraction(load_tokenizer("model"), SCHEMA, TEXTS)
    assert extraction.start() is not None
    with pytest.raises(ValueError, match="rows of results, one per sequence; got 2"):
        extraction.take(Ragged.from_rows([np.zeros(1)] * 2, np.float32))


def test_a_prompt_typed_into_a_text_fails_that_text_alone() -> None:
    """The reference raises IndexError on [PREFIX] without [TYPE], and takes all other texts with it."""
    extraction = Extraction(load_tokenizer("model"), SCHEMA, ["林晓峰[PREFIX]在苏州。", TEXTS[0]])
    drive(extraction, by_network(load("model")))
    failed, other = extraction.finish()
    assert isinstance(failed, ItemFailure)
    assert "[PREFIX]" in failed.detail
    alone = Extraction(load_tokenizer("model"), SCHEMA, [TEXTS[0]])
    drive(alone, by_network(load("model")))
    assert other == alone.finish()[0]


def test_special_tokens_in_a_span_that_becomes_a_prompt_fail_that_text_alone() -> None:
    """With a tokenizer whose type ids are rebuilt, [SEP] in a hint ends it before its types."""
    extraction = Extraction(load_tokenizer("model_b"), SCHEMA, ["林晓峰[SEP]在苏州。", TEXTS[0]])
    prompts = extraction.start()
    while prompts is not None:
        prompts = extraction.take(say_yes(prompts, yes=0))
    failed, other = extraction.finish()
    assert isinstance(failed, ItemFailure)
    assert "[SEP]" in failed.detail
    assert other == []


def test_confidences_of_spans_are_those_of_the_cells_that_decide() -> None:
    """The reference has none there. The mean of sigmoids of the positive cells, rounded as the others are."""
    case = find_case("s_ner_basic")
    extraction = extract_of(case, with_confidences=True)
    drive(extraction, FromCase(case))
    answer = extraction.finish()[0]
    assert isinstance(answer, list)
    assert [{**step, "confidence": 0} for record in answer for step in record] == [
        {**step, "confidence": 0} for record in case["output"]["items"] for step in record
    ]
    logits = {(row, column): logit for row, column, logit in case["calls"][0]["cells"]}
    lows, highs = (float(torch.sigmoid(torch.tensor(end(logits.values())))) for end in (min, max))
    for record in answer:
        assert lows - 1e-4 <= record[-1]["confidence"] <= highs + 1e-4


def test_types_are_tokenized_once_for_a_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many texts and levels ask for them; and a text once for all its levels."""
    tokenizer = load_tokenizer("model")
    seen: list[str] = []

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer, name)

        def encode(self, texts: Sequence[str]) -> object:
            seen.extend(texts)
            return tokenizer.encode(texts)

    extraction = Extraction(Counting(), SCHEMA, TEXTS)  # type: ignore[arg-type]
    prompts = extraction.start()
    num_levels = 0
    while prompts is not None:
        num_levels += 1
        prompts = extraction.take(say_yes(prompts, yes=1))
    assert num_levels == 2
    assert len(seen) == len(set(seen))
    assert set(TEXTS) < set(seen)


def test_no_hint_is_longer_than_its_budget_and_every_type_is_asked_once() -> None:
    """Costs are of strings for themselves; what the window has is the whole hint."""
    schema: Schema = {f"类别{number:02}：{'事' * (number % 40)}": None for number in range(200)}
    writer = HintWriter(load_tokenizer("model"), schema)
    hints = writer.write([{(("人", "林", (0, 1)),): schema}])[0].hints
    asked = [question for hint in hints for question in hint.questions]
    assert len(hints) > 10
    assert [name for _, name in asked] == sorted(schema)
    assert all(len(hint.tokens) + EMPTY_HINT_COST <= MAX_HINT_COST for hint in hints)


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
        ([{("丙",): [[0.9]], ("甲", "乙"): [[0.5, 0.6], [0.5, 0.4]]}], Label(("甲", "乙"), (0.5, 0.5))),
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


TASK = Extract(RexUniNLU(GOLDEN / "model"))


def begin(case: Case) -> tuple[Rounds, TokenizedTexts]:
    """Return the rounds of an extraction, and the sequences of the first."""
    spec = replace(SPEC, task="extract", extract_schema=json.dumps(case["schema"]))
    rounds = TASK.process(spec, [case["text"].encode()], 1_000_000)
    return rounds, ask(rounds)[0]


def answer(rounds: Rounds, asked: TokenizedTexts) -> TokenizedTexts | None:
    following = advance(rounds, (compute_cells(load("model"), Batch(asked.inputs), CPU), {}))
    return None if isinstance(following, Finished) else following[0]


def add(board: RequestQueue, asked: TokenizedTexts) -> Ticket:
    ticket = Ticket(None, is_interactive=False)
    ticket.lay(asked, {})
    board.add(ticket)
    return ticket


def take_all(board: RequestQueue) -> list[set[int]]:
    """The requests of each batch."""
    batches = []
    while (work := board.next_work(is_runner_idle=True)) is not None:
        assert set(work.batch.inputs) >= {IS_BLANK}
        batches.append(set(work.sequences.requests.tolist()))
    return batches


def test_a_level_shares_a_batch_with_what_other_requests_ask_first() -> None:
    below = answer(*begin(find_case("ee_sport")))
    _, behind = begin(find_case("ee_biz"))
    assert below is not None
    board = RequestQueue(BatchLimits(4096))
    tickets = [add(board, below), add(board, behind)]
    assert {ticket.number for ticket in tickets} in take_all(board)


def test_a_text_that_is_asked_again_whatever_the_signs_shares_a_batch_with_one_that_is_not() -> None:
    blank = answer(*begin(find_case("cls_single")))
    _, first = begin(find_case("cls_nested"))
    assert blank is not None
    assert blank.inputs[IS_BLANK].covered.all()
    board = RequestQueue(BatchLimits(4096))
    add(board, blank)
    add(board, first)
    work = board.next_work(is_runner_idle=True)
    assert work is not None
    is_blank = work.batch.inputs[IS_BLANK].covered
    assert 0 < is_blank.sum() < len(is_blank)


def test_the_first_pass_of_a_chunk_asks_one_level_of_all_texts() -> None:
    """22 texts are as many sequences at least, and not one forward pass for each."""
    schema = find_case("ner_short")["schema"]
    cases = [case for case in list_cases("natural", "model") if case["schema"] == schema]
    extraction = Extraction(load_tokenizer("model"), schema, [case["text"] for case in cases])
    levels = drive(extraction, by_network(load("model")))
    assert len(levels) == 1
    assert levels[0].texts.tolist() == list(range(len(cases)))


def test_requests_near_their_end_leave_no_sequence_alone_while_others_wait() -> None:
    """Ten requests, each on another level, have a sequence or two each."""
    board = RequestQueue(BatchLimits(4096))
    for number in range(10):
        rounds, first = begin(find_case(("ee_sport", "ee_biz")[number % 2]))
        asked = answer(rounds, first) if number % 2 else first
        if asked is not None:
            add(board, asked)
    batches = take_all(board)
    assert len(batches) <= 3
    assert all(len(requests) > 1 for requests in batches)
