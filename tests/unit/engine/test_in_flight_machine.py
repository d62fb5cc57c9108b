"""Any history of a replica: texts that raise, exhaust or kill, processes that are killed, hang or fall sick.

The replica is simulated. It is one process that goes on after a failed batch, or a group of ranks that ends with it;
the pool, the budget and the decisions about batches are real.
"""

import math
import random
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.engine.test_in_flight import KNOWN_TEXTS, REPORT, VECTOR
from vectormill.jobs.item import ENCODING_FAILED, OUT_OF_MEMORY
from vectormill.ragged import Ragged
from worker.batching.batch import Batch, OwnedBatch
from worker.batching.budget import BudgetRules, TokenBudget
from worker.batching.pool import BatchLimits
from worker.engine.in_flight import SICKENED_BY_ONE, InFlight
from worker.engine.request import EngineStopped, RunnerDied
from worker.engine.request_queue import RequestQueue, Ticket
from worker.runner.memory import MemoryReport
from worker.runner.messages import Encode, Encoded, EncodeFailed, Started
from worker.runner.runner import RunnerLost
from worker.tokens.tokenized import TokenizedTexts

GOOD, RAISES, KILLS = "good", "raises", "kills"
MAX_RESTARTS = 5
START_TOKENS = 64


@dataclass(frozen=True)
class Nature:
    """The settings of a simulated replica. Batches of more than `memory_tokens` run out of memory."""

    start_tokens: int = field(default=START_TOKENS, kw_only=True)

    is_group: bool = True
    is_queued: bool = False
    memory_tokens: int = 32
    is_killed: bool = False  # by the kernel, for lack of memory; otherwise the allocator raises an error
    falls_sick: bool = False  # after it ran out of memory


@dataclass
class Ledger:
    """The losses and failures that a simulated replica has gone through."""

    num_reloads: int = 0
    num_allowed: int = 0  # reloads that something accounts for
    num_in_row: int = 0  # since a batch was encoded or a text given up for its content
    num_exhausted: int = 0
    num_limits: int = 0  # how often a text that exhausted all ranks alone told how long others may be
    num_occasions: int = 0  # for that: requests, and limits that have ended
    has_been_disturbed: bool = False


class CountingBudget(TokenBudget):
    """The part of a Tuner that batches in flight use."""

    def __init__(self, ledger: Ledger, start_tokens: int) -> None:
        super().__init__(BudgetRules(start_tokens, is_tuned=False))
        self._ledger = ledger

    def observe_encoded(self, work: OwnedBatch, seconds: float, memory: MemoryReport | None) -> None:
        self._ledger.num_in_row = 0
        longest = work.length
        self.observe(
            longest,
            num_tokens=work.batch.num_tokens,
            cost=work.batch.num_padded_tokens,
            one_more=longest,
            seconds=seconds,
            num_streams=1,
        )

    def observe_exhausted(self, work: OwnedBatch, reason: str) -> None:
        self._ledger.num_exhausted += 1
        self.observe_out_of_memory(work.length, work.batch.num_padded_tokens)


class Tuned:
    """A CountingBudget under the names of a Tuner."""

    def __init__(self, budget: CountingBudget) -> None:
        self.observe_encoded = budget.observe_encoded
        self.observe_out_of_memory = budget.observe_exhausted
        self.noted: list[Batch] = []
        self.note = self.noted.append


class CountingQueue(RequestQueue):
    """A queue that notes in the ledger which texts were given up."""

    ledger: Ledger
    is_of_group: bool

    def fail_work(self, work: OwnedBatch, code: str, reason: str) -> None:
        self.ledger.num_in_row = 0
        super().fail_work(work, code, reason)

    def refuse_longer(self, work: OwnedBatch) -> None:
        self.ledger.num_limits += 1
        super().refuse_longer(work)


