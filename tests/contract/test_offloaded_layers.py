"""Layers in main memory pass through two slots, and a pass that fails leaves none where another belongs."""

import pytest
import torch
from torch import Tensor, nn

from worker.parallel.offload import OffloadedLayers, choose_offloaded


class Stack(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_layers))

    def forward(self, states: Tensor, fails_at: int | None = None) -> Tensor:
        for place, layer in enumerate(self.layers):
            if place == fails_at:
                raise MemoryError
            states = layer(states)
        return states


@pytest.mark.parametrize(("num_layers", "num_offloaded"), [(4, 4), (7, 4), (7, 6), (8, 4), (5, 0)])
def test_layers_compute_the_same_from_main_memory_also_after_a_pass_that_failed(
    num_layers: int, num_offloaded: int
) -> None:
    torch.manual_seed(0)
    whole, stack = Stack(num_layers), Stack(num_layers).to("meta")
    states = torch.randn(3, 8)
    offloaded = OffloadedLayers(stack.layers, num_offloaded)
    for layer, known in zip(stack.layers, whole.layers, strict=True):
        if layer.weight.is_meta:
            layer.to_empty(device="cpu")
        layer.load_state_dict(known.state_dict())
    offloaded.attach(torch.device("cpu"))
    places = {layer.weight.data_ptr() for layer in stack.layers}
    assert len(places) == num_layers - num_offloaded + 2 * bool(num_offloaded)
    with torch.no_grad():
        for fails_at in (None, *range(num_layers), None):
            if fails_at is not None:
                with pytest.raises(MemoryError):
                    stack(states, fails_at)
            assert torch.equal(stack(states), whole(states))


def test_layers_in_main_memory_are_spread_among_the_others() -> None:
    assert choose_offloaded(8, 4) == [1, 3, 5, 7]
    assert choose_offloaded(5, 4) == [1, 2, 3, 4]
    assert choose_offloaded(3, 0) == []
