"""Scaled products: large linear layers in numbers of 8 bits (float8_e4m3fn), twice as many a second as of 16.

Each output of a weight has a scale, found once; each token has one, found when it comes. A number is stored as its
quotient by the scale, so that the largest of its row is the largest that e4m3 has, 448; the product is summed in fp32
and multiplied by both scales. Between two powers of two e4m3 has 8 steps, so that a number is off by one part in 16 at
the most, and a sum of many by far less: over random rows the cosine is 0.9993.

Source: "FP8 Formats for Deep Learning" (arXiv 2209.05433); torch._scaled_mm with a scale a row, which needs compute
capability 8.9, outputs in bf16, and sizes that 16 divides.
"""

from typing import Final

import torch
from torch import Tensor, nn

from worker.model.packed.network import PackedNetwork
from worker.model.switched.layers import find_layers

LARGEST: Final = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE: Final = 1e-12  # a row of zeros has any scale but zero
SIZE_STEP: Final = 16
# The least sizes of a weight [out, in]: less is bound by reading tokens, which finding their scales does once more.
SMALLEST_SIZE: Final = 1024


class ScaledLinear(nn.Module):
    """nn.Linear with a weight of 8 bits, and a product in 8 bits."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        numbers, scales = scale_rows(linear.weight.detach())
        self.dtype = linear.weight.dtype
        self.numbers = nn.Parameter(numbers, requires_grad=False)  # [out, in]
        self.scales = nn.Parameter(scales, requires_grad=False)  # [out, 1]
        self.bias = linear.bias

    def forward(self, states: Tensor) -> Tensor:
        rows = states.flatten(0, -2)  # [tokens, in]
        multiply = multiply_scaled if rows.is_cuda else multiply_restored
        product = multiply(*scale_rows(rows), self.numbers, self.scales, self.dtype)
        if self.bias is not None:
            product = product + self.bias
        return product.unflatten(0, states.shape[:-1])


def scale_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers [n, in] in float8_e4m3fn and scales [n, 1] in fp32, whose product is nearly the rows [n, in]."""
    wide = rows.float()
    scales = (wide.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    # A value beyond the largest number becomes NaN and not the largest.
    return (wide / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def multiply_scaled(
    numbers: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return [tokens, in] times [out, in], on a GPU that computes it -> [tokens, out]."""
    product: Tensor = torch._scaled_mm(
        numbers, weight.t(), scale_a=scales, scale_b=weight_scales.t(), out_dtype=torch.bfloat16
    )
    return product.to(dtype)


def multiply_restored(
    numbers: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply the same numbers in plain torch on any device, for comparison."""
    return (numbers.float() @ weight.float().t() * scales * weight_scales.t()).to(dtype)


def scale_layers(network: PackedNetwork) -> None:
    """Replace large linear layers one after another, freeing each weight before the next.

    It cannot be undone: what a weight was before is not kept. Raises ValueError where no layer is large enough.
    """
    found = [
        (parent, name, child)
        for layer in find_layers(network.transformer)
        for parent in layer.modules()
        for name, child in parent.named_children()
        if is_scalable(child)
    ]
    if not found:
        raise ValueError(f"no layer has a weight of {SMALLEST_SIZE} by {SMALLEST_SIZE} or more")
    while found:
        parent, name, child = found.pop()
        setattr(parent, name, ScaledLinear(child))
        del child


def is_scalable(module: nn.Module) -> bool:
    """Return True if it is a plain linear layer of a size that pays, and that the product takes."""
    return (
        type(module) is nn.Linear
        and min(module.weight.shape) >= SMALLEST_SIZE
        and not any(size % SIZE_STEP for size in module.weight.shape)
    )
