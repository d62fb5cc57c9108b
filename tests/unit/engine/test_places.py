"""Who comes into the engine, and how many tokens a worker asks for."""

import threading

import pytest

from tests.waiting import wait_for
from worker.engine.places import LEAST_TOKENS_IN_FLIGHT, Places, choose_tokens_in_flight
from worker.engine.request import EncodingCancelled, EngineStopped


@pytest.mark.parametrize(
    ("batch_tokens", "num_started", "pads", "wanted"),
    [
        (
            1024,
            2,
            True,
            LEAST_TOKENS_IN_FLIGHT,
        ),  # a CPU: chunks enough to claim, encode and commit side by side
        (32_768, 1, False, 8 * 32_768),
        (32_768, 2, False, 16 * 32_768),  # one computed, one queued behind it
        (32_768, 1, True, 32 * 32_768),  # to choose like lengths from
        (1 << 20, 1 << 10, True, (1 << 31) - 1),  # Postgres keeps it in an integer
    ],
)
def test_a_worker_asks_for_full_batches(batch_tokens: int, num_started: int, pads: bool, wanted: int) -> None:
    assert choose_tokens_in_flight(batch_tokens, num_started, pads=pads) == wanted


def test_requests_come_in_until_those_inside_have_the_tokens() -> None:
    places = Places(9, lambda: 100)
    assert places.acquire(90, 0)
    assert places.acquire(1000, 0)  # of any size, or it would never come in
    assert not places.acquire(1, 0)
    places.release(1000)
    assert places.acquire(1, 0)


def test_requests_without_a_bound_of_tokens_are_counted() -> None:
    places = Places(2)
    assert places.acquire(1 << 40, 0)
    assert places.acquire(1 << 40, 0)
    assert not places.acquire(0, 0)


def test_a_request_that_waits_comes_in_when_another_leaves() -> None:
    places = Places(1)
    inside = threading.Event()

    def enter() -> None:
        with places.hold(5, threading.Event(), lambda: True):
            inside.set()

    with places.hold(5, threading.Event(), lambda: True):
        waiting = threading.Thread(target=enter)
        waiting.start()
        assert places.num_free == 0
        assert not inside.is_set()
    wait_for(inside.is_set)
    waiting.join()
    assert places.num_free == 1


def test_a_request_that_is_cancelled_or_whose_engine_stops_waits_no_longer() -> None:
    places, cancelled = Places(0), threading.Event()
    with pytest.raises(EngineStopped), places.hold(1, cancelled, lambda: False):
        pass
    cancelled.set()
    with pytest.raises(EncodingCancelled), places.hold(1, cancelled, lambda: True):
        pass
