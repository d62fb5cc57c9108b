"""Chooses backend and precision for a device, with reasons. Pure: asks neither the machine nor a framework."""

from typing import Final

from vectormill.domain.errors import ModelError
from worker.devices.device import CPU, CUDA, Device
from worker.model.encoder import Choice

AUTO: Final = "auto"
TORCH: Final = "torch"
OPENVINO: Final = "openvino"
FP32: Final = "fp32"
FP16: Final = "fp16"
BF16: Final = "bf16"


def choose_backend(wanted: str, device: Device, has_openvino: bool) -> Choice:
    """torch or openvino. Raises ModelError for a wish that cannot be met."""
    if wanted == TORCH:
        return Choice(TORCH, "asked for")
    if wanted == OPENVINO:
        if device.kind != CPU:
            raise ModelError(f"The backend openvino runs on CPUs only; use torch for {device.name}.")
        if not has_openvino:
            raise ModelError("The backend openvino is not installed; `pip install openvino`, or use torch.")
        return Choice(OPENVINO, "asked for")
    if device.kind != CPU:
        return Choice(TORCH, f"the only backend for {device.kind}")
    if has_openvino:
        return Choice(OPENVINO, "the faster backend on CPUs")
    return Choice(TORCH, "openvino, the faster backend on CPUs, is not installed")


def choose_precision(wanted: str, device: Device) -> Choice:
    """fp32, bf16 or fp16. Raises ModelError for what is known to be slow, with the better choice."""
    if wanted == AUTO:
        if device.kind == CUDA:
            return Choice(BF16, "the device computes bf16 natively")
        if device.kind == CPU and device.has_bf16:
            return Choice(BF16, "the processor has bf16 matrix instructions")
        return Choice(FP32, "the device has no bf16 matrix instructions")
    if wanted == BF16 and device.kind == CPU and not device.has_bf16:
        raise ModelError(
            "This processor has neither AVX512-BF16 nor AMX and would emulate bf16, many times slower; use fp32."
        )
    if wanted == FP16 and device.kind == CPU:
        better = BF16 if device.has_bf16 else FP32
        raise ModelError(f"fp16 is not offered on CPUs, most of which would emulate it; use {better}.")
    return Choice(wanted, "asked for")
