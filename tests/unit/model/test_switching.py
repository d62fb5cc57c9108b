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

from tests.contract.packed_models import make_transformer
from vectormill.domain.errors import ModelError
from worker.encoder.switches import SwitchChoice
from worker.model import packed, switching
from worker.model.joined import join_products
from worker.model.packed import LARGE_TOKENS, LARGE_TOKENS_ELSEWHERE
from worker.model.switching import (
    FLASH_VERSIONS,
    SMALLEST_SIZE,
    ComputeProbes,
    ScaledLinear,
    Step,
    SwitchNotReverted,
    Undo,
    apply_switches,
    is_scalable,
    multiply_restored,
    multiply_scaled,
    scale_layers,
    scale_rows,
)
from worker.model.switching import STEPS as STEPS_OF_SERVICE

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
    network: Any = SimpleNamespace(states=STATES, reference=None)
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
    network: Any = SimpleNamespace(states=STATES, reference=None)
    off = (SwitchChoice("broken", False, "no package", False),)
    assert apply_switches(network, off, lambda: pytest.fail("nothing is compared"), STEPS) == off


def test_a_switch_that_breaks_the_device_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        is_cuda, device = True, "cuda:0"

    monkeypatch.setattr(switching, "is_device_lost", lambda: True)
    network: Any = SimpleNamespace(states=STATES, reference=None)
    choices = [SwitchChoice("broken", True, "measured", False)]
    with pytest.raises(ModelError, match=r"broke cuda:0 .*; set VECTORMILL_WORKER_SWITCHES=none"):
        apply_switches(network, choices, lambda: [OnGpu()], STEPS)


class Handle:
    """What torch keeps of an implementation of flash attention that was activated."""

    is_removed = False

    def remove(self) -> None:
        self.is_removed = True


@pytest.mark.parametrize("agrees", [True, False])
@pytest.mark.parametrize(("name", "version"), FLASH_VERSIONS.items())
def test_another_flash_attention_is_activated_and_given_back_when_it_differs(
    name: str, version: str, agrees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own registry, with an implementation that needs no card. It is as if torch 2.11 had later arguments."""
    monkeypatch.setattr(switching, "CAN_LIMIT_SPLITS", True)
    handle = Handle()
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, version, lambda: handle)
    states = iter([STATES, STATES if agrees else STATES.flip(0)])
    choices = [SwitchChoice(name, True, "measured", False)]
    network: Any = SimpleNamespace(reference=None)
    try:
        (choice,) = apply_switches(network, choices, lambda: [next(states)])
        assert choice.is_on == agrees
        assert current_flash_attention_impl() == (version if agrees else None)
        assert handle.is_removed != agrees
    finally:
        restore_flash_attention_impl(_raise_warn=False)


@pytest.mark.parametrize("name", FLASH_VERSIONS)
def test_another_flash_attention_stays_off_where_a_text_would_depend_on_its_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switching, "CAN_LIMIT_SPLITS", False)
    network: Any = SimpleNamespace(reference=None)
    (choice,) = apply_switches(network, [SwitchChoice(name, True, "measured", False)], lambda: [STATES])
    assert (choice.is_on, "cannot forbid it to split sequences" in choice.reason) == (False, True)


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
        self.gate, self.up = (nn.Linear(size, size) for _ in range(2))
        self.small = nn.Linear(size, 64)

    def forward(self, states: Tensor) -> Tensor:
        attended = self.q_proj(states) + self.k_proj(states) + self.v_proj(states)
        gated = self.gate(attended).sigmoid() * self.up(attended)
        self.small(gated)
        return gated


def network_of_layers(*blocks: nn.Module) -> Any:
    transformer = nn.Module()
    transformer.layers = nn.ModuleList(blocks)
    return SimpleNamespace(transformer=transformer, reference=None)


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


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_operator_gives_what_the_restored_numbers_give(has_bias: bool) -> None:
    """torch's own, which has an implementation for processors: the same arguments as on a GPU, in the same layout."""
    states, weight = scale_rows(random_rows(32)), scale_rows(random_rows(48))
    bias = 100 * torch.randn(48, generator=RANDOM).bfloat16() if has_bias else None
    expected = multiply_restored(*states, *weight, bias)
    # On a processor there is nothing to compare with on 2.11; tests/gpu compares on a card.
    if torch.__version__ < "2.12":
        pytest.skip("torch 2.11 multiplies rows with scales of their own on GPUs alone")
    found = multiply_scaled(*states, *weight, bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=1e-2)


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


def test_large_layers_are_replaced_joined_by_their_input_and_none_is_held_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = network_of_layers(Block(), Block(), Block())
    states = random_rows(5)

    def probe() -> list[Tensor]:
        return [layer(states) for layer in network.transformer.layers]

    expected = probe()
    join_products(network.transformer, probe)
    weights: list[weakref.ref[Tensor]] = []
    held: list[int] = []

    def count(rows: Tensor) -> tuple[Tensor, Tensor]:
        if not weights:
            scalable = filter(is_scalable, network.transformer.modules())
            weights.extend(weakref.ref(module.weight) for module in scalable)
        held.append(sum(reference() is not None for reference in weights))
        return scale_rows(rows)

    with monkeypatch.context() as patched:
        patched.setattr(switching, "scale_rows", count)
        scale_layers(network, probe)
    assert held == [6, 5, 4, 3, 2, 1]
    assert sum(type(module) is nn.Linear for module in network.transformer.modules()) == 3, "the small ones"
    scaled = [module for module in network.transformer.modules() if type(module) is ScaledLinear]
    assert sorted(len(each.numbers) for each in scaled) == [2 * SIZE] * 3 + [3 * SIZE] * 3
    assert all(each.numbers.element_size() == 1 for each in scaled)
    monkeypatch.setattr(switching, "scale_rows", count)
    held.clear()
    found = probe()
    assert len(held) == 6, "an input is scaled once, for all its products"
    for one, other in zip(found, expected, strict=True):
        assert float(cosine_similarity(one, other, dim=-1).min()) >= 0.99


def test_what_differs_too_much_has_to_be_loaded_again_because_it_cannot_be_undone() -> None:
    network = network_of_layers(Block())
    states = random_rows(5)

    def probe() -> list[Tensor]:
        product = network.transformer.layers[0](states)
        is_scaled = any(isinstance(module, ScaledLinear) for module in network.transformer.modules())
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


def test_the_compiler_sees_a_batch_as_large_as_in_service_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor chooses the configurations of its kernels by the sizes that it sees first."""
    seen: list[object] = []
    monkeypatch.setattr(switching, "compile_layers", lambda network, run: run())
    monkeypatch.setattr(
        packed, "packed_states", lambda network, batch, device: seen.append(len(batch.input_ids))
    )
    transformer = make_transformer("bert")
    network: Any = SimpleNamespace(transformer=transformer, attention="exact")

    def probe() -> list[Tensor]:
        seen.append("probes")
        return []

    STEPS_OF_SERVICE["compile"].turn_on(network, probe)
    assert seen == [LARGE_TOKENS_ELSEWHERE, "probes"]
    assert LARGE_TOKENS == {"cuda": 16_384}
