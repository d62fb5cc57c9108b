"""The doorbell: a ring wakes the dispatcher, many are one, and none that is lost holds anything up."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from redis import Redis
from sqlalchemy import Engine

from scheduler.main import pause, plan_rest
from tests.clusters import connect
from tests.protocol import make_items, submit
from tests.waiting import wait_for
from vectormill.broker.doorbell import DOORBELL, WakeUpSender, WakeUpSubscriber
from vectormill.jobs.dispatch import listen_for_jobs

Driver = psycopg.Connection[Any]

# Whoever is woken returns at once; who is not, after this.
LONG_SECONDS = 20.0
NOWHERE = "redis://127.0.0.1:1/0"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def driver(database_url: str) -> Iterator[Driver]:
    with connect(database_url) as connection:
        listen_for_jobs(connection)
        yield connection


@pytest.fixture
def subscriber(redis_url: str) -> Iterator[WakeUpSubscriber]:
    """Has begun to hear; that Redis confirmed it counts as a ring."""
    with closing(WakeUpSubscriber(redis_url)) as subscriber:
        subscriber.listen()
        with Redis.from_url(redis_url) as redis:
            wait_for(lambda: redis.pubsub_numsub(DOORBELL)[0][1] == 1)
        yield subscriber


@pytest.fixture
def silent_subscriber(subscriber: WakeUpSubscriber, driver: Driver) -> WakeUpSubscriber:
    while subscriber.wait(0.5, driver):
        pass
    return subscriber


def test_rings_wake_who_waits_and_are_answered_together(
    redis_url: str, silent_subscriber: WakeUpSubscriber, driver: Driver
) -> None:
    with closing(WakeUpSender(redis_url)) as doorbell:
        for _ in range(3):
            doorbell.ring()
        assert silent_subscriber.wait(LONG_SECONDS, driver)
        while silent_subscriber.wait(0.2, driver):  # of three rings some may have come later
            pass
        doorbell.ring()
        assert silent_subscriber.wait(LONG_SECONDS, driver)


def test_a_ring_that_is_lost_costs_one_pause(silent_subscriber: WakeUpSubscriber, driver: Driver) -> None:
    asked_at = time.monotonic()
    pause(driver, silent_subscriber, 0.2, threading.Event())
    assert 0.2 <= time.monotonic() - asked_at < LONG_SECONDS


def test_a_submission_wakes_the_same_pause(
    engine: Engine, silent_subscriber: WakeUpSubscriber, driver: Driver
) -> None:
    asked_at = time.monotonic()
    submit(engine, make_items(1))
    pause(driver, silent_subscriber, LONG_SECONDS, threading.Event())
    assert time.monotonic() - asked_at < LONG_SECONDS
    asked_at = time.monotonic()
    pause(driver, silent_subscriber, 0.2, threading.Event())
    assert time.monotonic() - asked_at >= 0.2, "a submission wakes once"


def test_a_submission_wakes_nobody_who_rests_after_a_long_round_and_everybody_afterwards(
    engine: Engine, silent_subscriber: WakeUpSubscriber, driver: Driver
) -> None:
    asked_at = time.monotonic()
    submit(engine, make_items(1))
    pause(driver, silent_subscriber, LONG_SECONDS, threading.Event(), plan_rest(0.1))
    assert 0.3 <= time.monotonic() - asked_at < LONG_SECONDS


def test_a_long_round_is_followed_by_a_rest_and_a_short_one_is_not() -> None:
    assert [plan_rest(seconds) for seconds in (0.002, 0.01, 0.1, 5.0)] == [0, 0, pytest.approx(0.3), 1]


def test_a_connection_that_broke_is_made_anew(redis_url: str, driver: Driver) -> None:
    clock = Clock()
    with (
        closing(WakeUpSubscriber(redis_url, clock)) as subscriber,
        closing(WakeUpSender(redis_url)) as doorbell,
    ):
        subscriber.listen()
        while subscriber.wait(0.5, driver):
            pass
        with Redis.from_url(redis_url) as redis:
            redis.client_kill_filter(_type="pubsub")
        subscriber.wait(LONG_SECONDS, driver)  # it hears that nothing is heard any more
        while not subscriber.wait(0.1, driver):
            clock.now += 60
            subscriber.listen()
            doorbell.ring()


def test_without_redis_nobody_waits_for_the_other(driver: Driver) -> None:
    clock = Clock()
    with (
        closing(WakeUpSubscriber(NOWHERE, clock)) as subscriber,
        closing(WakeUpSender(NOWHERE, clock)) as doorbell,
    ):
        subscriber.listen()
        asked_at = time.monotonic()
        for _ in range(1000):  # the first fails, and the others are not tried
            doorbell.ring()
        assert not subscriber.wait(0.1, driver)
        assert time.monotonic() - asked_at < LONG_SECONDS
