"""Plan: the steps of the first hour on a card, in their order, each with its limit. Measures and starts nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from worker.encoder.switches import Switch
from worker.placement.strategies import PIPELINE, TENSOR

TOTAL_SECONDS: Final = 40 * 60
# Nothing here is lent, rented or interrupted in smaller parts than this.
LONGEST_STEP_SECONDS: Final = 10 * 60

RATES: Final = "rates"
TESTS: Final = "tests"
WEIGHTS: Final = "weights"
ALONE: Final = "switch"
TOGETHER: Final = "together"
BUDGETS: Final = "budgets"
INSTALL: Final = "install"
BESIDE: Final = "beside"
HOST: Final = "host"
RANKS: Final = "ranks"

# Strategies in which several devices share a model, tried with the switches of ranks.
SHARED_BY: Final = (PIPELINE, TENSOR)


@dataclass(frozen=True, slots=True)
class Sized:
    """A shape, and how much of it is measured. Limits are seconds of one step; `slow_seconds` are added for a switch
    that has to translate the network when it is loaded. No `budget_seconds` means that its budgets are not swept.
    """

    shape: str
    lengths: tuple[int, ...]
    batch_tokens: int
    pass_seconds: float
    beside_tokens: int
    switch_seconds: float
    slow_seconds: float
    together_seconds: float
    beside_seconds: float
    budget_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. `limits` are seconds by kind, for steps of no shape; one without is not in the plan.
    `tests` is what pytest is given, `others` are the peers, and the tuner sees texts of `tuning_seconds` at a time.
    """

    name: str
    sized: tuple[Sized, ...]
    tests: str
    limits: Mapping[str, float]
    host_shape: str
    host_texts: Mapping[int, int]
    shared_shape: str
    budget_sizes: tuple[int, ...]
    budget_length: int
    tuning_seconds: float
    repeat: int = 3
    others: tuple[str, ...] = field(default=())

    def of(self, shape: str) -> Sized:
        return next(sized for sized in self.sized if sized.shape == shape)


# A load is some 15 s of these, of seven billion parameters 25; passes are half a second, the large one's 1.5 s.
CARD: Final = Scale(
    "card",
    (
        Sized("bert-base", (16, 100, 256), 32_768, 0.5, 1_500_000, 40, 40, 80, 100, 50),
        Sized("bert-large", (16, 100, 256), 32_768, 0.5, 800_000, 40, 40, 80, 110),
        Sized("qwen3-7b", (16, 100, 512), 16_384, 1.5, 100_000, 80, 60, 170, 160, 80),
    ),
    tests="tests/gpu",
    limits={RATES: 40, TESTS: 240, WEIGHTS: 70, INSTALL: 110, HOST: 70, RANKS: 45},
    host_shape="bert-base",
    host_texts={16: 100_000, 100: 40_000, 256: 20_000},
    shared_shape="bert-large",
    budget_sizes=(4_096, 8_192, 16_384, 32_768, 65_536, 131_072),
    budget_length=100,
    tuning_seconds=4.0,
    others=("sentence-transformers-256", "sentence-transformers-32", "vllm"),
)
# All of the mechanics on a processor, and no figure worth anything; limits are for one that is busy with other things.
QUICK: Final = Scale(
    "quick",
    (Sized("tiny", (16, 100), 512, 0.02, 2_000, 400, 0, 400, 400, 400),),
    tests="tests/gpu/test_pooling_on_gpu.py",
    limits=dict.fromkeys((RATES, TESTS, WEIGHTS, HOST, RANKS), 400),
    host_shape="tiny",
    host_texts={16: 60, 100: 20},
    shared_shape="tiny",
    budget_sizes=(128, 512),
    budget_length=16,
    tuning_seconds=0.1,
    repeat=2,
    others=("sentence-transformers",),
)
# By name, of the table of switches: those that translate the network before its first batch.
SLOW_TO_LOAD: Final = frozenset({"compile"})


@dataclass(frozen=True, slots=True)
class Step:
    """One process of its own. `obstacle` says why it is left out; then nothing is started for it."""

    name: str
    kind: str
    limit_seconds: float
    shape: str = ""
    switch: str = ""
    strategy: str = ""
    obstacle: str = ""


# Why a switch cannot be tried with a shape, as a sentence; empty where it can.
FindObstacle = Callable[[Switch, str], str]


def make_plan(
    scale: Scale, switches: Sequence[Switch], find_obstacle: FindObstacle, num_devices: int
) -> tuple[Step, ...]:
    """All steps, those that are left out among them. What decides the defaults comes before what compares."""
    return (
        Step(RATES, RATES, scale.limits[RATES]),
        Step(TESTS, TESTS, scale.limits[TESTS]),
        Step(WEIGHTS, WEIGHTS, scale.limits[WEIGHTS]),
        *(step for sized in scale.sized for step in _plan_shape(sized, switches, find_obstacle)),
        *_plan_ranks(scale, switches, find_obstacle, num_devices),
        *(
            Step(f"{BUDGETS} {sized.shape}", BUDGETS, sized.budget_seconds, sized.shape)
            for sized in scale.sized
            if sized.budget_seconds is not None
        ),
        Step(HOST, HOST, scale.limits[HOST], scale.host_shape),
        *([Step(INSTALL, INSTALL, scale.limits[INSTALL])] if INSTALL in scale.limits else ()),
        *(Step(f"{BESIDE} {each.shape}", BESIDE, each.beside_seconds, each.shape) for each in scale.sized),
    )


def _plan_shape(sized: Sized, switches: Sequence[Switch], find_obstacle: FindObstacle) -> Iterator[Step]:
    for switch in switches:
        if not switch.is_of_ranks:
            limit = sized.switch_seconds + sized.slow_seconds * (switch.name in SLOW_TO_LOAD)
            name = f"{ALONE} {sized.shape} {switch.name}"
            obstacle = find_obstacle(switch, sized.shape)
            yield Step(name, ALONE, limit, sized.shape, switch.name, obstacle=obstacle)
    yield Step(f"{TOGETHER} {sized.shape}", TOGETHER, sized.together_seconds, sized.shape)


def _plan_ranks(
    scale: Scale, switches: Sequence[Switch], find_obstacle: FindObstacle, num_devices: int
) -> Iterator[Step]:
    for switch in switches:
        for strategy in SHARED_BY if switch.is_of_ranks else ():
            obstacle = find_obstacle(switch, scale.shared_shape)
            if num_devices < 2:
                obstacle = f"a model is shared by two devices, and there is {num_devices or 'none'}"
            yield Step(
                f"{RANKS} {strategy} {switch.name}",
                RANKS,
                scale.limits[RANKS],
                scale.shared_shape,
                switch.name,
                strategy,
                obstacle,
            )


def count_seconds(steps: Sequence[Step]) -> float:
    """The sum of the limits of those that are not left out."""
    return sum(step.limit_seconds for step in steps if not step.obstacle)
