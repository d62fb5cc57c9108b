"""In which order a runner prepares, starts and answers, seen through its pipe: a real process, a fake device."""

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.waiting import wait_for
from vectormill.models.registry import DEFAULT_MODEL, Registry
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor
from worker.encoder.encoder import Choice, Encoder, EncoderOrder, EncoderReport
from worker.runner import runner_process
from worker.runner.messages import (
    LONGEST_QUEUED_SECONDS,
    Encode,
    Encoded,
    EncodeFailed,
    Load,
    Loaded,
    Started,
)
from worker.runner.runner import Runner

# What the first token of a batch has its forward pass do.
PLAIN, FAILS_TO_PREPARE, FAILS_TO_START, FAILS = 1, 2, 3, 4


class FakeDevice:
    """A pass of it ends when the test says so, as one of a device that is busy would."""

    def __init__(self, batch: Batch, directory: Path) -> None:
        self.batch, self.directory = batch, directory
        (directory / f"prepared {batch.input_ids[-1]}").touch()
        self.fails(FAILS_TO_PREPARE)

    def fails(self, step: int) -> None:
        if self.batch.input_ids[0] == step:
            raise ValueError(f"step {step} failed")

    def start(self) -> None:
        self.fails(FAILS_TO_START)

    def results(self) -> Ragged:
        wait_for((self.directory / f"computed {self.batch.input_ids[-1]}").exists)
        self.fails(FAILS)
        return Ragged.from_scalars(np.full(len(self.batch), self.batch.input_ids[-1], np.float32))


class FakeEncoder(Encoder):
    def __init__(self, order: EncoderOrder, *, is_queued: bool = False) -> None:
        self.directory = order.cache_dir
        self.is_queued = is_queued

    def prepare(self, batch: Batch) -> FakeDevice:
        return FakeDevice(batch, self.directory)

    def describe(self) -> EncoderReport:
        choice = Choice("fake", "for tests")
        return EncoderReport(choice, choice, choice, "none", 1, 0.0, is_queued=self.is_queued)


load_queued_encoder = partial(FakeEncoder, is_queued=True)


def load_patient_encoder(order: EncoderOrder) -> FakeEncoder:
    """A batch is queued behind another however long that one takes: on a slow machine each is a long one."""
    runner_process.LONGEST_QUEUED_SECONDS = float("inf")  # type: ignore[attr-defined]
    return FakeEncoder(order, is_queued=True)


class Conversation:
    def __init__(self, directory: Path, factory: str = "FakeEncoder") -> None:
        self.directory = directory
        device = split_processor(detect_inventory(), 1)[0]
        order = EncoderOrder(Registry({}).card(DEFAULT_MODEL), device, "auto", "auto", 1, directory)
        load = Load(f"tests.integration.placement.test_runner_order:{factory}", order)
        self.runner = Runner(load, os.environ)
        assert isinstance(self.runner.receive()[0], Loaded)

    def send(self, number: int, first_token: int = PLAIN, *, is_urgent: bool = False) -> None:
        batch = Batch.from_ids([np.array([first_token, number], np.int32)])
        self.runner.send(Encode(number, batch, is_urgent))

    def wait_until_queued(self) -> None:
        """The reader prepares one after another: when it comes to a batch, those before it are in the queue."""
        self.send(99)
        wait_for((self.directory / "prepared 99").exists)

    def compute(self, number: int) -> None:
        (self.directory / f"computed {number}").touch()

    def hear(self) -> Any:
        (message,) = self.runner.receive()
        if isinstance(message, Encoded):
            assert message.results.matrix.tolist() == [[message.number]]
            assert message.seconds > 0
        return type(message), message.number

    def encode_quickly(self, number: int) -> None:
        """One batch of which the device is done at once."""
        self.compute(number)
        self.send(number)
        assert [self.hear(), self.hear()] == [(Started, number), (Encoded, number)]

    def fill_queue(self, first_token: int = PLAIN) -> float:
        """Has batch 3 computed, batch 4, which begins with the token, queued behind it, and 99 behind both. A moment
        before the device was free for batch 3.
        """
        self.encode_quickly(1)
        self.send(2)
        assert self.hear() == (Started, 2)
        self.send(3)
        self.send(4, first_token)
        self.wait_until_queued()
        before = time.perf_counter()
        self.compute(2)
        assert [self.hear() for _ in range(3)] == [(Started, 3), (Started, 4), (Encoded, 2)]
        return before

    def receive(self, count: int) -> list[Any]:
        return [self.runner.receive()[0] for _ in range(count)]

    def has_said(self) -> bool:
        return self.runner.connection.poll()


@pytest.fixture
def conversation(tmp_path: Path) -> Iterator[Conversation]:
    started = Conversation(tmp_path)
    yield started
    started.runner.kill()


@pytest.fixture
def queued(tmp_path: Path) -> Iterator[Conversation]:
    """With a device that computes what was started, one batch after another."""
    started = Conversation(tmp_path, "load_patient_encoder")
    yield started
    started.runner.kill()


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Conversation]:
    """As it is in production, where nothing is queued behind a batch that takes long."""
    started = Conversation(tmp_path, "load_queued_encoder")
    yield started
    started.runner.kill()


