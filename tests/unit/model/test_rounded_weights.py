"""A weight that is rounded in parts has the numbers that it has when it is rounded whole."""

import pytest
import torch
from torch import Tensor, nn

from vectormill.domain.errors import ModelError
from worker.model.weights import RoundedEmbedding, RoundedLinear, apply_quantization

WEIGHT = torch.randn((6, 128), generator=torch.Generator().manual_seed(0))


def rounded(weight: Tensor, num_inputs: int | None = None) -> Tensor:
    layer = RoundedLinear(weight.shape, torch.float32, None, num_inputs)
    assert layer.numbers.is_meta, "nothing is held before"
    layer.hold(weight)
    return layer.weight


def test_rows_and_whole_groups_of_a_weight_are_rounded_as_in_the_whole() -> None:
    whole = rounded(WEIGHT)
    assert whole.shape == WEIGHT.shape
    assert 0 < (whole - WEIGHT).abs().max() < 0.3
    assert torch.equal(rounded(WEIGHT[2:5]), whole[2:5])
    assert torch.equal(rounded(WEIGHT[:, 64:], num_inputs=128), whole[:, 64:])


def test_a_part_that_cuts_a_group_is_refused_with_a_way_out() -> None:
    with pytest.raises(ModelError, match=r"of which 64 share a scale; use fewer devices, or another"):
        rounded(WEIGHT[:, :32], num_inputs=128)


def test_a_model_keeps_its_small_tables_and_its_biases_as_they_are() -> None:
    model = nn.ModuleDict(
        {"words": nn.Embedding(5000, 8), "positions": nn.Embedding(80, 8), "dense": nn.Linear(8, 4)}
    ).requires_grad_(False)
    bias = model["dense"].bias.clone()
    apply_quantization(model)
    assert isinstance(model["words"], RoundedEmbedding)
    assert type(model["positions"]) is nn.Embedding
    assert model["words"](torch.tensor([[1, 2]])).shape == (1, 2, 8)
    assert torch.equal(model["dense"].bias, bias)
    assert not any(parameter.is_meta for parameter in model.parameters())
