"""Devices with and without certain processor features, so that every machine tests both cases."""

from dataclasses import replace

from worker.devices.device import BF16_FEATURES, Device


def with_bf16(device: Device) -> Device:
    """Return the device with bf16 instructions among its features.

    On a processor without them libraries emulate bf16, many times slower.
    """
    return replace(device, features=device.features | {"avx512_bf16"})


def without_bf16(device: Device) -> Device:
    """Return the device without bf16 instructions among its features, so that it encodes in fp32.

    Libraries may still use the instructions where the processor has them.
    """
    return replace(device, features=device.features - BF16_FEATURES)
