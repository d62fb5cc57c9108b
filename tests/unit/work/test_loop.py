"""The loop of leased work, and what is held in it: no database."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

import psycopg
import pytest

from vectormill.domain.states import States
from vectormill.work.work import Held, Lease, Loop, Stopping, Work, back_off

WORK = Work(table="vectormill.things", row="thing", working=States(("open",)), begins={"new": "open"})
LEASE = Lease(WORK, key=1, state="open", fence=1, attempt=1, seconds=40.0)


class Repeating(Loop):
    """A loop over a function."""

    def __init__(self, step: Callable[[threading.Event], bool], **options: Any) -> None:
        super().__init__("things", **options)
        self._step = step

    def step(self) -> bool:
        return self._step(self.stopping)


OUTAGE = psycopg.OperationalError("the server closed the connection")


@pytest.mark.parametrize(("error", "reason"), [(OUTAGE, "the server closed"), (ValueError("ours"), "ours")])
def test_a_step_that_fails_is_repeated_with_a_reason(
    error: Exception, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes: Iterator[Exception | None] = iter([error, error, None])
    has_recovered = threading.Event()

    def step(stopping: threading.Event) -> bool:
        outcome = next(outcomes, None)
        if outcome is not None:
            raise outcome
        has_recovered.set()
        return False

    with caplog.at_level(logging.WARNING), Repeating(step, pause_seconds=0.001):
        assert has_recovered.wait(20)
    assert caplog.text.count(reason) == 2
    assert "things" in caplog.text


def test_the_end_of_the_block_waits_for_what_is_being_done(caplog: pytest.LogCaptureFixture) -> None:
    started = threading.Barrier(3)
    ended: list[None] = []

    def step(stopping: threading.Event) -> bool:
        started.wait(20)
        assert stopping.wait(20)
        ended.append(None)
        return True

    with Repeating(step, num_threads=2, pause_seconds=60):
        started.wait(20)
    assert len(ended) == 2


def test_a_step_is_done_at_once_while_there_is_more_to_do() -> None:
    num_left, is_done = iter([True, True, False]), threading.Event()

    def step(stopping: threading.Event) -> bool:
        has_more = next(num_left)
        if not has_more:
            is_done.set()
        return has_more

    with Repeating(step, pause_seconds=3600):
        assert is_done.wait(20)


def test_what_is_held_is_renewed_after_a_quarter_of_its_lease_and_not_before() -> None:
    now = 0.0
    renewals: list[float] = []
    engine: Any = MagicMock()

    @contextmanager
    def begin() -> Iterator[Any]:
        renewals.append(now)
        yield engine.connection

    engine.begin = begin
    held = Held(engine=engine, lease=LEASE, is_stopping=lambda: False, clock=lambda: now)
    for now in (1.0, 9.9, 10.0, 19.0, 20.0):  # noqa: B007 - the clock reads it
        held.keep()
    assert renewals == [10.0, 20.0]
    held.is_stopping = lambda: True
    with pytest.raises(Stopping):
        held.keep()


def test_the_back_off_doubles_to_a_minute() -> None:
    assert [back_off(attempt) for attempt in (1, 2, 5, 6, 10_000)] == [2, 4, 32, 60, 60]
