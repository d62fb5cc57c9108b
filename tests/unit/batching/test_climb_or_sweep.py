"""Why batch sizes are compared while the engine works, and not by a sweep at load, which is simpler (decision 0025)."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import mean
from typing import Final

import pytest

from worker.batching.budget import BudgetRules, EncodedBatch, TokenBudget
from worker.execution.batch_bounds import ACCELERATOR_BATCH_TOKENS, CPU_BATCH_TOKENS

LENGTH: Final = 100
JOB_SECONDS: Final = 600.0
SWEEP_SECONDS: Final = 2.0  # for one length class; all four are swept before anybody knows which will come
NUM_TIMED: Final = 5  # batches of each size, of which the fastest counts; one before them makes the kernels
NUM_SEEDS: Final = 5


@dataclass(frozen=True)
class Device:
    """`half_tokens` take as long as a batch costs beside its tokens. Others use it too for the first `busy_seconds`."""

    tokens_per_second: float
    half_tokens: int
    start_tokens: int = ACCELERATOR_BATCH_TOKENS
    cache_tokens: int | None = None
    most_tokens: int = 1 << 20
    busy_seconds: float = 0.0

    def clean_seconds(self, tokens: int) -> float:
        outgrown = self.cache_tokens is not None and tokens > self.cache_tokens
        return (tokens + self.half_tokens) / self.tokens_per_second * (1.3 if outgrown else 1.0)

    def best_rate(self) -> float:
        sizes = [fill(min(1 << step, self.most_tokens)) for step in range(8, 21)]
        return max(size / self.clean_seconds(size) for size in sizes)


CPU_MINILM: Final = Device(7_000, 9, CPU_BATCH_TOKENS)
CPU_SMALL_CACHE: Final = Device(7_000, 9, CPU_BATCH_TOKENS, cache_tokens=600)
H100_BERT: Final = Device(2.6e6, 13_000)  # 5 ms a batch beside its tokens
H100_MINILM: Final = Device(12e6, 48_000)
BUSY_H100_MINILM: Final = Device(12e6, 48_000, busy_seconds=60)
SMALL_CARD: Final = Device(3e5, 3_000, most_tokens=12_000)
DEVICES: Final = (CPU_MINILM, CPU_SMALL_CACHE, H100_BERT, H100_MINILM, BUSY_H100_MINILM, SMALL_CARD)


class Clock:
    """Batches on a device whose times scatter by 5 %, and by up to 150 % while others use it."""

    def __init__(self, device: Device, seed: int) -> None:
        self.device = device
        self._numbers = random.Random(seed)
        self.now = 0.0

    def encode(self, tokens: int) -> float | None:
        """Seconds; None for a batch that does not fit, which takes as long."""
        if tokens > self.device.most_tokens:
            self.now += self.device.clean_seconds(tokens)
            return None
        seconds = self.device.clean_seconds(tokens) * self._numbers.lognormvariate(0, 0.05)
        if self.now < self.device.busy_seconds and self._numbers.random() < 0.5:
            seconds *= self._numbers.uniform(1.2, 2.5)
        self.now += seconds
        return seconds


def fill(size: int) -> int:
    """What texts of one length fill it to."""
    return max(1, size // LENGTH) * LENGTH


def climb(clock: Clock) -> float:
    """Tokens that a job of JOB_SECONDS encodes, while sizes are compared; two batches on their way at a time."""
    budget = TokenBudget(BudgetRules(clock.device.start_tokens))
    on_their_way, num_tokens = [budget.max_batch_tokens(LENGTH)], 0
    while clock.now < JOB_SECONDS:
        on_their_way.append(budget.max_batch_tokens(LENGTH))
        tokens = fill(on_their_way.pop(0))
        seconds = clock.encode(tokens)
        if seconds is None:
            budget.observe_out_of_memory(LENGTH, tokens)
        else:
            num_tokens += tokens
            budget.observe(EncodedBatch(LENGTH, tokens, tokens, tokens, LENGTH, seconds))
    return num_tokens


def sweep(clock: Clock) -> float:
    """The same with a size that was chosen at load: the half, then whichever way gains, while SWEEP_SECONDS last."""
    start, rates = clock.device.start_tokens, dict[int, float]()

    def measure(size: int) -> bool:
        tokens = fill(size)
        if clock.now + (NUM_TIMED + 1) * clock.device.clean_seconds(tokens) > SWEEP_SECONDS:
            return False
        timed = [clock.encode(tokens) for _ in range(NUM_TIMED + 1)][1:]
        if any(seconds is None for seconds in timed):
            return False
        rates[size] = tokens / min(seconds for seconds in timed if seconds is not None)
        return True

    def is_as_good(size: int) -> bool:
        return measure(size) and rates[size] >= 0.98 * max(rates.values())

    size, step = start, 2.0
    if measure(start) and is_as_good(start // 2):
        size, step = start // 2, 0.5
    while 256 <= size * step <= 1 << 20 and measure(int(size * step)):
        gain = rates[int(size * step)] / rates[size]
        size = int(size * step)
        if gain < (1.02 if step > 1 else 0.98):
            break
    chosen = min((each for each in rates if rates[each] >= 0.98 * max(rates.values())), default=start)
    return keep(clock, chosen)


def keep(clock: Clock, size: int | None = None) -> float:
    """The same with one size for ever, halved by every exhaustion: that at which tuning starts."""
    tokens, num_tokens = fill(size or clock.device.start_tokens), 0
    while clock.now < JOB_SECONDS:
        if clock.encode(tokens) is None:
            tokens = fill(tokens // 2)
        else:
            num_tokens += tokens
    return num_tokens


@cache
def find_share(way: Callable[[Clock], float], device: Device) -> float:
    """Of what the device's best size would have encoded, on the mean of seeds."""
    most = device.best_rate() * JOB_SECONDS
    return mean(way(Clock(device, seed)) for seed in range(NUM_SEEDS)) / most


@pytest.mark.parametrize(
    ("device", "least"), list(zip(DEVICES, (0.97, 0.97, 0.97, 0.98, 0.90, 0.90), strict=True))
)
def test_the_climb_finds_nearly_the_best_size_of_every_device(device: Device, least: float) -> None:
    assert find_share(climb, device) >= least


def test_a_sweep_at_load_would_be_slower_on_the_mean_of_devices_and_by_far_on_some() -> None:
    # What is decided by a few batches stays. When this fails, the climb has become the worse one.
    losses = [find_share(climb, device) - find_share(sweep, device) for device in DEVICES]
    assert mean(losses) >= 0.02
    assert max(losses) >= 0.05
    assert min(losses) >= -0.02


@pytest.mark.parametrize("device", [CPU_SMALL_CACHE, H100_BERT, H100_MINILM])
def test_one_size_for_all_would_leave_a_fifth_or_more(device: Device) -> None:
    assert find_share(keep, device) <= 0.8


def test_on_a_cpu_whose_sizes_are_alike_the_climb_costs_what_it_is_allowed_to_give_up() -> None:
    assert find_share(keep, CPU_MINILM) - find_share(climb, CPU_MINILM) <= 0.02
