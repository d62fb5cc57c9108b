"""wait_for: the one place where tests wait for something that another process does and that sends no event."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 4


def wait_for(
    what: Callable[[], T | None], seconds: float = 20.0, because: str = "what was waited for came"
) -> T:
    """The first answer of `what` that is true; fails with `because` when the time is over.

    `seconds` is more than an idle machine takes; one that is busy with something else gets PATIENCE times as much.
    """
    began = time.monotonic()
    while True:
        answer = what()
        if answer:
            return answer
        waited = time.monotonic() - began
        assert waited < PATIENCE * seconds, f"not within {PATIENCE * seconds:g} s: {because}"
        # Between two questions to another process or thread: there is no event to wait for. The longer it takes, the
        # rarer they are: at most a tenth late, and the processor is left to whom we wait for.
        time.sleep(min(0.2, max(0.01, 0.1 * waited)))
