"""Requests are taken apart into batches, and every vector comes back to the text it belongs to."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.batching.limits import BatchLimits
from worker.engine.switchboard import Switchboard, Ticket
from worker.execution.work import Work
from worker.tokens.tokenized import TokenizedTexts


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
    return Ticket.for_texts(tokenized(rows), 4, prompt_length, is_interactive)


def next_work(switchboard: Switchboard) -> Work | None:
    return switchboard.next_work(is_runner_idle=True)


ROWS = st.lists(st.lists(st.integers(1, 10_000), max_size=30), max_size=20)


@given(st.lists(st.tuples(ROWS, st.integers(0, 3), st.booleans()), max_size=6), st.booleans())
def test_every_text_gets_its_own_vector(
    requests: list[tuple[list[list[int]], int, bool]], halve: bool
) -> None:
    switchboard = Switchboard(BatchLimits(64), clock=lambda: 0.0)
    tickets = [
        ticket_of(rows, prompt_length=prompt_length, is_interactive=is_interactive)
        for rows, prompt_length, is_interactive in requests
    ]
    for ticket in tickets:
        switchboard.add(ticket)
    num_computed = 0
    while work := next_work(switchboard):
        for part in work.halves() if halve and len(work.sequences) > 1 else (work,):
            num_computed += part.batch.num_padded_tokens
            switchboard.deliver(part, encode(part.batch), 1.0)
    for ticket, (rows, prompt_length, _) in zip(tickets, requests, strict=True):
        assert ticket.done.is_set()
        expected = [
            [sum(row), row[-1], len(row), min(prompt_length, len(row))] if row else [0] * 4 for row in rows
        ]
        assert ticket.vectors.tolist() == expected
    num_tokens = sum(len(row) for rows, *_ in requests for row in rows)
    assert num_tokens + sum(ticket.num_padding_tokens for ticket in tickets) == num_computed
    assert switchboard.tally.num_tokens == num_tokens


def test_what_is_being_encoded_of_a_withdrawn_request_is_dropped_and_its_company_is_not() -> None:
    switchboard = Switchboard(BatchLimits(64), clock=lambda: 0.0)
    gone, stays = ticket_of([[1, 2, 3]]), ticket_of([[4, 5, 6]])
    switchboard.add(gone)
    switchboard.add(stays)
    work = next_work(switchboard)
    assert work is not None
    assert len(work.sequences) == 2
    switchboard.withdraw(gone)
    switchboard.deliver(work, encode(work.batch), 1.0)
    assert stays.done.is_set()
    assert stays.vectors.tolist() == [[15, 6, 3, 0]]
    assert not gone.vectors.any()


def test_a_batch_is_urgent_if_an_interactive_request_is_in_it() -> None:
    switchboard = Switchboard(BatchLimits(64), clock=lambda: 0.0)
    switchboard.add(ticket_of([[1, 2, 3]] * 20))
    switchboard.add(ticket_of([[1, 2]], is_interactive=True))
    assert [work.is_urgent for work in iter(lambda: next_work(switchboard), None)] == [True, False]
    assert switchboard.next_urgent_work() is None
