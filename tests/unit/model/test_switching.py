"""Turning switches on: each compared with the network without it, and the modules that two of them put in place."""

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import _registry, current_flash_attention_impl, restore_flash_attention_impl
from torch.nn.functional import cosine_similarity

from vectormill.domain.errors import ModelError
from worker.encoder.switches import SwitchChoice
from worker.model import switching
from worker.model.switching import (
    SMALLEST_SIZE,
    ComputeProbes,
    FusedProjections,
    ScaledLinear,
    Step,
    SwitchNotReverted,
    Undo,
    apply_switches,
    fuse_projections,
    is_scalable,
    multiply_restored,
    multiply_scaled,
    scale_layers,
    scale_rows,
)
from worker.model.weights import RoundedLinear, apply_quantization

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
        ("coarse", "the network deviates with it: the smallest cosine is 0.99"),
        ("wrong", "the network deviates with it: the smallest cosine is -0."),
        ("nan", "the network deviates with it: the smallest cosine is nan"),
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
    with pytest.raises(ModelError, match=rf"The switch {name} cannot be used because {reason}"):
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
    with pytest.raises(ModelError, match=r"broke cuda:0 .*; set VECTORMILL_WORKER_SWITCHES=none"):
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


HIDDEN, KEYS = 128, 32


class Layer(nn.Module):
    """Grouped heads: fewer keys and values than queries."""

    def __init__(
        self, *, has_bias: bool = True, names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    ) -> None:
        super().__init__()
        self.names = names
        for name, size in zip(names, (HIDDEN, KEYS, KEYS), strict=True):
            setattr(self, name, nn.Linear(HIDDEN, size, bias=has_bias))

    def forward(self, states: Tensor) -> Tensor:
        return torch.cat([getattr(self, name)(states) for name in self.names], dim=-1)


def network_of(*layers: nn.Module) -> Any:
    return SimpleNamespace(transformer=nn.Sequential(*layers))


def states_of(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(11, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("names", switching.SIBLINGS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_each_part_is_what_its_own_product_gave(names: tuple[str, str, str], has_bias: bool) -> None:
    layer = Layer(has_bias=has_bias, names=names)
    expected = layer(states_of())
    fuse_projections(network_of(layer))
    assert [type(child) for child in layer.modules()].count(nn.Linear) == 1
    torch.testing.assert_close(layer(states_of()), expected, rtol=0, atol=1e-6)


def test_weights_in_bf16_and_weights_of_8_bits_are_joined_as_they_are() -> None:
    half = Layer().to(torch.bfloat16)
    expected = half(states_of(torch.bfloat16))
    fuse_projections(network_of(half))
    assert next(half.parameters()).dtype == torch.bfloat16
    torch.testing.assert_close(half(states_of(torch.bfloat16)), expected, rtol=1e-2, atol=1e-2)

    rounded = Layer()
    apply_quantization(rounded)
    expected = rounded(states_of())
    numbers = torch.cat([getattr(rounded, name).numbers for name in rounded.names])
    fuse_projections(network_of(rounded))
    (joined,) = (module for module in rounded.modules() if isinstance(module, RoundedLinear))
    assert torch.equal(joined.numbers, numbers), "the same numbers, and not rounded again"
    torch.testing.assert_close(rounded(states_of()), expected, rtol=0, atol=1e-6)


def test_no_more_than_one_layers_weights_are_held_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [Layer() for _ in range(5)]
    before = [
        weakref.ref(parameter) for layer in layers for parameter in layer.parameters() if parameter.ndim == 2
    ]
    held: list[int] = []
    cat = torch.cat

    def count(tensors: list[Tensor], **options: Any) -> Tensor:
        held.append(sum(reference() is not None for reference in before))
        return cat(tensors, **options)

    monkeypatch.setattr(torch, "cat", count)
    fuse_projections(network_of(*layers))
    assert max(held) <= 15
    assert held == sorted(held, reverse=True)
    assert held[-1] <= 3, "when the last layer is joined, those before are freed"
    assert all(reference() is None for reference in before)


def test_nothing_of_a_pass_is_held_behind_it() -> None:
    layer = Layer()
    fuse_projections(network_of(layer))
    states = states_of()
    layer(states)
    (fused,) = (module for module in layer.modules() if isinstance(module, FusedProjections))
    assert (fused._states, fused._parts) == (None, {})


def test_projections_of_different_states_are_refused_rather_than_mixed_up() -> None:
    layer = Layer()
    fuse_projections(network_of(layer))
    layer.q_proj(states_of())
    with pytest.raises(RuntimeError, match="computed from different states"):
        layer.k_proj(states_of())


def test_projections_that_differ_in_kind_stay_apart() -> None:
    layer = Layer()
    layer.k_proj = nn.Linear(HIDDEN, KEYS, bias=False)
    with pytest.raises(ValueError, match="no layer has separate projections"):
        fuse_projections(network_of(layer))


pytestmark = pytest.mark.usefixtures("without_gradients")

RANDOM = torch.Generator().manual_seed(0)
SIZE = SMALLEST_SIZE


def random_rows(num_rows: int, num_inputs: int = SIZE) -> Tensor:
    """Some of them a hundred times larger than others."""
    scales = 10 ** (2 * torch.rand(num_rows, 1, generator=RANDOM))
    return torch.randn(num_rows, num_inputs, generator=RANDOM) * scales


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Block(nn.Module):
    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(size, size) for _ in range(3))
        self.small = nn.Linear(size, 64)


def network_of_layers(*blocks: nn.Module) -> Any:
    transformer = nn.Module()
    transformer.layers = nn.ModuleList(blocks)
    return SimpleNamespace(transformer=transformer)


def test_no_number_is_off_by_more_than_a_sixteenth_of_it() -> None:
    rows = random_rows(50)
    numbers, scales = scale_rows(rows)
    assert (numbers.dtype, scales.dtype, scales.shape) == (torch.float8_e4m3fn, torch.float32, (50, 1))
    restored = numbers.float() * scales
    is_normal = rows.abs() >= scales * 2**-6  # what is smaller has fewer digits, and less to say
    assert is_normal.float().mean() > 0.99
    assert float(((restored - rows).abs() / rows.abs())[is_normal].max()) <= 1 / 16 + 1e-6
    assert float((restored - rows).abs()[~is_normal].max() / scales.max()) <= 2**-10 + 1e-6


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, 65504.0])
def test_rows_of_nothing_and_of_very_much_stay_numbers(value: float) -> None:
    rows = torch.full((3, 32), value)
    numbers, scales = scale_rows(rows)
    restored = numbers.float() * scales
    assert restored.isfinite().all()
    if value > 1e-6:
        torch.testing.assert_close(restored, rows, rtol=1e-5, atol=0)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_whole_weight_to_a_cosine_of_999_in_1000(
    has_bias: bool, dtype: torch.dtype
) -> None:
    linear = nn.Linear(SIZE, SIZE, bias=has_bias).to(dtype).eval()
    states = random_rows(40).to(dtype).view(2, 20, SIZE)
    expected = linear(states)
    found = ScaledLinear(linear)(states)
    assert (found.shape, found.dtype) == (expected.shape, dtype)
    assert float(cosine_similarity(found.float(), expected.float(), dim=-1).min()) >= 0.999


