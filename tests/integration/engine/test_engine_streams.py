"""Batches that are encoded side by side: what one of them does to the process costs the others nothing."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tests.faulty_engine import HANG_WHILE_FILE_EXISTS, MakeEngine, encode
from tests.waiting import wait_for
from worker.engine.engine import Engine
from worker.engine.request import RunnerDied


def start_two_streams(make_engine: MakeEngine, **settings: float) -> Engine:
    # A batch holds one text of these tests.
    engine = make_engine("load_two_streams", max_batch_tokens=16, **settings)
    engine.start()
    return engine


def test_two_batches_are_encoded_side_by_side_and_each_text_gets_its_own_vector(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = start_two_streams(make_engine)
    assert engine._queue._pool.num_streams == 2, "the last batches of a job are cut for as many"
    hold = tmp_path / HANG_WHILE_FILE_EXISTS
    hold.touch()
    with ThreadPoolExecutor(3) as threads:
        texts = ["one and two and three and four and five", "six and seven and eight and nine", "ten " * 12]
        futures = [threads.submit(encode, engine, [text]) for text in texts]
        wait_for(lambda: len(engine._executor._in_flight.outstanding) == 3)
        wait_for(lambda: len(engine._executor._in_flight.started) == 2)
        hold.unlink()
        together = [future.result().vectors[0] for future in futures]
    for text, vector in zip(texts, together, strict=True):
        assert np.array_equal(encode(engine, [text]).vectors[0], vector)


def test_of_batches_that_ran_when_the_process_died_only_the_one_that_ends_it_alone_is_blamed(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = start_two_streams(make_engine)
    hold = tmp_path / HANG_WHILE_FILE_EXISTS
    hold.touch()
    with ThreadPoolExecutor(2) as threads:
        innocent = threads.submit(encode, engine, ["an innocent text beside it"])
        wait_for(lambda: len(engine._executor._in_flight.started) == 1)
        bad = threads.submit(encode, engine, ["crash of the model"])
        wait_for(lambda: engine.report()["num_restarts"] == 1)
        hold.unlink()
        assert isinstance(bad.exception(), RunnerDied)
        assert not innocent.result().failures
    wait_for(lambda: engine.report()["num_restarts"] == 2)
    assert not encode(engine, ["fine"]).failures


def test_a_batch_that_hangs_is_blamed_alone_and_others_pass_it_by(make_engine: MakeEngine) -> None:
    engine = start_two_streams(make_engine, forward_timeout_seconds=200)
    started = engine._executor._in_flight.started
    with ThreadPoolExecutor(2) as threads:
        hanging = threads.submit(encode, engine, ["hang please"])
        wait_for(lambda: len(started) == 1)
        (number,) = started
        assert not encode(engine, ["fine"]).failures
        assert not hanging.done()
        started[number] -= 200  # its time is over, and that of what begins now is not
        # What the other stream says all the time must not put the end off.
        while not hanging.done():
            assert not encode(engine, ["fine and well"]).failures
        assert "took more than 200 s" in str(hanging.exception())
    wait_for(lambda: engine.report()["num_restarts"] == 1)
