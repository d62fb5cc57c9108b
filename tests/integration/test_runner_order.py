"""In which order a runner prepares, starts and answers, seen through its pipe: a real process, a fake device."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.waiting import wait_for
from vectormill.registry import DEFAULT_MODEL, Registry
from worker.batching.token_batch import TokenBatch
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor
from worker.model.encoder import Choice, Encoder, EncoderOrder, EncoderReport
from worker.parallel.messages import Encode, Encoded, EncodeFailed, Load, Loaded, Started
from worker.parallel.runner import Runner

# What the first token of a batch has its forward pass do.
PLAIN, FAILS_TO_PREPARE, FAILS_TO_START, FAILS = 1, 2, 3, 4


class FakeDevice:
    """A pass of it ends when the test says so, as one of a device that is busy would."""

    def __init__(self, batch: TokenBatch, directory: Path) -> None:
        self.batch, self.directory = batch, directory
        (directory / f"prepared {batch.input_ids[-1]}").touch()
        self.fails(FAILS_TO_PREPARE)

    def fails(self, step: int) -> None:
        if self.batch.input_ids[0] == step:
            raise ValueError(f"step {step} failed")

    def start(self) -> None:
        self.fails(FAILS_TO_START)

    def vectors(self) -> NDArray[np.float32]:
        wait_for((self.directory / f"computed {self.batch.input_ids[-1]}").exists)
        self.fails(FAILS)
        return np.full((len(self.batch), 1), self.batch.input_ids[-1], np.float32)


class FakeEncoder(Encoder):
    def __init__(self, order: EncoderOrder) -> None:
        self.directory = order.cache_dir

    def prepare(self, batch: TokenBatch) -> FakeDevice:
        return FakeDevice(batch, self.directory)

    def describe(self) -> EncoderReport:
        choice = Choice("fake", "for tests")
        return EncoderReport(choice, choice, choice, "none", 1, 0.0)


def load_fake_encoder(order: EncoderOrder) -> FakeEncoder:
    return FakeEncoder(order)


class Conversation:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        device = split_processor(detect_inventory(), 1)[0]
        order = EncoderOrder(Registry({}).card(DEFAULT_MODEL), device, "auto", "auto", 1, directory)
        load = Load("tests.integration.test_runner_order:load_fake_encoder", order)
        self.runner = Runner(load, os.environ)
        assert isinstance(self.runner.receive()[0], Loaded)

    def send(self, number: int, first_token: int = PLAIN, *, is_urgent: bool = False) -> None:
        batch = TokenBatch.from_ids([np.array([first_token, number], np.int32)])
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
            assert message.vectors.tolist() == [[message.number]]
            assert message.seconds > 0
        return type(message), message.number


@pytest.fixture
def conversation(tmp_path: Path) -> Iterator[Conversation]:
    started = Conversation(tmp_path)
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


@pytest.mark.parametrize("fault", [FAILS_TO_PREPARE, FAILS_TO_START, FAILS])
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
