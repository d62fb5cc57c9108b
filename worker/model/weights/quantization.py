"""Quantization: rounded weights in a torch module. Knows neither files nor pooling.

A product first restores its weight, in the type of the arithmetic. For a batch of thousands of tokens that is little:
8,192 tokens through 7 billion weights are 115 TFLOP of products and about 80 GB to read and write for restoring, at the
rates of an H200 190 ms and 16 ms (counted, not measured).
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from worker.model.weights.rounding import (
    SMALLEST_TABLE_ROWS,
    RoundedWeight,
    pack_int4,
    round_linear,
    round_table,
)


class RoundedLinear(nn.Module):
    """nn.Linear with a weight of 8 or 4 bits."""

    def __init__(self, layer: nn.Linear, precision: str) -> None:
        super().__init__()
        rounded = round_linear(layer.weight.detach().float().numpy(), precision)
        self.shape, self.dtype = layer.weight.shape, layer.weight.dtype
        self.grouped_shape = rounded.numbers.shape
        self.bias = layer.bias
        self.register_buffer("numbers", _pack(rounded))
        self.register_buffer("scales", torch.from_numpy(rounded.scales))
        self.register_buffer("zeros", None if rounded.zeros is None else torch.from_numpy(rounded.zeros))

    @property
    def weight(self) -> Tensor:
        """[out, in], restored. Multiplied in fp32: a scale in bf16 would err as much as the rounding itself."""
        numbers = (
            self.numbers if self.zeros is None else _unpack(self.numbers, self.grouped_shape) - self.zeros
        )
        return (numbers * self.scales).to(self.dtype).reshape(self.shape)

    def forward(self, states: Tensor) -> Tensor:
        return linear(states, self.weight, self.bias)


class RoundedEmbedding(nn.Module):
    """nn.Embedding with a table of 8 bits; only the rows that are read are restored."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        rounded = round_table(table.weight.detach().float().numpy())
        self.dtype = table.weight.dtype
        self.register_buffer("numbers", torch.from_numpy(rounded.numbers[:, 0]))
        self.register_buffer("scales", torch.from_numpy(rounded.scales[:, 0]))

    def forward(self, input_ids: Tensor) -> Tensor:
        return (self.numbers[input_ids] * self.scales[input_ids]).to(self.dtype)


def apply_quantization(transformer: nn.Module, precision: str) -> None:
    """Replaces linear layers and vocabularies, one after another, so that no second copy of the model is held."""
    for parent in list(transformer.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, RoundedLinear(child, precision))
            elif type(child) is nn.Embedding and child.num_embeddings >= SMALLEST_TABLE_ROWS:
                setattr(parent, name, RoundedEmbedding(child))
    for parameter in transformer.parameters():
        # What is left may be a view into the file of all weights, and would keep the whole of it in memory.
        parameter.data = parameter.data.clone()


def _pack(rounded: RoundedWeight) -> Tensor:
    is_int8 = rounded.zeros is None
    return torch.from_numpy(rounded.numbers if is_int8 else pack_int4(rounded.numbers))


def _unpack(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Two numbers a byte, back to int8 [rows, groups, group size]: a difference of uint8 would wrap around."""
    numbers = torch.stack((packed & 15, packed >> 4), dim=-1).view(torch.int8)
    return numbers.flatten()[: torch.Size(shape).numel()].reshape(shape)
