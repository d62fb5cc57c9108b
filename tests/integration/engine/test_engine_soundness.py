"""No text is blamed by a sick process: what the engine does when its framework fails and no text is to blame."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.faulty_engine import HANG_WHILE_FILE_EXISTS, MakeEngine, encode, runner_pids
from tests.sick_encoders import NUM_SICK
from tests.waiting import wait_for
from vectormill.domain.errors import ModelError
from vectormill.jobs.item import ENCODING_FAILED
from worker.batching.cost import LengthBuckets
from worker.engine.engine import Engine
from worker.engine.request import EngineStopped, RunnerDied

TEXTS = [f"text number {i} " + "and more " * (i % 7) for i in range(60)]
FACTORIES = "tests.sick_encoders:"


def make_sick(
    make_engine: MakeEngine, directory: Path, function: str, num_sick: int, **settings: int
) -> Engine:
    (directory / NUM_SICK).write_text(str(num_sick))
    engine = make_engine(FACTORIES + function, **settings)
    engine.start()
    return engine


@pytest.mark.parametrize(
    "function",
    [
        "load_soon_ill",  # everything fails in it
        "load_soon_exhausted",  # everything fails, in words that else mean too little memory
        "load_soon_wrong",  # one batch fails, and all others are answered with nonsense
        "load_soon_ill_on_two_streams",
    ],
)
def test_a_process_that_fails_with_everything_is_replaced_and_blames_no_text(
    make_engine: MakeEngine, tmp_path: Path, function: str
) -> None:
    engine = make_sick(make_engine, tmp_path, function, num_sick=2)
    result = encode(engine, TEXTS)
    assert not result.failures
    assert engine.report()["num_restarts"] == 2
    assert engine.is_healthy()
    sound = make_engine()
    sound.start()
    assert np.array_equal(result.vectors, encode(sound, TEXTS).vectors)


def test_an_error_that_does_not_stay_fails_no_text(make_engine: MakeEngine) -> None:
    engine = make_engine(FACTORIES + "MoodyEncoder")
    engine.start()
    assert not encode(engine, TEXTS).failures


def test_a_bad_text_still_fails_alone_where_processes_fall_ill(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_sick(make_engine, tmp_path, "load_soon_ill", num_sick=1)
    texts = [*TEXTS[:20], "an error here", *TEXTS[20:]]
    result = encode(engine, texts)
    assert {index: failure.code for index, failure in result.failures.items()} == {20: ENCODING_FAILED}
    assert "a sequence the model cannot take" in result.failures[20].detail


def test_a_machine_on_which_every_process_falls_ill_ends_the_engine_which_says_so_and_blames_nobody(
    make_engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_sick(
        make_engine, tmp_path, "load_ill_after_known_texts", num_sick=1000, max_runner_restarts=2
    )
    with pytest.raises(EngineStopped, match=r"lost 3 times in a row.*cannot encode a known text"):
        encode(engine, TEXTS)
    assert not engine.is_healthy()
    assert "could not execute a primitive" in caplog.text


def test_a_process_that_is_ill_as_soon_as_it_is_loaded_is_an_error_of_start(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="cannot encode a known text"):
        make_sick(make_engine, tmp_path, "load_ill_behind_its_first_word", num_sick=1)


def test_a_text_that_makes_every_process_ill_is_suspect_as_one_that_ends_it(make_engine: MakeEngine) -> None:
    engine = make_engine(FACTORIES + "PoisonedEncoder")
    engine.start()
    with pytest.raises(RunnerDied, match="known text") as caught:
        encode(engine, ["fine", "crash of the model", "also fine"])
    assert caught.value.is_suspect
    assert not encode(engine, ["fine", "also fine"]).failures
    assert engine.is_healthy()


def test_a_process_that_is_started_again_as_another_encoder_gets_batches_that_are_made_for_it(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(FACTORIES + "ChangedEncoder")
    engine.start()
    assert engine._queue._pool.cost.pads is False
    assert engine.report()["changes_at_restart"] == ()
    (tmp_path / HANG_WHILE_FILE_EXISTS).touch()
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(encode, engine, TEXTS)
        wait_for(lambda: engine._executor._in_flight.started)
        os.kill(runner_pids()[0], signal.SIGKILL)
        wait_for(lambda: engine.report()["num_restarts"] == 1)
        (tmp_path / HANG_WHILE_FILE_EXISTS).unlink()
        assert not future.result().failures
    adopted = engine._queue._pool.cost
    assert (adopted.pads, adopted.buckets) == (True, LengthBuckets(64))
    assert engine._queue._pool.num_started == 2
    changes = engine.report()["changes_at_restart"]
    assert "attention changed from packed (varlen) to padded (sdpa)" in changes
    assert "num_streams changed from 1 to 2" in changes
