"""The resources that one device offers a plan: bytes that may be filled, and arithmetic rate."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from worker.devices.device import CPU, CUDA, MPS, Device

GIB: Final = 1 << 30

# Memory that a process takes on a device before the first weight: CUDA's context with the kernels of torch
# and the workspace of cuBLAS (what the driver keeps for itself counts as used); on a CPU the interpreter with
# torch imported.
OVERHEAD_BYTES: Final[Mapping[str, int]] = {CUDA: 768 << 20, MPS: GIB // 2, CPU: 400 << 20}
# Half of the dense bf16 tensor-core rates in data sheets, which large matrix products of a real model reach.
# Only for ranking.
FLOPS_BY_CAPABILITY: Final[Mapping[str, float]] = {
    "sm_70": 60e12,
    "sm_75": 30e12,
    "sm_80": 150e12,
    "sm_86": 60e12,
    "sm_89": 80e12,
    "sm_90": 400e12,
    "sm_100": 1000e12,
    "sm_120": 150e12,
    "gfx908": 45e12,
    "gfx90a": 95e12,
    "gfx942": 600e12,
    "gfx950": 1100e12,
    "gfx1100": 60e12,
}
FLOPS_UNKNOWN_GPU: Final = 60e12
FLOPS_MPS: Final = 10e12
FLOPS_PER_CORE: Final = 130e9  # measured: AVX512 without bf16 instructions, fp32 (benchmarks/README.md)
FLOPS_PER_BF16_CORE: Final = 500e9

# The share of a device's memory that all programs may fill: plans stay below it, and batches shrink above it.
# Both use one number, because otherwise a planned batch would be shrunk.
MEMORY_SHARE: Final = 0.9
# Metal shares its memory with the CPU, and lets a process have two thirds to three quarters.
MPS_SHARE: Final = 2 / 3


@dataclass(frozen=True, slots=True)
class DeviceCapacity:
    """The usable memory and the estimated speed of a device, as the placement planner counts them.

    Devices that hold and compute as much compare as equal, whatever their names.
    """

    name: str = field(compare=False)
    kind: str
    capacity_bytes: int
    flops: float
    used_bytes: int = field(default=0, compare=False)  # by other programs
    card: str = field(default="", compare=False)  # for a part of a GPU: the whole GPU
    memory_bytes: int = 0
    host_bytes: int = 0  # of main memory that layers may take
    num_parts: int = 1  # among which the device's time is divided
    has_bf16: bool = True
    shares_host_memory: bool = False


def measure_capacity(device: Device, memory_share: float, host_bytes: int = 0) -> DeviceCapacity:
    """Return what a device offers, of whose memory others and the plan together may fill `memory_share`."""
    share = memory_share * (MPS_SHARE if device.kind == MPS else 1)
    # The bytes that were in use when the device was detected, if that is known.
    used = 0 if device.free_bytes is None else max(0, device.memory_bytes - device.free_bytes)
    capacity = int(device.memory_bytes * share) - used - OVERHEAD_BYTES[device.kind]
    return DeviceCapacity(
        device.name,
        device.kind,
        max(0, capacity),
        guess_flops(device) / device.num_parts,
        used,
        device.card,
        device.memory_bytes,
        host_bytes,
        device.num_parts,
        device.has_bf16,
        device.shares_host_memory,
    )


def memory_for(kind: str, capacity_bytes: int, memory_share: float) -> int:
    """Return the memory of an unused device that offers `capacity_bytes`: the inverse of `measure_capacity`."""
    share = memory_share * (MPS_SHARE if kind == MPS else 1)
    return int((capacity_bytes + OVERHEAD_BYTES[kind]) / share)


def guess_flops(device: Device) -> float:
    """Estimate a device's arithmetic rate from its description. Only ratios between devices matter."""
    if device.kind == CPU:
        return device.num_threads * (FLOPS_PER_BF16_CORE if device.has_bf16 else FLOPS_PER_CORE)
    if device.kind == MPS:
        return FLOPS_MPS
    known = [FLOPS_BY_CAPABILITY[feature] for feature in device.features if feature in FLOPS_BY_CAPABILITY]
    return known[0] if known else FLOPS_UNKNOWN_GPU
