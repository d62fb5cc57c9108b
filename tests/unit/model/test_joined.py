"""Products of the same input are computed as one, and no others."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from worker.model.joined import JoinedProducts, join_products
from worker.model.weights import RoundedLinear, apply_quantization

HIDDEN, KEYS = 128, 32


class Layer(nn.Module):
    """Grouped heads: fewer keys and values than queries. The names are those of no known architecture."""

    def __init__(self, *, has_bias: bool = True) -> None:
        super().__init__()
        self.one, self.two, self.three = (
            nn.Linear(HIDDEN, size, bias=has_bias) for size in (HIDDEN, KEYS, KEYS)
        )

    def forward(self, states: Tensor) -> Tensor:
        return torch.cat([self.one(states), self.two(states), self.three(states)], dim=-1)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, states: Tensor) -> Tensor:
        return self.gate(states).relu() * self.up(states)


class Alternating(nn.Module):
    """A product that is sometimes computed from the same input as another one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, states: Tensor) -> Tensor:
        together = self.gate(states) + self.up(states)
        return together + self.up(together)


def states_of(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(11, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)


def join(*layers: nn.Module, dtype: torch.dtype = torch.float32, fewest: int = 3) -> None:
    """Join what the layers compute, one after another, from the same states."""
    with torch.inference_mode():
        join_products(nn.ModuleList(layers), lambda: [layer(states_of(dtype)) for layer in layers], fewest)


def list_kinds(layer: nn.Module) -> list[type[nn.Module]]:
    return [type(module) for module in layer.modules()]


@pytest.mark.parametrize("has_bias", [True, False])
def test_each_part_is_what_its_own_product_gave(has_bias: bool) -> None:
    layer = Layer(has_bias=has_bias)
    expected = layer(states_of())
    join(layer)
    assert list_kinds(layer).count(nn.Linear) == 1
    torch.testing.assert_close(layer(states_of()), expected, rtol=0, atol=1e-6)


def test_the_two_products_of_a_gate_are_joined_where_two_are_enough() -> None:
    layer = Gated()
    expected = layer(states_of())
    join(layer)
    assert list_kinds(layer).count(nn.Linear) == 2
    join(layer, fewest=2)
    assert list_kinds(layer).count(nn.Linear) == 1
    torch.testing.assert_close(layer(states_of()), expected, rtol=0, atol=1e-6)


def test_weights_in_bf16_and_weights_of_8_bits_are_joined_as_they_are() -> None:
    half = Layer().to(torch.bfloat16)
    expected = half(states_of(torch.bfloat16))
    join(half, dtype=torch.bfloat16)
    assert next(half.parameters()).dtype == torch.bfloat16
    torch.testing.assert_close(half(states_of(torch.bfloat16)), expected, rtol=1e-2, atol=1e-2)

    rounded: Any = Layer()
    apply_quantization(rounded)
    expected = rounded(states_of())
    numbers = torch.cat([getattr(rounded, name).numbers for name in ("one", "two", "three")])
    join(rounded)
    (joined,) = (module for module in rounded.modules() if isinstance(module, RoundedLinear))
    assert torch.equal(joined.numbers, numbers), "the same numbers, and not rounded again"
    torch.testing.assert_close(rounded(states_of()), expected, rtol=0, atol=1e-6)


def test_no_more_than_one_layers_weights_are_held_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [Layer() for _ in range(5)]
    before = [
        weakref.ref(parameter) for layer in layers for parameter in layer.parameters() if parameter.ndim == 2
    ]
    held: list[int] = []
    join_two = torch.cat

    def count(tensors: list[Tensor], **options: Any) -> Tensor:
        if tensors[0].shape[-1] == HIDDEN and not options:
            held.append(sum(reference() is not None for reference in before))
        return join_two(tensors, **options)

    monkeypatch.setattr(torch, "cat", count)
    join(*layers)
    assert max(held) <= 15
    assert held == sorted(held, reverse=True)
    assert held[-1] <= 3, "when the last layer is joined, those before are freed"
    assert all(reference() is None for reference in before)


def test_nothing_of_a_pass_is_held_behind_it() -> None:
    layer = Layer()
    join(layer)
    layer(states_of())
    (joined,) = (module for module in layer.modules() if isinstance(module, JoinedProducts))
    assert (joined._states, joined._parts) == (None, {})


def test_parts_of_different_states_are_refused_rather_than_mixed_up() -> None:
    layer = Layer()
    join(layer)
    layer.one(states_of())
    with pytest.raises(RuntimeError, match="computed from different states"):
        layer.two(states_of())


def test_each_part_is_taken_once_and_in_any_order() -> None:
    layer, states = Layer(), states_of()
    expected = layer.three(states), layer.two(states)
    join(layer)
    layer.one(states)
    for found, own in zip((layer.three(states), layer.two(states)), expected, strict=True):
        torch.testing.assert_close(found, own)
    with pytest.raises(RuntimeError, match="or one of them twice"):
        layer.three(states)


def test_products_that_differ_in_kind_or_are_not_always_computed_together_stay_apart() -> None:
    layer = Layer()
    layer.two = nn.Linear(HIDDEN, KEYS, bias=False)
    join(layer, fewest=2)
    assert list_kinds(layer).count(nn.Linear) == 3
    alternating = Alternating()
    join(alternating, fewest=2)
    assert list_kinds(alternating).count(nn.Linear) == 2
