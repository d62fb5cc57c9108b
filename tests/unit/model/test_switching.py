"""Turning switches on: compared with the network without them, off again when they fail or differ, or an error."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import _registry, current_flash_attention_impl, restore_flash_attention_impl

from vectormill.domain.errors import ModelError
from worker.encoder.switches import SwitchChoice
from worker.model import switching
from worker.model.switching import ComputeProbes, Step, Undo, apply_switches

STATES = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(9, 8, generator=torch.Generator().manual_seed(1))


def step(change: Any, smallest_cosine: float | None = None) -> Step:
    """Changes a network that is nothing but its states."""

    def turn_on(network: Any, _: ComputeProbes) -> Undo:
        before = network.states
        network.states = change(before)

        def undo() -> None:
            network.states = before

        return undo

    return Step(turn_on, smallest_cosine)


def fail(_: Tensor) -> Tensor:
    raise RuntimeError("No such kernel\nat line 7")


STEPS = {
    "same": step(lambda states: states * 2),
    "rough": step(lambda states: states + 0.05 * NOISE, smallest_cosine=0.99),
    "coarse": step(lambda states: states + 0.05 * NOISE),
    "wrong": step(lambda states: states.flip(0)),
    "nan": step(lambda states: states * float("nan")),
    "broken": step(fail),
}


def switch(*names: str, is_asked: bool = False) -> tuple[Tensor, dict[str, SwitchChoice]]:
    network: Any = SimpleNamespace(states=STATES)
    choices = [SwitchChoice(name, True, "measured", is_asked) for name in names]
    settled = apply_switches(network, choices, lambda: [network.states], STEPS)
    return network.states, {choice.name: choice for choice in settled}


def test_what_agrees_is_on_and_each_is_compared_with_those_before_it() -> None:
    states, settled = switch("rough", "same")
    assert all(choice.is_on for choice in settled.values())
    assert not torch.equal(states, STATES)
    assert list(settled) == ["rough", "same"], "in the order in which they were asked for"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("coarse", "with it the network deviates: the smallest cosine is 0.99"),
        ("wrong", "with it the network deviates: the smallest cosine is -0."),
        ("nan", "with it the network deviates: the smallest cosine is nan"),
        ("broken", "it failed: No such kernel"),
    ],
)
def test_what_differs_or_fails_is_off_again_with_its_reason_or_an_error_where_it_was_asked_for(
    name: str, reason: str
) -> None:
    states, settled = switch("same", name)
    assert torch.equal(states, STATES * 2), "the network is as it was before the switch"
    assert settled["same"].is_on
    assert not settled[name].is_on
    assert settled[name].reason.startswith(reason)
    with pytest.raises(ModelError, match=rf"The switch {name} cannot be used, because {reason}"):
        switch(name, is_asked=True)


def test_a_switch_that_is_off_is_not_tried() -> None:
    network: Any = SimpleNamespace(states=STATES)
    off = (SwitchChoice("broken", False, "no package", False),)
    assert apply_switches(network, off, lambda: pytest.fail("nothing is compared"), STEPS) == off


def test_a_switch_that_breaks_the_device_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        is_cuda, device = True, "cuda:0"

    monkeypatch.setattr(switching, "is_device_lost", lambda: True)
    network: Any = SimpleNamespace(states=STATES)
    choices = [SwitchChoice("broken", True, "measured", False)]
    with pytest.raises(ModelError, match=r"broke cuda:0 .*; say VECTORMILL_WORKER_SWITCHES=none"):
        apply_switches(network, choices, lambda: [OnGpu()], STEPS)


class Handle:
    """What torch keeps of an implementation of flash attention that was activated."""

    is_removed = False

    def remove(self) -> None:
        self.is_removed = True


@pytest.mark.parametrize("agrees", [True, False])
def test_flash_attention_3_is_activated_and_given_back_when_it_differs(
    agrees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own registry, with an implementation that needs no card."""
    handle = Handle()
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", lambda: handle)
    states = iter([STATES, STATES if agrees else STATES.flip(0)])
    choices = [SwitchChoice("flash3", True, "measured", False)]
    network: Any = SimpleNamespace()
    try:
        (choice,) = apply_switches(network, choices, lambda: [next(states)])
        assert choice.is_on == agrees
        assert current_flash_attention_impl() == ("FA3" if agrees else None)
        assert handle.is_removed != agrees
    finally:
        restore_flash_attention_impl(_raise_warn=False)
