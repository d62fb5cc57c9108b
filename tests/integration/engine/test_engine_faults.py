"""What the engine does when its encoder raises, dies, hangs or answers nonsense: real processes, a fake encoder."""

import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.faulty_engine import (
    CARD,
    HANG_WHILE_FILE_EXISTS,
    SPEC,
    MakeEngine,
    be_patient,
    encode,
    request,
    runner_pids,
)
from tests.waiting import wait_for
from vectormill.domain.encoding import PASSAGES
from vectormill.domain.errors import ModelError
from vectormill.jobs.item import (
    EMPTY_TEXT,
    ENCODING_FAILED,
    NON_FINITE_VECTOR,
    ZERO_VECTOR,
)
from vectormill.jobs.wait_reasons import ServingWorker
from worker.engine.engine import Engine
from worker.engine.request import EncodingCancelled, EngineStopped, RunnerDied


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    started = make_engine()
    started.start()
    return started


def test_a_text_fails_when_one_of_its_passages_does_and_its_neighbours_do_not(engine: Engine) -> None:
    spec = replace(SPEC, long_texts=PASSAGES, max_tokens=8, passage_overlap=1)
    long = "one two three four five six seven eight "
    texts = ["fine", long + "error " + long, long, " ", long + "nan", "fine", "zero"]
    result = encode(engine, texts, spec=spec)
    assert {index: failure.code for index, failure in result.failures.items()} == {
        1: ENCODING_FAILED,
        3: EMPTY_TEXT,
        4: NON_FINITE_VECTOR,
        6: ZERO_VECTOR,
    }
    assert result.num_tokens.tolist() == [3, 0, 16, 0, 0, 3, 0]
    assert result.num_passages == 2
    assert not result.truncated.any()
    assert np.array_equal(result.vectors[2], encode(engine, [long], spec=spec).vectors[0])
    assert np.array_equal(result.vectors[0], encode(engine, ["fine"]).vectors[0])


@pytest.mark.parametrize(("text", "status"), [("crash now", 7), ("the device is lost", 3)])
def test_the_request_whose_text_ends_the_process_is_told_and_the_engine_goes_on(
    engine: Engine, text: str, status: int
) -> None:
    """Nor does a process whose device is lost fail with every text: it ends."""
    first = runner_pids()
    with pytest.raises(RunnerDied, match=f"status {status}") as caught:
        encode(engine, ["fine", text])
    assert caught.value.is_suspect
    assert not encode(engine, ["fine"]).failures
    assert runner_pids() != first
    assert engine.report()["num_restarts"] == 1
    assert engine.is_healthy()


