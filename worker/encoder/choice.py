"""Chooses the precision of a device, with a reason. Pure: asks neither the machine nor a framework."""

from typing import Final

from vectormill.domain.errors import ModelError
from worker.devices.device import CPU, CUDA, Device
from worker.encoder.backends import AUTO
from worker.encoder.encoder import Choice

FP32: Final = "fp32"
FP16: Final = "fp16"
BF16: Final = "bf16"
INT8: Final = "int8"
PRECISIONS: Final = (FP32, BF16, FP16, INT8)
COMPRESSED: Final = frozenset({INT8})  # weights alone; products are computed in find_arithmetic's


def choose_precision(wanted: str, device: Device) -> Choice:
    """Choose fp32, bf16, fp16 or int8. Raises ModelError for one that is known to be slow, with a better choice."""
    if wanted == AUTO:
        if device.kind == CUDA and device.has_bf16:
            return Choice(BF16, "the device computes bf16 natively")
        if device.kind == CUDA:
            return Choice(FP16, "the device computes fp16 natively, and no bf16")
        if device.kind == CPU and device.has_bf16:
            return Choice(BF16, "the processor has bf16 matrix instructions")
        return Choice(FP32, "the device has no bf16 matrix instructions")
    if wanted == BF16 and device.kind == CPU and not device.has_bf16:
        raise ModelError(
            "This processor has neither AVX512-BF16 nor AMX and would emulate bf16, many times slower; use fp32."
        )
    if wanted == BF16 and device.kind == CUDA and not device.has_bf16:
        raise ModelError(f"{device.description or device.name} would emulate bf16; use fp16.")
    if wanted == FP16 and device.kind == CPU:
        better = BF16 if device.has_bf16 else FP32
        raise ModelError(f"fp16 is not offered on CPUs, most of which would emulate it; use {better}.")
    if wanted in COMPRESSED:
        return Choice(wanted, f"asked for; the arithmetic is {find_arithmetic(wanted, device)}")
    return Choice(wanted, "asked for")


def find_arithmetic(precision: str, device: Device) -> str:
    """Return the number type of the products for a precision: compressed weights are restored to it."""
    if precision not in COMPRESSED:
        return precision
    if device.has_bf16:
        return BF16
    return FP16 if device.kind == CUDA else FP32
