"""When a worker should be started afresh, and how it is ended."""

import signal
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis.exceptions import ConnectionError as RedisGone

from worker.chunk import watchdog
from worker.chunk.watchdog import Watchdog


@dataclass
class ClusterState:
    """What a worker's watchdog sees of engine, leases, Celery and Redis."""

    is_healthy: bool = True
    num_held: int = 0
    num_taken: int = 0
    num_waiting: int | None = 0  # None while Redis is away

    def make_watchdog(self) -> Watchdog:
        def count_messages(lists: list[str]) -> int:
            assert lists == ["encode.model", "encode.model\x06\x169"]
            if self.num_waiting is None:
                raise RedisGone("away")
            return self.num_waiting

        return Watchdog(
            cast(Any, SimpleNamespace(count_messages=count_messages)),
            "model",
            cast(Any, self),
            cast(Any, SimpleNamespace(is_healthy=lambda: self.is_healthy)),
            lambda: self.num_taken,
        )

    def watch(self, watching: Watchdog, seconds: int, start: float) -> bool:
        """Looks every ten seconds for so long; whether the worker was to be ended."""
        return any(watching.find_reason(start + look) for look in range(10, seconds + 1, 10))


def test_a_worker_that_leaves_messages_in_redis_is_started_afresh_within_a_minute() -> None:
    around = ClusterState(num_waiting=1)
    watching, start = around.make_watchdog(), time.monotonic()
    assert not around.watch(watching, 40, start)
    assert around.watch(watching, 60, start)


@pytest.mark.parametrize(
    "around",
    [
        ClusterState(),  # nothing to do; a message that Postgres waits for was lost, which is not this worker's fault
        ClusterState(num_waiting=None),  # Redis is away
        ClusterState(num_waiting=7, num_held=1),  # all it can have is at work
    ],
    ids=["idle", "redis away", "at work"],
)
def test_a_worker_that_has_no_message_to_take_is_left_alone(around: ClusterState) -> None:
    assert not around.watch(around.make_watchdog(), 3600, time.monotonic())


def test_a_redis_that_was_away_for_50_seconds_restarts_no_worker() -> None:
    around = ClusterState()
    watching, start = around.make_watchdog(), time.monotonic()
    assert not around.watch(watching, 60, start)
    around.num_waiting = None
    assert not around.watch(watching, 50, start + 60)
    around.num_waiting = 4  # rung at once; kombu tries to connect every 12 s by then
    assert not around.watch(watching, 10, start + 110)
    around.num_waiting, around.num_taken = 0, 4
    assert not around.watch(watching, 3600, start + 120)


def test_a_worker_whose_messages_are_all_duplicates_is_not_deaf() -> None:
    around = ClusterState(num_waiting=3)
    watching, now = around.make_watchdog(), time.monotonic()
    for _ in range(30):
        now += 10
        around.num_taken += 1
        assert watching.find_reason(now) is None


@pytest.mark.parametrize(
    ("ends_when_told", "expected"),
    [(True, [("kill", signal.SIGTERM)]), (False, [("kill", signal.SIGTERM), ("_exit", 1)])],
)
def test_a_worker_that_does_not_end_when_it_is_told_is_ended_hard(
    ends_when_told: bool, expected: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    watching, done = ClusterState(is_healthy=False).make_watchdog(), []

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