@dataclass
class SimulatedReplica:
    """A simulated replica with its executor."""

    nature: Nature
    ledger: Ledger = field(default_factory=Ledger)
    kinds: dict[int, str] = field(default_factory=dict)  # of each text, by its first token
    tickets: list[Ticket] = field(default_factory=list)
    inbox: deque[Encode] = field(default_factory=deque)
    is_sick: bool = False
    is_dead: bool = False
    now: float = 0.0
    _numbers: Any = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        budget = CountingBudget(self.ledger, self.nature.start_tokens)
        self.queue = CountingQueue(BatchLimits(START_TOKENS), budget.max_batch_tokens, lambda: self.now)
        self.queue.ledger, self.queue.is_of_group = self.ledger, self.nature.is_group
        self.tuned = Tuned(budget)
        self.in_flight = InFlight(self.queue, cast(Any, self.tuned), KNOWN_TEXTS, 4)
        self.load()

    def load(self) -> None:
        self.inbox.clear()
        self.is_sick = False
        report = replace(REPORT, is_queued=self.nature.is_queued)
        self.in_flight.begin(report, None)

    def ask(self, texts: list[tuple[int, str]], *, is_interactive: bool = False) -> None:
        rows = []
        for length, kind in texts:
            uid = next(self._numbers)
            self.kinds[uid] = kind
            rows.append(np.array([uid, *[0] * (length - 1)], np.int32))
        ticket = Ticket(4, is_interactive=is_interactive)
        ticket.lay(TokenizedTexts.from_rows(rows, np.zeros(len(rows), np.bool_), {}), {})
        self.tickets.append(ticket)
        self.ledger.num_occasions += 1
        if self.is_dead:
            with pytest.raises(EngineStopped):
                self.queue.add(ticket)
            self.tickets.pop()
        else:
            self.queue.add(ticket)

    def run(self) -> bool:
        """Compute one batch. Return False if there is none."""
        if self.is_dead:
            return False
        while message := self.in_flight.next_message():
            self.inbox.append(message)
        if not self.inbox:
            return False
        if not self.nature.is_group:
            self.inbox = deque(sorted(self.inbox, key=lambda each: not each.is_urgent))
        for begun in list(self.inbox)[: 1 + self.nature.is_queued]:
            if begun.number not in self.in_flight.started:
                self.in_flight.receive(Started(begun.number))
        self._compute(self.inbox.popleft())
        return True

    def _compute(self, message: Encode) -> None:
        batch = message.batch
        if message.number in self.in_flight.check.numbers:
            vectors = np.tile(-VECTOR if self.is_sick else VECTOR, (len(batch), 1))
            self.in_flight.receive(Encoded(message.number, Ragged.from_matrix(vectors), 0.1))
        else:
            self._encode(message)
        has_ended = bool(self.tuned.noted) and self.tuned.noted[-1] is message.batch
        assert has_ended or self.in_flight.is_sickness or self.ledger.num_reloads, (
            "its memory is in the next report"
        )
        if flaw := self.in_flight.check.flaw:
            self.lose(RunnerLost(flaw, is_sick=True))

    def _encode(self, message: Encode) -> None:
        batch, nature = message.batch, self.nature
        kinds = {self.kinds[uid] for uid in find_uids(batch)}
        work = self.in_flight.outstanding[message.number]
        is_exhausted = batch.num_padded_tokens > nature.memory_tokens
        if KILLS not in kinds and RAISES not in kinds and not is_exhausted:
            self.in_flight.receive(Encoded(message.number, encode(batch), 0.1))
            return
        ends = nature.is_group or KILLS in kinds or (is_exhausted and (nature.is_killed or nature.falls_sick))
        is_killed = KILLS in kinds or (is_exhausted and nature.is_killed)
        outstanding, begun = self.in_flight.outstanding, self.in_flight.started
        started = [outstanding[number] for number in begun if number in outstanding]
        for each in started if is_killed else [work]:  # nobody knows which of them has ended the process
            if ends and not each.num_failures:
                self._account(each)
        if KILLS in kinds:
            self.lose(RunnerLost("it died of SIGSEGV"))
        elif is_exhausted and nature.is_killed:
            self.lose(RunnerLost("the kernel killed it", is_exhausted=True))
        else:
            failed = EncodeFailed(message.number, "it failed", is_out_of_memory=is_exhausted)
            if nature.is_group:
                self.lose(RunnerLost("a rank failed", failed=failed))
            else:
                self.is_sick = is_exhausted and nature.falls_sick
                self.in_flight.receive(failed)

    def _account(self, work: OwnedBatch) -> None:
        """Allow a reload for a batch that failed for the first time, and for each bad text in it what it may take.

        All that are too long for a group are one cause, since none is tried any more once one has failed alone.
        """
        texts = find_lengths(work.batch)
        num_bad = sum(self.is_bad(uid, length) for uid, length in texts)
        if self.nature.is_group or self.nature.is_killed:
            num_raising = sum(self.kinds[uid] != GOOD for uid, _ in texts)
            num_bad = min(num_bad, num_raising + 1)
        # If two batches were started, nobody knows which of them has ended the process.
        of_one = 1 + self.nature.is_queued + SICKENED_BY_ONE * self.nature.falls_sick
        self.ledger.num_allowed += 1 + of_one * num_bad

    def is_bad(self, uid: int, length: int) -> bool:
        return self.kinds[uid] != GOOD or length > self.nature.memory_tokens

    def lose(self, loss: RunnerLost) -> None:
        self.in_flight.lose(loss)
        self.ledger.num_reloads += 1
        self.ledger.num_in_row += 1
        if self.in_flight.num_lost_in_row > MAX_RESTARTS:
            self.queue.close("too many were lost")
            self.is_dead = True
        else:
            self.load()

    def disturb(self, loss: RunnerLost) -> None:
        """Lose the processes for a reason that is no text's fault, with what waits for the known texts."""
        self.ledger.has_been_disturbed = True
        self.ledger.num_allowed += 1
        self.lose(loss)

    def drain(self) -> None:
        for _ in range(50 * (1 + len(self.kinds))):
            if not self.run():
                return
        raise AssertionError("it never ends")


