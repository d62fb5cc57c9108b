"""wait_for: the one place where tests wait for another process that sends no event; and calls in threads."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 4


def wait_for(
    what: Callable[[], T | None], seconds: float = 20.0, because: str = "what was waited for came"
) -> T:
    """Call `what` until it returns a true value, and return that; fail with `because` after a time limit.

    `seconds` is longer than an idle machine needs. The limit is PATIENCE times that, for a machine that is
    busy.
    """
    began = time.monotonic()
    while True:
        answer = what()
        if answer:
            return answer
        waited = time.monotonic() - began
        assert waited < PATIENCE * seconds, f"not within {PATIENCE * seconds:g} s: {because}"
        # There is no event to wait for, so poll. The interval grows to a tenth of the time waited, at most
        # 0.2 s, which leaves the processor to the process that is waited for.
        time.sleep(min(0.2, max(0.01, 0.1 * waited)))


@contextmanager
def repeating(act: Callable[[], object], seconds: float = 0.01) -> Iterator[None]:
    """Call `act` in a thread while the block runs, again and again with pauses of some seconds."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.wait(seconds):
            act()

    thread = threading.Thread(target=work, name="repeating")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def run_together(*acts: Callable[[], object]) -> None:
    """Call all of them at once, each in a thread of its own, and return when they have ended."""
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
