"""A text that several chunks have is encoded once, and a chunk whose computation fails takes no other with it.

Real model processes with the faulty encoder.
"""

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.faulty_engine import CARD, HANG_WHILE_FILE_EXISTS, SPEC, encode, request, runner_pids
from tests.waiting import wait_for
from vectormill.domain.jobs.item import ENCODING_FAILED, NON_FINITE_VECTOR
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor
from worker.engine.engine import EncodeResult, EncodingCancelled, Engine, RunnerDied
from worker.engine.reuse import Division, VectorReuse
from worker.engine.switchboard import Ticket
from worker.settings import WorkerSettings

SHARED = "a text that many documents begin with"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    device = split_processor(detect_inventory(), 1)[0]
    factory = "tests.faulty_engine:load_faulty_encoder"
    engine = Engine(CARD, device, WorkerSettings(max_batch_tokens=64), tmp_path, factory=factory)
    engine.start()
    yield engine
    engine.stop()
    assert runner_pids() == []


@pytest.fixture
def follower_waits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a request has found that another one computes what it needs."""
    waits, divide = threading.Event(), engine._reuse.divide

    def tell(digests: dict[int, bytes], *, may_wait: bool) -> Division:
        division = divide(digests, may_wait=may_wait)
        if any(flight is not division.flight for flight in division.awaited.values()):
            waits.set()
        return division

    monkeypatch.setattr(engine._reuse, "divide", tell)
    return waits


Outcomes = tuple["Future[EncodeResult]", "Future[EncodeResult]"]
Lead = Callable[..., Outcomes]


@pytest.fixture
def lead(engine: Engine, follower_waits: threading.Event, tmp_path: Path) -> Iterator[Lead]:
    """Lets one request compute while the model holds still, and another with the shared text wait for it."""
    held = tmp_path / HANG_WHILE_FILE_EXISTS
    held.touch()
    with ThreadPoolExecutor(2) as threads:

        def start(texts: list[str], meanwhile: Callable[[], object] = lambda: None) -> Outcomes:
            leader = threads.submit(engine.encode, request(texts), cancelled)
            wait_for(lambda: engine._executor._docket.started)
            follower = threads.submit(encode, engine, [SHARED, "its own text"])
            assert follower_waits.wait(10)
            meanwhile()
            held.unlink()
            return leader, follower

        cancelled = start.cancelled = threading.Event()  # type: ignore[attr-defined]
        yield start


def assert_is_whole(engine: Engine, result: EncodeResult) -> None:
    """The vectors are those that the model gives to these texts, seen in a spelling with the same ids."""
    assert not result.failures
    before = engine.report()["num_sequences"]
    again = encode(engine, [SHARED + " ", " its own text"])
    np.testing.assert_array_equal(again.vectors, result.vectors)
    assert result.vectors.any(axis=1).all()
    assert (again.num_reused, engine.report()["num_sequences"]) == (2, before)


def test_a_text_that_was_encoded_for_one_chunk_is_not_encoded_for_the_next(engine: Engine) -> None:
    first = encode(engine, [SHARED, "one"])
    second = encode(engine, ["two", SHARED, "two"])
    np.testing.assert_array_equal(first.vectors[0], second.vectors[1])
    assert (first.num_reused, second.num_reused) == (0, 2)
    report = engine.report()
    assert (report["num_sequences"], report["num_reused"]) == (3, 2)
    assert second.num_tokens[1] == first.num_tokens[0]  # a text counts, whoever computed it


def test_a_text_that_is_being_encoded_for_another_chunk_is_awaited(engine: Engine, lead: Lead) -> None:
    leader, follower = lead([SHARED, "the leader's own"])
    np.testing.assert_array_equal(leader.result().vectors[0], follower.result().vectors[0])
    assert (leader.result().num_reused, follower.result().num_reused) == (0, 1)
    assert engine.report()["num_sequences"] == 3
    assert_is_whole(engine, follower.result())


def test_a_cancelled_chunk_leaves_the_text_to_the_one_that_waits_for_it(engine: Engine, lead: Lead) -> None:
    def cancel() -> None:
        lead.cancelled.set()  # type: ignore[attr-defined]
        wait_for(lambda: engine._slots[False]._value == WorkerSettings().slots - 1)

    leader, follower = lead([SHARED, "the leader's own"], cancel)
    assert isinstance(leader.exception(), EncodingCancelled)
    assert_is_whole(engine, follower.result())


def test_a_model_process_that_dies_with_one_chunk_fails_none_that_waited_for_it(
    engine: Engine, lead: Lead
) -> None:
    leader, follower = lead([SHARED], lambda: os.kill(runner_pids()[0], signal.SIGSEGV))
    assert isinstance(leader.exception(), RunnerDied)
    assert_is_whole(engine, follower.result())


def test_a_request_that_fails_before_it_computes_keeps_nobody_waiting(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its flight was announced by then: whoever has the same text would wait for it for ever."""
    with monkeypatch.context() as patch:
        patch.setattr(Ticket, "take_over", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError):
            encode(engine, [SHARED])
    with ThreadPoolExecutor(1) as threads:
        assert not threads.submit(encode, engine, [SHARED]).result(timeout=20).failures


def test_a_chunk_that_kills_the_model_with_another_text_fails_alone(engine: Engine, lead: Lead) -> None:
    leader, follower = lead([SHARED, "a later crash"])
    assert isinstance(leader.exception(), RunnerDied)
    assert_is_whole(engine, follower.result())


@pytest.mark.parametrize(
    ("text", "code"),
    [("an error here", ENCODING_FAILED), ("nan here", NON_FINITE_VECTOR)],  # as test_engine_faults has them
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
    assert not engine._reuse._flights
