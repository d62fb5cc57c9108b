"""How a worker that should be started afresh is ended."""

import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from worker import watchdog
from worker.watchdog import Watchdog


def make_watchdog() -> Watchdog:
    """Of a worker whose engine has died."""
    engine, keeper = SimpleNamespace(is_healthy=lambda: False), SimpleNamespace(num_held=0)
    return Watchdog(cast(Any, None), "model", cast(Any, keeper), cast(Any, engine))


@pytest.mark.parametrize(
    ("ends_when_told", "expected"),
    [(True, [("kill", signal.SIGTERM)]), (False, [("kill", signal.SIGTERM), ("_exit", 1)])],
)
def test_a_worker_that_does_not_end_when_it_is_told_is_ended_hard(
    ends_when_told: bool, expected: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    watching, done = make_watchdog(), []

    def kill(pid: int, number: int) -> None:
        done.append(("kill", number))
        if ends_when_told:
            watching.stop()

    fake = SimpleNamespace(kill=kill, getpid=lambda: 1, _exit=lambda status: done.append(("_exit", status)))
    monkeypatch.setattr(watchdog, "os", fake)
    monkeypatch.setattr(watchdog, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "_ENDING_SECONDS", 0.01)
    watching._run()
    assert done == expected