def test_requests_that_were_not_in_the_fatal_batch_never_notice(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(max_batch_tokens=16)
    engine.start()
    (tmp_path / HANG_WHILE_FILE_EXISTS).touch()
    with ThreadPoolExecutor(3) as threads:
        held = threads.submit(
            encode, engine, ["one two three four five six seven eight nine ten eleven twelve"]
        )
        wait_for(lambda: engine._executor._in_flight.outstanding.__len__() == 1)
        bad = threads.submit(encode, engine, ["crash of the model in a batch that is full of it all"])
        wait_for(lambda: engine._executor._in_flight.outstanding.__len__() == 2)
        good = threads.submit(
            encode, engine, [f"an innocent text with its number {i} and more" for i in range(20)]
        )
        (tmp_path / HANG_WHILE_FILE_EXISTS).unlink()
        assert not held.result().failures
        assert isinstance(bad.exception(), RunnerDied)
        assert not good.result().failures


def test_a_model_process_that_is_killed_from_outside_is_replaced_and_nobody_notices(
    engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / HANG_WHILE_FILE_EXISTS).touch()
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(encode, engine, ["waiting"])
        wait_for(lambda: engine._executor._in_flight.started)
        os.kill(runner_pids()[0], signal.SIGKILL)
        (tmp_path / HANG_WHILE_FILE_EXISTS).unlink()
        assert not future.result().failures
    report = engine.report()
    assert report["num_restarts"] == 1
    ceilings = [budget["ceiling_tokens"] for budget in report["budgets"].values()]
    assert ceilings == [None] * 4, "what was not memory leaves no ceiling"


def test_a_forward_pass_that_hangs_is_ended_and_where_it_hung_is_logged(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(forward_timeout_seconds=0.5)
    engine.start()
    with pytest.raises(RunnerDied, match=r"took more than 0\.5 s"):
        encode(engine, ["hang please"])
    be_patient(engine)
    assert re.search(r"Current thread .*\n  File .*faulty_engine.py\", line \d+ in encode", caplog.text)
    assert not encode(engine, ["fine"]).failures


def test_a_model_process_lost_too_often_stops_the_engine_and_all_who_wait_are_told(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(max_runner_restarts=0)
    engine.start()
    with pytest.raises(RunnerDied):
        encode(engine, ["crash"])
    wait_for(lambda: not engine.is_healthy())
    with pytest.raises(EngineStopped, match="lost 1 times in a row"):
        encode(engine, ["fine"])


def test_a_cancelled_request_returns_at_once_and_leaves_room_for_others(
    engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / HANG_WHILE_FILE_EXISTS).touch()
    cancelled = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(engine.encode, request([f"text {i} of many" for i in range(100)]), cancelled)
        wait_for(lambda: len(engine._executor._in_flight.outstanding) == 2)
        cancelled.set()
        assert isinstance(future.exception(timeout=60), EncodingCancelled)
    (tmp_path / HANG_WHILE_FILE_EXISTS).unlink()
    assert not encode(engine, ["fine"]).failures
    assert engine.report()["num_sequences"] < 60


def test_who_waits_is_told_of_a_stop_before_a_model_process_that_does_not_end_is_waited_for(
    engine: Engine,
) -> None:
    runner = psutil.Process(runner_pids()[0])
    runner.suspend()  # as one that waits inside a driver: it does not hear that its pipe is closed
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(encode, engine, ["text"])
        wait_for(lambda: engine._executor._in_flight.outstanding)
        stopping = threads.submit(engine.stop)
        assert isinstance(waiting.exception(timeout=60), EngineStopped)
        assert runner.is_running(), "its chunk could have been handed back seconds earlier"
        stopping.result(timeout=60)
    assert not runner.is_running()


def test_stopping_tells_all_who_wait_and_leaves_no_process(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / HANG_WHILE_FILE_EXISTS).touch()
    pid = runner_pids()[0]
    with ThreadPoolExecutor(8) as threads:
        # More than there are slots: some wait outside.
        futures = [threads.submit(encode, engine, [f"text {i}"]) for i in range(8)]
        wait_for(lambda: len(engine._executor._in_flight.outstanding) >= 1)
        engine.stop()
        assert all(isinstance(future.exception(timeout=60), EngineStopped) for future in futures)
    assert not psutil.pid_exists(pid)
    assert not engine.is_healthy()
    with pytest.raises(EngineStopped):
        encode(engine, ["late"])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("load_nothing", "There is no such model; make one"),
        ("die_while_loading", "status 3"),
        ("missing", "missing"),
    ],
)
def test_a_model_that_does_not_load_is_an_error_of_start(
    make_engine: MakeEngine, function: str, message: str
) -> None:
    engine = make_engine(function)
    with pytest.raises(ModelError, match=message):
        engine.start()
    assert not engine.is_healthy()


def test_a_spec_of_another_model_or_revision_is_refused_and_the_report_shows_it_beforehand(
    engine: Engine,
) -> None:
    report = engine.report()
    worker = ServingWorker("w", report["model"], 1, report["revision"], report["pooling"], report["state"])
    former_worker, worker = worker, replace(worker, aliases=report["aliases"])
    assert worker.is_ready
    former = replace(SPEC, revision=CARD.aliases[0])
    assert [worker.has_model_of(each) for each in (SPEC, former)] == [True, True]
    assert [former_worker.has_model_of(each) for each in (SPEC, former)] == [True, False]
    now, before = (encode(engine, ["fine"], spec=each) for each in (SPEC, former))
    np.testing.assert_array_equal(now.vectors, before.vectors)
    for other in (
        replace(SPEC, revision="older"),
        replace(SPEC, model="other"),
        replace(SPEC, pooling="cls"),
    ):
        assert worker.model != other.model or not worker.has_model_of(other)
        with pytest.raises(ModelError, match="The job needs the model"):
            encode(engine, ["fine"], spec=other)
    with pytest.raises(ModelError, match=r"task is extract, but .* supports only embed, score"):
        encode(engine, ["fine"], spec=replace(SPEC, task="extract"))
