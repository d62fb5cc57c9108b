"""Interactive requests overtake bulk, wherever it waits; real processes, a fake encoder."""

import fcntl
import os
import signal
import sys
import termios
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faulty_engine import HANG_WHILE_FILE_EXISTS, MakeEngine, encode, runner_pids
from tests.waiting import wait_for
from vectormill.ragged import Ragged
from worker.batching.batch import OwnedBatch
from worker.engine.engine import Engine
from worker.engine.request import RunnerDied
from worker.runner.runner import Runner


def test_an_interactive_request_is_not_kept_waiting_by_bulk_that_fills_all_slots(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(slots=1, max_batch_tokens=16)
    engine.start()
    (tmp_path / HANG_WHILE_FILE_EXISTS).touch()
    outstanding = engine._executor._in_flight.outstanding
    done: list[str] = []

    def run(name: str, texts: list[str], interactive: bool) -> None:
        encode(engine, texts, interactive=interactive)
        done.append(name)

    with ThreadPoolExecutor(3) as threads:
        threads.submit(run, "bulk", [f"bulk text number {i} of the first" for i in range(100)], False)
        threads.submit(run, "more bulk", [f"bulk text number {i} of the second" for i in range(100)], False)
        wait_for(lambda: engine._executor._in_flight.started)
        threads.submit(run, "interactive", ["a question"], True)
        wait_for(lambda: any(work.is_urgent for work in list(outstanding.values())))
        (tmp_path / HANG_WHILE_FILE_EXISTS).unlink()
    assert done[0] == "interactive"


def test_an_interactive_request_overtakes_the_bulk_batches_that_wait_in_the_runner(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(max_batch_tokens=16)
    engine.start()
    (tmp_path / HANG_WHILE_FILE_EXISTS).touch()
    deliver, order = engine._queue.deliver, []

    def record(work: OwnedBatch, results: Ragged, *seconds: float) -> None:
        order.append(names[int(work.sequences.requests[0])])
        deliver(work, results, *seconds)

    engine._queue.deliver = record  # type: ignore[method-assign, assignment]
    names = ["first", "second", "question"]
    with ThreadPoolExecutor(3) as threads:
        for count, name in enumerate(names, start=1):
            text = f"a {name} text that alone fills a batch of the model"
            threads.submit(encode, engine, [text], interactive=name == "question")
            wait_for(lambda count=count: len(engine._executor._in_flight.outstanding) == count)  # type: ignore[misc]
        wait_for(lambda: engine._executor._in_flight.started)
        wait_for(lambda: has_read_all(engine))
        (tmp_path / HANG_WHILE_FILE_EXISTS).unlink()
    assert order == ["first", "question", "second"]


def has_read_all(engine: Engine) -> bool:
    """Return True if the runner has read what it was sent, so that it can choose among all of it."""
    runner = engine._executor._runner
    assert isinstance(runner, Runner)
    return (
        int.from_bytes(fcntl.ioctl(runner.connection.fileno(), termios.TIOCOUTQ, b"\0" * 4), sys.byteorder)
        == 0
    )


@pytest.mark.parametrize(
    ("killed_while", "expected"),
    [
        # The runner hangs in the first batch: it alone is suspect, though the urgent one was to be next.
        ("first", {"first": True, "question": False, "second": False}),
        # It hangs in the urgent one, which was sent last.
        ("question", {"first": False, "question": True, "second": False}),
    ],
)
def test_a_crash_blames_exactly_the_batch_that_was_being_encoded_though_an_urgent_one_overtook(
    make_engine: MakeEngine, tmp_path: Path, killed_while: str, expected: dict[str, bool]
) -> None:
    engine = make_engine(max_batch_tokens=16)
    engine.start()
    (tmp_path / HANG_WHILE_FILE_EXISTS).touch()
    words = {name: f"a {name} text that alone fills a batch of the model" for name in expected}
    words["question"] = words["question"].replace("text", "hang" if killed_while == "question" else "text")
    with ThreadPoolExecutor(3) as threads:
        futures = {}
        for count, name in enumerate(("first", "second", "question"), start=1):
            futures[name] = threads.submit(encode, engine, [words[name]], interactive=name == "question")
            wait_for(lambda count=count: len(engine._executor._in_flight.outstanding) == count)  # type: ignore[misc]
        wait_for(lambda: engine._executor._in_flight.started)
        if killed_while == "question":
            (tmp_path / HANG_WHILE_FILE_EXISTS).unlink()
            futures["first"].result()
            in_flight = engine._executor._in_flight
            wait_for(
                lambda: any(in_flight.outstanding[number].is_urgent for number in list(in_flight.started))
            )
        # Not SIGKILL, which is nobody's fault but the killer's.
        os.kill(runner_pids()[0], signal.SIGSEGV)
        (tmp_path / HANG_WHILE_FILE_EXISTS).unlink(missing_ok=True)
        died = {name: isinstance(future.exception(), RunnerDied) for name, future in futures.items()}
    assert died == expected
