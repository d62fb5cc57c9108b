"""A text that was encoded for one chunk is not encoded for the next, and no chunk gets the vector of another text.

Real model processes with the faulty encoder.
"""

import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.faulty_engine import CARD, HANG_WHILE_FILE_EXISTS, SPEC, encode, request, runner_pids
from tests.waiting import wait_for
from vectormill.jobs.item import ENCODING_FAILED, NON_FINITE_VECTOR, ZERO_VECTOR
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor
from worker.engine.engine import Engine
from worker.engine.request import EncodingCancelled, RunnerDied
from worker.engine.reuse import VectorReuse
from worker.settings import WorkerSettings

SHARED = "a text that many documents begin with"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    device = split_processor(detect_inventory(), 1)[0]
    factory = "tests.faulty_engine:FaultyEncoder"
    engine = Engine(CARD, device, WorkerSettings(max_batch_tokens=64), tmp_path, factory=factory)
    engine.start()
    yield engine
    engine.stop()
    assert runner_pids() == []


def test_a_text_that_was_encoded_for_one_chunk_is_not_encoded_for_the_next(engine: Engine) -> None:
    first = encode(engine, [SHARED, "one"])
    second = encode(engine, ["two", SHARED, "two"])
    np.testing.assert_array_equal(first.vectors[0], second.vectors[1])
    assert (first.num_reused, second.num_reused) == (0, 2)
    report = engine.report()
    assert (report["num_sequences"], report["num_reused"]) == (3, 2)
    assert second.num_tokens[1] == first.num_tokens[0]  # a text counts, whoever computed it


def test_nothing_is_reused_of_a_process_that_has_died(engine: Engine) -> None:
    """It may have been faulty, and no proof of its successor vouches for it."""
    encode(engine, [SHARED])
    pid = engine.find_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: engine.report()["num_restarts"] == 1 and engine.report()["state"] == "running")
    assert encode(engine, [SHARED]).num_reused == 0
    assert encode(engine, [SHARED]).num_reused == 1


def test_a_text_that_is_being_encoded_for_another_chunk_is_encoded_for_both(
    engine: Engine, tmp_path: Path
) -> None:
    """Neither waits for the other, so that neither fails with it."""
    held = tmp_path / HANG_WHILE_FILE_EXISTS
    held.touch()
    with ThreadPoolExecutor(2) as threads:
        cancelled = threading.Event()
        first = threads.submit(engine.encode, request([SHARED, "its own text"]), cancelled)
        wait_for(lambda: engine._executor._in_flight.started)
        second = threads.submit(encode, engine, [SHARED])
        wait_for(lambda: len(engine._queue._tickets) == 2)
        cancelled.set()
        assert isinstance(first.exception(), EncodingCancelled)
        held.unlink()
    assert not second.result().failures
    assert second.result().num_reused == 0
    again = encode(engine, [SHARED + " "])  # another spelling with the same ids
    assert again.num_reused == 1
    np.testing.assert_array_equal(again.vectors, second.result().vectors)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("an error here", ENCODING_FAILED),
        ("nan here", NON_FINITE_VECTOR),
        ("zero here", ZERO_VECTOR),
    ],  # as test_engine_faults has them
)
def test_a_text_without_a_vector_fails_in_every_chunk_for_its_own_reason(
    engine: Engine, text: str, code: str
) -> None:
    for _ in range(2):
        result = encode(engine, ["fine", text, text + " "])
        assert {index: failure.code for index, failure in result.failures.items()} == {1: code, 2: code}
        assert result.vectors[0].any()
    assert engine.report()["num_sequences"] <= 2 * 3


def test_a_prompt_is_part_of_what_must_be_equal(engine: Engine) -> None:
    plain = encode(engine, ["query: cats"])
    prompted = encode(engine, ["cats"], spec=replace(SPEC, prompt="query: "))
    np.testing.assert_array_equal(plain.vectors, prompted.vectors)
    assert prompted.num_reused == 1  # the same ids, and this model pools over its prompts


def test_many_chunks_with_the_same_texts_all_end_and_each_text_has_its_own_vector(engine: Engine) -> None:
    """Chunks that share texts, some cancelled and one that kills the model: none hangs, none gets another's vector."""
    dice = random.Random(7)
    texts = [f"text {i} of " + "many " * (i % 5) for i in range(40)]
    expected = dict(zip(texts, encode(engine, texts).vectors, strict=True))
    engine._reuse = VectorReuse(20 * 2000)  # room for about half of them
    chunks = [dice.choices(texts, k=dice.randint(1, 30)) for _ in range(60)]
    chunks[20] = [*chunks[20], "crash"]

    def run(number: int) -> bool:
        cancelled = threading.Event()
        if number % 10 == 3:
            cancelled.set()  # seen at the first wait that is not over at once
        try:
            result = engine.encode(request(chunks[number], interactive=number % 7 == 0), cancelled)
        except (EncodingCancelled, RunnerDied):
            return False
        assert not result.failures
        for text, vector in zip(chunks[number], result.vectors, strict=True):
            np.testing.assert_array_equal(vector, expected[text])
        return True

    with ThreadPoolExecutor(8) as threads:
        outcomes = list(threads.map(run, range(len(chunks)), timeout=100))
    assert not outcomes[20]
    assert sum(outcomes) >= len(chunks) - 15
    assert engine.report()["num_reused"] > 100
