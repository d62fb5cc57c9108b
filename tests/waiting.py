"""wait_for: the one place where tests wait for another process that sends no event."""

import time
from collections.abc import Callable
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
