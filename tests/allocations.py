"""The most bytes that torch's allocators had handed out at one time, which is what a batch needs of memory."""

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def measure_peak_bytes(run: Callable[[], object]) -> int:
    """By how much the bytes of tensors grow while `run` is called, at most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results = profiler.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: int(event.start_ns()))
    return max(accumulate(int(event.nbytes()) for event in events), default=0)