def test_the_next_batch_is_started_before_the_last_outcome_is_sent(conversation: Conversation) -> None:
    conversation.send(1)
    assert conversation.hear() == (Started, 1)
    conversation.send(2)
    conversation.wait_until_queued()
    conversation.compute(1)
    # A device of its own computes the second while the vectors of the first go through the pipe.
    assert conversation.hear() == (Started, 2)
    assert conversation.hear() == (Encoded, 1)
    conversation.compute(2)
    assert conversation.hear() == (Started, 99)
    assert conversation.hear() == (Encoded, 2)


def test_batches_that_are_equally_urgent_are_encoded_as_they_come_and_not_by_number(
    conversation: Conversation,
) -> None:
    """Of ranks that share a model some had started 5 before 4 came, where an urgent batch has overtaken."""
    conversation.send(1)
    assert conversation.hear() == (Started, 1)
    conversation.send(5)
    conversation.send(4)
    conversation.wait_until_queued()
    for number in (1, 5):
        conversation.compute(number)
    started = [number for kind, number in (conversation.hear() for _ in range(4)) if kind is Started]
    assert started == [5, 4]


def test_an_outcome_waits_for_no_batch_that_is_not_there(conversation: Conversation) -> None:
    conversation.send(1)
    conversation.compute(1)
    assert [conversation.hear(), conversation.hear()] == [(Started, 1), (Encoded, 1)]


def test_an_urgent_outcome_is_sent_before_anything_else(conversation: Conversation) -> None:
    conversation.send(1, is_urgent=True)
    assert conversation.hear() == (Started, 1)
    conversation.send(2)
    conversation.wait_until_queued()
    conversation.compute(1)
    assert [conversation.hear(), conversation.hear()] == [(Encoded, 1), (Started, 2)]


def test_an_urgent_batch_overtakes_one_that_is_prepared(conversation: Conversation) -> None:
    conversation.send(1)
    assert conversation.hear() == (Started, 1)
    conversation.send(2)
    conversation.send(3, is_urgent=True)
    conversation.wait_until_queued()
    conversation.compute(1)
    assert conversation.hear() == (Started, 3)
    assert conversation.hear() == (Encoded, 1)


@pytest.mark.parametrize(
    "fault",
    [FAILS, FAILS_TO_PREPARE, FAILS_TO_START],
)
def test_a_batch_that_fails_at_any_step_fails_alone(conversation: Conversation, fault: int) -> None:
    conversation.send(1, fault)
    assert conversation.hear() == (Started, 1)
    if fault == FAILS:
        conversation.compute(1)
    (message,) = conversation.runner.receive()
    assert isinstance(message, EncodeFailed)
    assert (message.number, message.reason) == (1, f"ValueError: step {fault} failed")
    conversation.send(2)
    assert conversation.hear() == (Started, 2)
    conversation.compute(2)
    assert conversation.hear() == (Encoded, 2)


def test_a_device_that_queues_has_its_next_batch_before_the_current_one_is_done(queued: Conversation) -> None:
    queued.fill_queue()
    assert not queued.has_said(), "a third batch would only keep urgent ones waiting"
    queued.compute(3)
    # The device has another one before anything is sent.
    assert [queued.hear(), queued.hear()] == [(Started, 99), (Encoded, 3)]
    queued.compute(4)
    assert queued.hear() == (Encoded, 4)


def test_nothing_is_queued_behind_batches_that_take_long(impatient: Conversation) -> None:
    """An urgent one would wait for both."""
    impatient.encode_quickly(1)
    impatient.send(2)
    assert impatient.hear() == (Started, 2)
    impatient.send(3)
    impatient.wait_until_queued()
    wait_longer_than_is_queued()
    impatient.compute(2)
    assert [impatient.hear(), impatient.hear()] == [(Started, 3), (Encoded, 2)]
    assert not impatient.has_said()


def test_the_seconds_of_a_queued_batch_begin_when_the_one_before_it_is_done(queued: Conversation) -> None:
    before = queued.fill_queue()
    queued.compute(4)
    wait_longer_than_is_queued()
    queued.compute(3)
    encoded = [message for message in queued.receive(3) if isinstance(message, Encoded)]
    passed = time.perf_counter() - before
    assert [message.number for message in encoded] == [3, 4]
    assert encoded[0].seconds > 2 * LONGEST_QUEUED_SECONDS, "it was started before, and computed after"
    assert sum(message.seconds for message in encoded) <= passed, "no moment counts twice"


@pytest.mark.parametrize("fault", [FAILS, FAILS_TO_START])
def test_a_queued_batch_that_fails_leaves_its_neighbours_alone(queued: Conversation, fault: int) -> None:
    queued.fill_queue(fault)
    for number in (3, 4, 99):
        queued.compute(number)
    said = {message.number: type(message) for message in queued.receive(4)}
    assert said == {3: Encoded, 4: EncodeFailed, 99: Encoded}


def wait_longer_than_is_queued() -> None:
    end = time.monotonic() + 2 * LONGEST_QUEUED_SECONDS
    wait_for(lambda: time.monotonic() > end)