def test_the_operator_gives_what_the_restored_numbers_give() -> None:
    """torch's own, which has an implementation for processors: the same arguments as on a GPU, in the same layout."""
    states, weight = scale_rows(random_rows(32)), scale_rows(random_rows(48))
    expected = multiply_restored(*states, *weight, torch.float32)
    found = multiply_scaled(*states, *weight, torch.float32)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-2)  # it answers in bf16


def test_no_tokens_product_depends_on_its_company() -> None:
    scaled = ScaledLinear(nn.Linear(SIZE, SIZE).eval())
    states = random_rows(9)
    together = scaled(states)
    alone = torch.cat([scaled(states[row : row + 1]) for row in range(9)])
    torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-4)
    numbers, scales = scale_rows(states)
    for row in range(9):
        own, own_scale = scale_rows(states[row : row + 1])
        assert torch.equal(own.float()[0], numbers.float()[row])
        assert torch.equal(own_scale[0], scales[row])


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((SIZE, SIZE), True), ((SIZE + 16, SIZE), True), ((SIZE, SIZE - 16), False), ((SIZE + 8, SIZE), False)],
)
def test_layers_that_are_large_and_even_enough_are_taken(shape: tuple[int, int], expected: bool) -> None:
    assert is_scalable(nn.Linear(*shape)) == expected


def test_large_layers_are_replaced_joined_ones_too_and_none_is_held_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = network_of_layers(Block(), Block(), Block())
    fuse_projections(network)
    weights = [weakref.ref(module.weight) for module in network.transformer.modules() if is_scalable(module)]
    assert len(weights) == 3
    held: list[int] = []

    def count(rows: Tensor) -> tuple[Tensor, Tensor]:
        held.append(sum(reference() is not None for reference in weights))
        return scale_rows(rows)

    monkeypatch.setattr(switching, "scale_rows", count)
    scale_layers(network)
    assert held == [3, 2, 1]
    assert sum(type(module) is ScaledLinear for module in network.transformer.modules()) == 3
    assert sum(type(module) is nn.Linear for module in network.transformer.modules()) == 3, "the small ones"
    numbers = [module.numbers for module in network.transformer.modules() if type(module) is ScaledLinear]
    assert all(each.element_size() == 1 and each.shape == (3 * SIZE, SIZE) for each in numbers)


def test_what_differs_too_much_has_to_be_loaded_again_because_it_cannot_be_undone() -> None:
    network = network_of_layers(Block())
    states = random_rows(5)

    def probe() -> list[Tensor]:
        product = network.transformer.layers[0].q_proj(states)
        is_scaled = isinstance(network.transformer.layers[0].q_proj, ScaledLinear)
        return [product.flip(0) if is_scaled else product]

    measured = SwitchChoice("fp8", True, "measured", False)
    with pytest.raises(
        SwitchNotReverted, match=r"^The switch fp8 is off because the network deviates with it"
    ) as error:
        apply_switches(network, [measured], probe)
    assert not error.value.choice.is_on
    with pytest.raises(ModelError, match="The switch fp8 cannot be used"):
        apply_switches(
            network_of_layers(Block(64)), [SwitchChoice("fp8", True, "requested", True)], lambda: [states]
        )
