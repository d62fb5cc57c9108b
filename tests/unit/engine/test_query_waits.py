"""How long a query waits behind the bulk of a model that devices share in stages, on a simulated clock."""

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.test_in_flight import KNOWN_TEXTS, REPORT, VECTOR
from tests.unit.engine.test_tuner import GIB, make_tuner
from vectormill.ragged import Ragged
from worker.batching.cost import BatchCost
from worker.batching.pool import BatchLimits
from worker.devices.device import CUDA
from worker.engine.in_flight import InFlight
from worker.engine.request_queue import RequestQueue, Ticket
from worker.engine.tuner import LEAST_ACCELERATOR_TOKENS
from worker.runner.memory import MemoryReport
from worker.runner.messages import Encode, Encoded, Started
from worker.tokens.tokenized import TokenizedTexts

TIMEOUT_SECONDS = 30.0
LENGTH = 128


class StagedReplica:
    """A pipeline of equal stages on a simulated clock, with its executor. There is always bulk but during a `rest`."""

    def __init__(self, num_stages: int, tokens_per_second: float) -> None:
        self.now = 0.0
        self._tokens_per_second = tokens_per_second  # of a stage
        self._free_at = [0.0] * num_stages
        self._sent: deque[tuple[float, Encode]] = deque()  # with the time of the answer
        tuner = make_tuner(CUDA, 80 * GIB, query_timeout_seconds=TIMEOUT_SECONDS)
        self.tuner = tuner
        self.queue = RequestQueue(BatchLimits(1), tuner.max_batch_tokens, lambda: self.now)
        self.in_flight = InFlight(self.queue, tuner, KNOWN_TEXTS, 4)
        report = replace(REPORT, num_stages=num_stages, is_queued=True, is_packed=True)
        memory, cost = MemoryReport(0, 0, 0, 0.1), BatchCost(pads=False)
        tuner.begin(report, memory, cost)
        self.queue.adopt(cost, report.num_started, report.num_computed)
        self.in_flight.begin(report, memory)
        self._bulk = self.ask(0)
        while self.in_flight.check.is_open:
            self.run()

    def ask(self, num_texts: int, *, is_interactive: bool = False) -> Ticket:
        ticket = Ticket(4, is_interactive=is_interactive)
        rows = [np.zeros(LENGTH, np.int32)] * num_texts
        ticket.lay(TokenizedTexts.from_rows(rows, np.zeros(num_texts, np.bool_), {}), {})
        self.queue.add(ticket)
        return ticket

    def send(self) -> None:
        """Send what there is room for."""
        if self._bulk.done.is_set() and not self.in_flight.check.is_open:
            self._bulk = self.ask(10_000)
        while message := self.in_flight.next_message():
            self._send(message)

    def run(self) -> None:
        """Send what there is room for, and go on to the next answer."""
        self.send()
        self._hear_next()

    def rest(self) -> None:
        """Compute what was sent, and nothing else."""
        self.queue.withdraw(self._bulk)
        while self._sent:
            self._hear_next()
        self._bulk = self.ask(0)

    def _hear_next(self) -> None:
        self.now, message = self._sent.popleft()
        rows = np.tile(VECTOR, (len(message.batch), 1))
        self.in_flight.receive(Started(message.number))
        self.in_flight.receive(Encoded(message.number, Ragged.from_matrix(rows), self._take_seconds(message)))

    def _send(self, message: Encode) -> None:
        at = self.now
        for stage, free_at in enumerate(self._free_at):
            at = self._free_at[stage] = max(at, free_at) + self._take_seconds(message)
        self._sent.append((at, message))

    def _take_seconds(self, message: Encode) -> float:
        return message.batch.num_tokens / self._tokens_per_second


@settings(max_examples=25, deadline=None)
@given(
    num_stages=st.integers(1, 8),
    tokens_per_second=st.floats(np.log(1400), np.log(1e6)).map(np.exp),
    before=st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=5),
)
def test_a_query_is_answered_in_time_from_the_first_batch_on(
    num_stages: int, tokens_per_second: float, before: list[tuple[int, bool]]
) -> None:
    """It is asked when the replica has just been given as much bulk as it takes, at work or after a rest."""
    replica = StagedReplica(num_stages, tokens_per_second)
    for num_batches, has_rested in before:
        for _ in range(num_batches):
            replica.run()
        if has_rested:
            replica.rest()
        replica.send()
        asked_at, query = replica.now, replica.ask(1, is_interactive=True)
        while not query.done.is_set():
            replica.run()
        assert replica.now - asked_at < TIMEOUT_SECONDS


@pytest.mark.parametrize(
    ("num_stages", "tokens_per_second", "batch_tokens"),
    [
        (4, 1700.0, 4096),  # 70 billion weights in bf16: two such batches would take a sixth of 30 s
        (1, 4300.0, LEAST_ACCELERATOR_TOKENS),  # 7 billion on one device
        (1, 300_000.0, 32_768),  # 100 million: the next size would take more than 0.1 s
    ],
)
def test_batches_grow_to_what_a_device_needs_as_far_as_queries_may_wait(
    num_stages: int, tokens_per_second: float, batch_tokens: int
) -> None:
    replica = StagedReplica(num_stages, tokens_per_second)
    for _ in range(100):
        replica.run()
    budgets: dict[str, Any] = replica.tuner.describe()["budgets"]
    assert budgets["up to 256"]["max_batch_tokens"] == batch_tokens
