"""The fastest right way wins, on simulated devices: fast or slow by a known factor, noisy, wrong, or crashing."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.encoder import Choice, EncoderReport
from worker.encoder.way import Way
from worker.tuning.comparison import MEASURED_SECONDS, TrialWork, WayResult, choose_best, compare_ways
from worker.tuning.trial import TrialFailed

REPORT = EncoderReport(Choice("d", ""), Choice("torch", ""), Choice("fp32", ""), "varlen", 1, 0.0)
KNOWN = Batch.from_ids([np.arange(4, dtype=np.int32)])
WORKLOADS = tuple(
    TrialWork(length, (Batch.from_ids([np.zeros(length, np.int32)] * 8),)) for length in (16, 100, 512)
)


@dataclass(frozen=True)
class Behaviour:
    """How a simulated device runs a way: its true speed, what is wrong, and where it crashes."""

    speed: float = 1.0
    is_wrong: bool = False
    is_refused: bool = False
    crashes_at: str = ""  # loading, encoding or measuring

    @property
    def is_usable(self) -> bool:
        return not (self.is_wrong or self.is_refused or self.crashes_at)


class SimulatedModel:
    def __init__(self, way: Way, behaviour: Behaviour, noise: random.Random, share: float) -> None:
        self._behaviour = behaviour
        self._noise = noise
        self._share = share
        self.passes: list[float] = []
        self.report = replace(
            REPORT, backend=Choice(way.backend, ""), switches=() if behaviour.is_refused else way.switches
        )

    def encode(self, batches: Sequence[Batch]) -> list[Ragged]:
        self.crash("encoding")
        value = 2.0 if self._behaviour.is_wrong else 1.0
        return [Ragged.from_rows([np.full(3, value, np.float32)], np.float32) for _ in batches]

    def measure(self, batches: Sequence[Batch]) -> float:
        self.crash("measuring")
        seconds = sum(batch.num_tokens for batch in batches) / self._behaviour.speed / 1e5
        seconds *= 1 + self._share * self._noise.expovariate(1)
        self.passes.append(seconds)
        return seconds

    @property
    def speed(self) -> float:
        return self._behaviour.speed

    def crash(self, moment: str) -> None:
        if self._behaviour.crashes_at == moment:
            raise TrialFailed("the model process ended: it was killed")


class SimulatedDevice:
    def __init__(self, behaviours: dict[Way, Behaviour], seed: int = 0, noise: float = 0.0) -> None:
        self._behaviours = behaviours
        self._random = random.Random(seed)
        self._noise = noise
        self.num_open = 0
        self.models: list[SimulatedModel] = []

    @contextmanager
    def open(self, way: Way) -> Iterator[SimulatedModel]:
        model = SimulatedModel(way, self._behaviours[way], self._random, self._noise)
        model.crash("loading")
        self.num_open += 1
        assert self.num_open == 1, "the memory of a device may hold one model more, and not two"
        self.models.append(model)
        try:
            yield model
        finally:
            self.num_open -= 1


def find_flaw(results: Ragged, expected: Ragged, report: EncoderReport) -> str:
    return "" if np.array_equal(results.values, expected.values) else "its vector has changed"


def compare(behaviours: dict[Way, Behaviour], seed: int = 0, noise: float = 0.0) -> tuple[WayResult, ...]:
    device = SimulatedDevice(behaviours, seed, noise)
    return compare_ways(list(behaviours), device.open, KNOWN, WORKLOADS, find_flaw)


EAGER, FUSED, COMPILED = Way("torch"), Way("torch", ("fused_gelu",)), Way("torch", ("fused_gelu", "compile"))
BEHAVIOURS = st.builds(
    Behaviour,
    speed=st.floats(0.3, 3.0),
    is_wrong=st.booleans(),
    is_refused=st.booleans(),
    crashes_at=st.sampled_from(["", "", "", "loading", "encoding", "measuring"]),
)


@given(st.floats(0.3, 3.0), st.lists(BEHAVIOURS, max_size=5), st.integers(0, 1 << 30), st.floats(0, 0.1))
def test_the_way_that_is_chosen_is_right_and_at_most_three_percent_slower_than_the_fastest_right_one(
    speed: float, others: list[Behaviour], seed: int, noise: float
) -> None:
    behaviours = {EAGER: Behaviour(speed)} | {
        Way("torch", (f"switch{number}",)): behaviour for number, behaviour in enumerate(others)
    }
    findings = compare(behaviours, seed, noise)
    chosen = choose_best(findings).way
    assert behaviours[chosen].is_usable
    fastest = max(behaviour.speed for behaviour in behaviours.values() if behaviour.is_usable)
    assert behaviours[chosen].speed >= 0.97 * fastest
    assert [bool(finding.flaw) for finding in findings] == [
        not behaviour.is_usable for behaviour in behaviours.values()
    ]


@given(st.lists(st.floats(1e-3, 3.0), min_size=1, max_size=12))
def test_all_ways_together_are_measured_for_a_minute_however_slow_they_are(speeds: list[float]) -> None:
    behaviours = {Way("torch", (f"switch{place}",)): Behaviour(speed) for place, speed in enumerate(speeds)}
    device = SimulatedDevice(behaviours)
    findings = compare_ways(list(behaviours), device.open, KNOWN, WORKLOADS, find_flaw)
    true = [(speed * 1e5,) * len(WORKLOADS) for speed in speeds]
    np.testing.assert_allclose([finding.tokens_per_second for finding in findings], true, rtol=1e-6)
    share = MEASURED_SECONDS / (len(speeds) + 1) / len(WORKLOADS)
    for model in device.models:
        # The first batch of each length takes what it takes, and so does one alone.
        firsts = [workload.batches[0].num_tokens / model.speed / 1e5 for workload in WORKLOADS]
        assert sum(model.passes) <= sum(first + max(first, share) for first in firsts) * 1.0001


def test_a_way_that_gains_nothing_leaves_the_simplest_one() -> None:
    findings = compare({EAGER: Behaviour(1.0), FUSED: Behaviour(1.005), COMPILED: Behaviour(0.9)})
    assert choose_best(findings).way == EAGER


def test_a_way_that_is_out_says_why() -> None:
    findings = compare(
        {
            EAGER: Behaviour(),
            FUSED: Behaviour(2.0, is_wrong=True),
            COMPILED: Behaviour(2.0, is_refused=True),
            Way("openvino"): Behaviour(2.0, crashes_at="measuring"),
        }
    )
    assert [(finding.flaw, finding.may_pass) for finding in findings] == [
        ("", False),
        ("its results differ: its vector has changed", False),
        ("fused_gelu, compile was turned off", False),
        ("the model process ended: it was killed", True),
    ]


def test_a_way_of_which_a_switch_is_refused_is_measured_without_it_if_that_is_no_other_way() -> None:
    class PartlyRefused(SimulatedDevice):
        @contextmanager
        def open(self, way: Way) -> Iterator[SimulatedModel]:
            with super().open(way) as model:
                left = tuple(switch for switch in way.switches if switch != "fused_gelu")
                model.report = replace(model.report, switches=left)
                yield model

    device = PartlyRefused(
        {EAGER: Behaviour(), FUSED: Behaviour(), COMPILED: Behaviour(1.5)}
        | {Way("torch", ("compile",)): Behaviour()}
    )
    findings = compare_ways([EAGER, FUSED, COMPILED], device.open, KNOWN, WORKLOADS, find_flaw)
    assert [(finding.way, finding.flaw) for finding in findings] == [
        (EAGER, ""),
        (FUSED, "fused_gelu was turned off"),
        (Way("torch", ("compile",)), ""),
    ]


def test_the_first_way_that_works_is_the_usual_one_and_without_any_nothing_is_found() -> None:
    findings = compare({EAGER: Behaviour(crashes_at="loading"), FUSED: Behaviour(1.0)})
    assert choose_best(findings).way == FUSED
    with pytest.raises(TrialFailed, match="it was killed"):
        compare({EAGER: Behaviour(crashes_at="loading"), FUSED: Behaviour(crashes_at="encoding")})


@pytest.mark.parametrize("change", [0.5, 2.0])
def test_nothing_is_chosen_if_others_begin_or_cease_to_use_the_device_meanwhile(change: float) -> None:
    class SharedDevice(SimulatedDevice):
        num_opened = 0

        @contextmanager
        def open(self, way: Way) -> Iterator[SimulatedModel]:
            self.num_opened += 1
            speed = change if self.num_opened > 1 else 1.0
            self._behaviours = {each: replace(kept, speed=speed) for each, kept in self._behaviours.items()}
            with super().open(way) as model:
                yield model

    device = SharedDevice({EAGER: Behaviour(), FUSED: Behaviour()})
    with pytest.raises(TrialFailed, match="something else uses the device"):
        compare_ways([EAGER, FUSED], device.open, KNOWN, WORKLOADS, find_flaw)