def find_lengths(batch: Batch) -> list[tuple[int, int]]:
    lengths = batch.lengths
    return list(zip(find_uids(batch), lengths.tolist(), strict=True))


def find_uids(batch: Batch) -> list[int]:
    starts = np.cumsum(batch.lengths) - batch.lengths
    return [int(uid) for uid in batch.input_ids[starts]]


def encode(batch: Batch) -> Ragged:
    """The first token and the length of each text."""
    rows = [[uid, length, 0, 1] for uid, length in find_lengths(batch)]
    return Ragged.from_matrix(np.array(rows, np.float32))


def check_answers(replica: SimulatedReplica) -> None:
    """Every text was answered once: the good ones are encoded, and each bad one harmed itself alone."""
    for ticket in replica.tickets:
        assert ticket.done.is_set()
        texts = [
            (int(ticket.texts.ids(place)[0]), int(ticket.texts.lengths[place]))
            for place in ticket.positions.tolist()
        ]
        if ticket.error is not None:
            assert may_end(replica, ticket, texts), ticket.error
            continue
        assert ticket.num_waiting == 0
        bad = {place: uid for place, (uid, length) in enumerate(texts) if replica.is_bad(uid, length)}
        assert ticket.failures.keys() >= bad.keys()
        for place, (uid, length) in enumerate(texts):
            if place in ticket.failures:
                is_refused = place not in bad or replica.kinds[uid] != GOOD
                may_be_refused = replica.ledger.num_limits > 1 and length > replica.nature.memory_tokens // 2
                assert place in bad or may_be_refused, (
                    "a limit falls to half of what fits, and not by one failure"
                )
                is_long = length > replica.nature.memory_tokens or (may_be_refused and is_refused)
                codes = {OUT_OF_MEMORY} if is_long else {ENCODING_FAILED}
                assert ticket.failures[place].code in codes | (
                    {ENCODING_FAILED} if place in bad and is_refused else set()
                )
            else:
                assert ticket.join().matrix[place].tolist() == [uid, length, 0, 1]


def may_end(replica: SimulatedReplica, ticket: Ticket, texts: list[tuple[int, int]]) -> bool:
    """Return True if all texts of this request may be refused together, to be tried again in smaller chunks."""
    if isinstance(ticket.error, EngineStopped):
        return replica.is_dead
    assert isinstance(ticket.error, RunnerDied)
    nature = replica.nature
    has_sickened = nature.falls_sick and not nature.is_group
    is_too_long = any(length > nature.memory_tokens for _, length in texts)
    is_company = KILLS in replica.kinds.values() or replica.ledger.has_been_disturbed
    return is_company or (has_sickened and is_too_long)


KINDS = st.sampled_from([GOOD] * 6 + [RAISES, KILLS])
TEXTS = st.lists(st.tuples(st.integers(1, 40), KINDS), min_size=1, max_size=12)
NATURES = st.builds(
    Nature, st.booleans(), st.booleans(), st.integers(8, 64), st.booleans(), st.booleans()
).map(lambda nature: replace(nature, falls_sick=nature.falls_sick and not nature.is_group))


