"""Kinds of processor: what follows from a processor's features is tested on every machine, with and without them."""

from dataclasses import replace

from worker.devices.device import BF16_FEATURES, Device


def with_bf16(device: Device) -> Device:
    """Encodes in bf16 as it would with the instructions; without them libraries emulate it, many times slower."""
    return replace(device, features=device.features | {"avx512_bf16"})


def without_bf16(device: Device) -> Device:
    """Encodes in fp32 as it would without the instructions, which its libraries still use where they like."""
    return replace(device, features=device.features - BF16_FEATURES)
