"""Query, key and value by one product: whole and rounded weights, grouped heads, and what is never held twice."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from worker.model import switching as fused_projections
from worker.model.switching import FusedProjections, fuse_projections, split_projections
from worker.model.weights import RoundedLinear, apply_quantization

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


@pytest.mark.parametrize("names", fused_projections.SIBLINGS)
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
    with pytest.raises(RuntimeError, match="asked with different states"):
        layer.k_proj(states_of())


def test_projections_that_differ_in_kind_stay_apart() -> None:
    layer = Layer()
    layer.k_proj = nn.Linear(HIDDEN, KEYS, bias=False)
    with pytest.raises(ValueError, match="no layer has separate projections"):
        fuse_projections(network_of(layer))


def test_what_was_joined_is_split_into_views() -> None:
    layer = Layer()
    expected = layer(states_of())
    fuse_projections(network_of(layer))
    places = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    split_projections(network_of(layer))
    assert [type(getattr(layer, name)) for name in layer.names] == [nn.Linear] * 3
    assert {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()} == places
    torch.testing.assert_close(layer(states_of()), expected)
