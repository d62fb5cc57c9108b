"""Requests are taken apart into batches, and every vector comes back to the text it belongs to."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vectormill.jobs.item import OUT_OF_MEMORY
from vectormill.ragged import Ragged
from worker.batching.batch import OUTPUTS, Batch, OwnedBatch
from worker.batching.cost import BatchCost
from worker.batching.pool import BatchLimits
from worker.engine.request import EncodingCancelled, EngineStopped
from worker.engine.request_queue import Admission, RequestQueue, Ticket
from worker.tokens.tokenized import SPANS, TokenizedTexts


def tokenized(rows: list[list[int]]) -> TokenizedTexts:
    arrays = [np.array(row, dtype=np.int32) for row in rows]
    return TokenizedTexts.from_rows(arrays, np.zeros(len(rows), dtype=np.bool_), {})


def encode(batch: Batch) -> Ragged:
    """The sum, the last id, the length and the prompt of each sequence: not equal for any two texts here."""
    bounds = np.cumsum(batch.lengths)[:-1]
    prompts = np.zeros(len(batch)) if batch.prompt_lengths is None else batch.prompt_lengths
    rows = zip(np.split(batch.input_ids, bounds), batch.lengths, prompts, strict=True)
    return Ragged.from_matrix(
        np.array([[ids.sum(), ids[-1], n, prompt] for ids, n, prompt in rows], dtype=np.float32)
    )


def ticket_of(rows: list[list[int]], *, prompt_length: int = 0, is_interactive: bool = False) -> Ticket:
    ticket = Ticket(4, is_interactive=is_interactive)
    ticket.lay(tokenized(rows), {"prompt_length": prompt_length})
    return ticket


@pytest.mark.parametrize("is_first", [True, False])
def test_a_batch_has_the_passages_of_the_requests_that_ask_for_them_and_no_others(is_first: bool) -> None:
    queue = RequestQueue(BatchLimits(64), clock=lambda: 0.0)
    bare, late = ticket_of([[1], [2, 3]]), Ticket(4, is_interactive=False)
    texts = tokenized([[4, 5, 6], [7, 8]])
    spans = Ragged.from_rows([np.array([0, 1, 1, 3]), np.array([0, 2])], np.int32)
    late.lay(replace(texts, inputs={**texts.inputs, SPANS: spans}), {OUTPUTS: 8})
    for ticket in (late, bare) if is_first else (bare, late):
        queue.add(ticket)
    work = next_work(queue)
    assert work is not None
    inputs = work.batch.inputs
    names = ("input_ids", SPANS, OUTPUTS)
    found = [tuple(inputs[name].row(place).tolist() for name in names) for place in range(4)]
    asked = [([4, 5, 6], [0, 1, 1, 3], [8]), ([7, 8], [0, 2], [8])]
    assert sorted(found) == [([1], [], [0]), ([2, 3], [], [0]), *asked]


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    longest=st.integers(0, 9),
)
def test_exactly_the_texts_for_which_the_plan_has_no_room_fail_before_they_are_queued(
    lengths: list[int], longest: int
) -> None:
    queue = RequestQueue(BatchLimits(64), clock=lambda: 0.0, longest_text_tokens=longest)
    ticket = ticket_of([[1] * length for length in lengths])
    queue.add(ticket)
    too_long = {place for place, length in enumerate(lengths) if 0 < longest < length}
    assert ticket.failures.keys() == too_long
    assert {failure.code for failure in ticket.failures.values()} <= {OUT_OF_MEMORY}
    encoded: list[int] = []
    while work := next_work(queue):
        encoded += work.batch.lengths.tolist()
        queue.deliver(work, encode(work.batch), 1.0)
    assert sorted(encoded) == sorted(
        length for place, length in enumerate(lengths) if length and place not in too_long
    )
    assert ticket.done.is_set()


def test_seconds_of_a_gpu_that_workers_share_are_counted_once_and_those_of_waiting_for_it_whole() -> None:
    queue = RequestQueue(BatchLimits(64), clock=lambda: 0.0)
    ticket = ticket_of([[1] * 4] * 3)
    queue.add(ticket)
    work = next_work(queue)
    assert work is not None
    queue.deliver(work, encode(work.batch), 2.0, 0.0, 0.25)
    assert (queue.tally.busy_seconds, queue.tally.run_seconds) == (2.0, 0.5)
    assert ticket.run_seconds == 2.0, "what is left of its time is waiting for other stages"


def next_work(queue: RequestQueue) -> OwnedBatch | None:
    return queue.next_work(is_runner_idle=True)


ROWS = st.lists(st.lists(st.integers(1, 10_000), max_size=30), max_size=20)


@given(st.lists(st.tuples(ROWS, st.integers(0, 3), st.booleans()), max_size=6), st.booleans())
def test_every_text_gets_its_own_vector(
    requests: list[tuple[list[list[int]], int, bool]], fails: bool
) -> None:
    queue = RequestQueue(BatchLimits(64), clock=lambda: 0.0)
    tickets = [
        ticket_of(rows, prompt_length=prompt_length, is_interactive=is_interactive)
        for rows, prompt_length, is_interactive in requests
    ]
    for ticket in tickets:
        queue.add(ticket)
    num_computed = 0
    while work := next_work(queue):
        for part in work.parts() if fails else (work,):
            num_computed += part.batch.num_padded_tokens
            queue.deliver(part, encode(part.batch), 1.0)
    for ticket, (rows, prompt_length, _) in zip(tickets, requests, strict=True):
        assert ticket.done.is_set()
        expected = [
            [sum(row), row[-1], len(row), min(prompt_length, len(row))] if row else [0] * 4 for row in rows
        ]
        assert ticket.join().matrix.tolist() == expected
    num_tokens = sum(len(row) for rows, *_ in requests for row in rows)
    assert num_tokens + sum(ticket.num_padding_tokens for ticket in tickets) == num_computed
    assert queue.tally.num_tokens == num_tokens


def test_the_last_sequences_are_shared_out_among_the_streams_of_the_encoder_that_was_adopted() -> None:
    queue = RequestQueue(BatchLimits(64), clock=lambda: 0.0)
    queue.adopt(BatchCost(), 4, 4)
    queue.add(ticket_of([[1] * 8] * 16))
    batches = [work for _ in range(4) if (work := next_work(queue))]
    assert [len(work.sequences) for work in batches[:2]] == [4, 3], "quarters of what waits"
    queue.adopt(BatchCost(), 1)
    queue.add(ticket_of([[1] * 8] * 16))
    work = next_work(queue)
    assert work is not None
    assert len(work.sequences) == 8


def test_what_is_being_encoded_of_a_withdrawn_request_is_dropped_and_its_company_is_not() -> None:
    queue = RequestQueue(BatchLimits(64), clock=lambda: 0.0)
    gone, stays = ticket_of([[1, 2, 3]]), ticket_of([[4, 5, 6]])
    queue.add(gone)
    queue.add(stays)
    work = next_work(queue)
    assert work is not None
    assert len(work.sequences) == 2
    queue.withdraw(gone)
    queue.deliver(work, encode(work.batch), 1.0)
    assert stays.done.is_set()
    assert stays.join().matrix.tolist() == [[15, 6, 3, 0]]
    assert not gone.join().matrix.any()


def test_a_batch_is_urgent_if_an_interactive_request_is_in_it() -> None:
    queue = RequestQueue(BatchLimits(64), clock=lambda: 0.0)
    queue.add(ticket_of([[1, 2, 3]] * 20))
    queue.add(ticket_of([[1, 2]], is_interactive=True))
    assert [work.is_urgent for work in iter(lambda: next_work(queue), None)] == [True, False]
    assert queue.next_work(is_runner_idle=True, only_urgent=True) is None


@given(st.lists(st.lists(st.integers(1, 10_000), max_size=30), min_size=1, max_size=20), st.data())
def test_results_of_any_length_and_named_inputs_go_with_their_text(
    rows: list[list[int]], data: st.DataObject
) -> None:
    """A model of two inputs answers with bytes: the lowest byte of id times type, of some of the tokens."""
    types = [[data.draw(st.integers(0, 3)) for _ in row] for row in rows]
    texts = tokenized(rows)
    texts = replace(
        texts,
        inputs={
            **texts.inputs,
            "token_type_ids": Ragged.from_rows([np.array(row, np.int32) for row in types], np.int32),
        },
    )

    def answer(ids: list[int], kinds: list[int]) -> list[int]:
        return [one * kind % 256 for one, kind in zip(ids, kinds, strict=True)][: ids[-1] % 7]

    ticket = Ticket(None, is_interactive=False)
    ticket.lay(texts, {})
    queue = RequestQueue(BatchLimits(64), clock=lambda: 0.0)
    queue.add(ticket)
    while work := next_work(queue):
        ids, kinds = (work.batch.inputs[name] for name in ("input_ids", "token_type_ids"))
        answers = [answer(ids.row(i).tolist(), kinds.row(i).tolist()) for i in range(len(work.batch))]
        results = Ragged.from_rows([np.array(each, np.uint8) for each in answers], np.uint8)
        queue.deliver(work, results, 1.0)
        results.values[:] = 0  # whoever computed them uses the memory again
    expected = [answer(*both) if both[0] else [] for both in zip(rows, types, strict=True)]
    joined = ticket.join()
    assert len(joined) == len(rows)
    if any(rows):
        assert ticket.vectors is None
        assert [joined.row(index).tolist() for index in range(len(rows))] == expected


def test_vectors_that_are_known_are_not_computed_and_stand_in_their_rows() -> None:
    queue = RequestQueue(BatchLimits(64), clock=lambda: 0.0)
    ticket = ticket_of([[], [1, 2, 3], [4, 5], [6]])
    ticket.take_over(np.array([0, 2]), np.array([[1, 1, 1, 1], [3, 3, 3, 3]], np.float32))
    queue.add(ticket)
    work = next_work(queue)
    assert work is not None
    assert work.batch.input_ids.tolist() == [4, 5]
    queue.deliver(work, encode(work.batch), 1.0)
    assert ticket.done.is_set()
    assert ticket.num_reused == 2
    assert ticket.join().matrix.tolist() == [[0] * 4, [1] * 4, [9, 5, 2, 0], [3] * 4]


def test_requests_are_admitted_until_those_inside_have_the_tokens_or_the_places() -> None:
    never, admission = threading.Event(), Admission(2, lambda: 100)
    cancelled = threading.Event()
    cancelled.set()
    with admission.hold(1000, never, lambda: True):  # of any size, or it would never come in
        with pytest.raises(EncodingCancelled), admission.hold(1, cancelled, lambda: True):
            pass
        with pytest.raises(EngineStopped), admission.hold(1, never, lambda: False):
            pass
    with admission.hold(1, never, lambda: True), admission.hold(1, never, lambda: True):
        with pytest.raises(EncodingCancelled), admission.hold(0, cancelled, lambda: True):
            pass
        waiting = threading.Thread(target=lambda: enter(admission))
        waiting.start()
    waiting.join(10)
    assert not waiting.is_alive()
    assert admission.num_free == 2


def enter(admission: Admission) -> None:
    with admission.hold(5, threading.Event(), lambda: True):
        pass