class ReplicaMachine(RuleBasedStateMachine):
    replica: SimulatedReplica

    @initialize(nature=NATURES)
    def begin(self, nature: Nature) -> None:
        self.replica = SimulatedReplica(nature)

    @rule(texts=TEXTS, is_interactive=st.booleans())
    def ask(self, texts: list[tuple[int, str]], is_interactive: bool) -> None:
        self.replica.ask(texts, is_interactive=is_interactive)

    @rule(seconds=st.sampled_from([1.0, 400.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        self.replica.now += seconds
        self.replica.ledger.num_occasions += 1

    @rule(num_batches=st.integers(1, 8))
    def run(self, num_batches: int) -> None:
        for _ in range(num_batches):
            self.replica.run()

    @precondition(lambda self: not self.replica.is_dead)
    @rule()
    def somebody_kills_a_rank(self) -> None:
        self.replica.disturb(RunnerLost("a rank was killed by SIGKILL", is_foreign=True))

    @precondition(lambda self: not self.replica.is_dead and self.replica.in_flight.started)
    @rule()
    def a_pass_takes_too_long(self) -> None:
        self.replica.in_flight.suspect_overdue(0.0)
        self.replica.disturb(RunnerLost("a forward pass took more than 600 s"))

    @invariant()
    def every_lost_runner_counts_until_a_text_is_answered(self) -> None:
        assert self.replica.in_flight.num_lost_in_row == self.replica.ledger.num_in_row
        assert self.replica.is_dead == (self.replica.ledger.num_in_row > MAX_RESTARTS)

    @invariant()
    def nothing_is_loaded_again_without_a_cause_of_its_own(self) -> None:
        assert self.replica.ledger.num_reloads <= self.replica.ledger.num_allowed

    @invariant()
    def a_limit_is_learned_once_for_all_texts_that_wait(self) -> None:
        assert self.replica.ledger.num_limits <= 2 * self.replica.ledger.num_occasions

    def teardown(self) -> None:
        if hasattr(self, "replica"):
            self.replica.drain()
            self.a_limit_is_learned_once_for_all_texts_that_wait()
            self.every_lost_runner_counts_until_a_text_is_answered()
            self.nothing_is_loaded_again_without_a_cause_of_its_own()
            check_answers(self.replica)


TestReplicas = ReplicaMachine.TestCase
TestReplicas.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
@pytest.mark.parametrize("num_requests", [1, 10])
@pytest.mark.parametrize("num_good", [0, 100])
@pytest.mark.parametrize("memory_tokens", [20, START_TOKENS])
def test_any_number_of_texts_that_exhaust_a_group_take_a_few_loads(
    order: str, num_requests: int, num_good: int, memory_tokens: int
) -> None:
    """A batch fails, and then its shortest text that is too long: again if a younger request has a shorter one."""
    replica = SimulatedReplica(Nature(memory_tokens=memory_tokens))
    lengths = [memory_tokens + 1 + number for number in range(100)]
    lengths += [1 + number % memory_tokens for number in range(num_good)]
    lengths.sort(reverse=order == "falling")
    if order == "mixed":
        random.Random(3).shuffle(lengths)
    for number in range(num_requests):
        replica.ask([(length, GOOD) for length in lengths[number::num_requests]])
    replica.drain()
    check_answers(replica)
    assert not replica.is_dead
    most_lessons = int(np.log2(START_TOKENS / memory_tokens)) + 1  # for batches that are too large
    assert replica.ledger.num_reloads <= 4 + 2 * (num_requests > 1) + most_lessons
    num_limits, num_loads = replica.ledger.num_limits, replica.ledger.num_reloads
    replica.ask([(length, GOOD) for length in lengths])
    replica.drain()
    check_answers(replica)
    assert replica.ledger.num_limits == num_limits
    assert replica.ledger.num_reloads <= num_loads + most_lessons - 1


@settings(max_examples=60, deadline=None)
@given(
    nature=st.builds(Nature, st.booleans(), st.booleans(), st.integers(8, 64), is_killed=st.booleans()),
    chunks=st.lists(st.lists(st.integers(1, 1000), min_size=1, max_size=12), min_size=1, max_size=60),
    is_falling=st.booleans(),
    num_slots=st.integers(1, 16),
)
def test_texts_that_are_too_long_take_a_few_loads_and_end_no_engine_in_whatever_order_they_come(
    nature: Nature, chunks: list[list[int]], is_falling: bool, num_slots: int
) -> None:
    """A limit is halved by each failure while it holds; every failure takes the loads of a batch and its parts."""
    replica = SimulatedReplica(nature)
    if is_falling:
        lengths = sorted((length for chunk in chunks for length in chunk), reverse=True)
        chunks = [lengths[start : start + 4] for start in range(0, len(lengths), 4)]
    for chunk in chunks:
        replica.ask([(length, GOOD) for length in chunk])
        while sum(not ticket.done.is_set() for ticket in replica.tickets) >= num_slots and replica.run():
            pass
    replica.drain()
    check_answers(replica)
    assert not replica.is_dead
    assert not any(ticket.error for ticket in replica.tickets)
    ends = nature.is_group or nature.is_killed
    most_limits = 2 + math.log2(1000 / nature.memory_tokens) if ends else 0
    assert replica.ledger.num_limits <= most_limits
    of_batches = 8 if ends else 0  # a class of lengths learns how large a batch may be
    assert replica.ledger.num_reloads <= of_batches + (2 + nature.is_queued) * most_limits


def test_no_text_waits_until_a_limit_has_ended() -> None:
    replica = SimulatedReplica(Nature(memory_tokens=20))
    replica.ask([(30, GOOD)])
    replica.drain()
    replica.ask([(15, GOOD)])
    ticket, num_batches = replica.tickets[-1], 0
    while not ticket.done.is_set():
        replica.ask([(2, GOOD)] * 64)
        replica.run()
        num_batches += 1
    assert num_batches <= 5


def test_longer_texts_are_tried_again_after_a_while_and_at_last_only_once_in_an_hour() -> None:
    nature = Nature(memory_tokens=20)
    replica = SimulatedReplica(nature)
    tries: list[float] = []
    for _ in range(600):
        replica.now += 60.0
        num_loads = replica.ledger.num_reloads
        replica.ask([(30, GOOD), (4, GOOD)])
        replica.drain()
        tries += [replica.now] * (replica.ledger.num_reloads > num_loads)
    assert np.diff(tries).round(-2).tolist()[:4] == [300, 600, 1200, 2400]
    assert set(np.diff(tries)[4:].tolist()) == {3600.0}
    check_answers(replica)
    replica.nature = replace(nature, memory_tokens=40)
    replica.now += 3600.0
    replica.ask([(30, GOOD)])
    replica.drain()
    assert not replica.tickets[-1].failures
    replica.nature = nature
    replica.ask([(30, GOOD)])
    replica.drain()
    replica.now += 300.0
    replica.nature = replace(nature, memory_tokens=40)
    replica.ask([(30, GOOD)])
    replica.drain()
    assert not replica.tickets[-1].failures, "what was encoded in between has made the limit short again"


@pytest.mark.parametrize(("num_bad", "num_good"), [(1, 0), (1, 15), (3, 12), (8, 8), (8, 0)])
def test_bad_texts_of_a_batch_take_one_load_each_and_one_for_the_batch(num_bad: int, num_good: int) -> None:
    replica = SimulatedReplica(Nature(memory_tokens=START_TOKENS))
    replica.ask([(3, RAISES)] * num_bad + [(4, GOOD)] * num_good)
    replica.drain()
    check_answers(replica)
    assert not replica.is_dead
    assert replica.ledger.num_reloads <= num_bad + 1


def test_batches_that_are_too_large_teach_the_budget_once_for_each_load() -> None:
    replica = SimulatedReplica(Nature(memory_tokens=20))
    replica.ask([(4, GOOD)] * 160)
    replica.drain()
    check_answers(replica)
    assert replica.ledger.num_reloads == replica.ledger.num_exhausted == 2, "from 64 tokens to 32 and to 16"


def test_parts_that_are_still_too_large_teach_the_budget_and_are_built_anew() -> None:
    replica = SimulatedReplica(Nature(memory_tokens=18, start_tokens=4096))
    replica.ask([(4, GOOD)] * 300)
    replica.drain()
    check_answers(replica)
    assert replica.ledger.num_reloads == replica.ledger.num_exhausted == 2, "the batch, and one of its parts"
