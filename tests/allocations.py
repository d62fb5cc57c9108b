"""The most bytes that torch's allocators had handed out at one time, which is what a batch needs of memory."""

import time
from collections.abc import Callable
from itertools import accumulate
from typing import Final

from torch.profiler import ProfilerActivity, profile

# Threads of gloo free buffers a little late, and a profiler that has ended by then damages the process's memory.
SETTLING_SECONDS: Final = 0.1


def measure_peak_bytes(run: Callable[[], object], *, has_threads: bool = False) -> int:
    """By how much the bytes of tensors grow while `run` is called, at most. Other threads may free some of them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
        if has_threads:
            time.sleep(SETTLING_SECONDS)
    results = profiler.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: int(event.start_ns()))
    return max(accumulate(int(event.nbytes()) for event in events), default=0)
