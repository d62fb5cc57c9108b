"""Levels of different requests, and texts that are asked again whatever the signs, share batches."""

import json
from dataclasses import replace

from tests.protocol import SPEC
from tests.rexuninlu import CPU, GOLDEN, Case, find_case, load
from worker.batching.batch import Batch
from worker.batching.limits import BatchLimits
from worker.engine.request_queue import RequestQueue, Ticket
from worker.tasks.extract.extraction import Extract, ExtractCourse
from worker.tasks.extract.model.head import compute_cells
from worker.tasks.extract.prompts import IS_BLANK
from worker.tokens.tokenized import TokenizedTexts

TASK = Extract(GOLDEN / "model")


def begin(case: Case) -> ExtractCourse:
    spec = replace(SPEC, task="extract", extract_schema=json.dumps(case["schema"]))
    return TASK.begin(spec, [case["text"].encode()], 1_000_000)


def answer(course: ExtractCourse, asked: TokenizedTexts) -> TokenizedTexts | None:
    return course.take(compute_cells(load("model"), Batch(asked.inputs), CPU), {})


def add(board: RequestQueue, asked: TokenizedTexts) -> Ticket:
    ticket = Ticket(None, is_interactive=False)
    ticket.lay(asked, 0)
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
    ahead, behind = begin(find_case("ee_sport")), begin(find_case("ee_biz"))
    below = answer(ahead, ahead.start())
    assert below is not None
    board = RequestQueue(BatchLimits(4096))
    tickets = [add(board, below), add(board, behind.start())]
    assert {ticket.number for ticket in tickets} in take_all(board)


def test_a_text_that_is_asked_again_whatever_the_signs_shares_a_batch_with_one_that_is_not() -> None:
    again, first = begin(find_case("cls_single")), begin(find_case("cls_nested"))
    blank = answer(again, again.start())
    assert blank is not None
    assert blank.inputs[IS_BLANK].covered.all()
    board = RequestQueue(BatchLimits(4096))
    add(board, blank)
    add(board, first.start())
    work = board.next_work(is_runner_idle=True)
    assert work is not None
    is_blank = work.batch.inputs[IS_BLANK].covered
    assert 0 < is_blank.sum() < len(is_blank)


def test_requests_near_their_end_leave_no_sequence_alone_while_others_wait() -> None:
    """Of ten requests each on another level, with a sequence or two each."""
    board = RequestQueue(BatchLimits(4096))
    for number in range(10):
        course = begin(find_case(("ee_sport", "ee_biz")[number % 2]))
        asked: TokenizedTexts | None = course.start()
        for _ in range(number % 2):
            assert asked is not None
            asked = answer(course, asked)
        if asked is not None:
            add(board, asked)
    batches = take_all(board)
    assert len(batches) <= 3
    assert all(len(requests) > 1 for requests in batches)
