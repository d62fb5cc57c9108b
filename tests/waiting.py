"""wait_for: the one place where tests wait for something that another process does and that sends no event."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(
    what: Callable[[], T | None], seconds: float = 20.0, because: str = "what was waited for came"
) -> T:
    """The first answer of `what` that is true; fails with `because` when the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        answer = what()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {because}"
        time.sleep(0.01)  # between two questions to another process or thread: there is no event to wait for
