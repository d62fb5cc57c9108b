"""Asks the machine which devices it has. The only file that does; knows nothing of models."""

import csv
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Final

import psutil

from worker.devices.device import CPU, CUDA, MPS, Device, Inventory

NVIDIA_DRIVER: Final = Path("/proc/driver/nvidia/version")
CGROUP_CPU_LIMIT: Final = Path("/sys/fs/cgroup/cpu.max")
CPU_TOPOLOGY: Final = Path("/sys/devices/system/cpu")
QUERY_TIMEOUT_SECONDS: Final = 20.0
NVIDIA_QUERY: Final = (
    "nvidia-smi",
    "--query-gpu=index,name,memory.total,compute_cap",
    "--format=csv,noheader,nounits",
)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of main memory at one moment."""

    total_bytes: int
    available_bytes: int


def detect_inventory() -> Inventory:
    """The devices of this machine that this process may use."""
    groups = detect_physical_cores()
    cores = tuple(core for group in groups for core in group)
    features, description = detect_processor()
    return Inventory(
        accelerators=(*detect_cuda_devices(cores, len(groups)), *detect_mps_devices(cores, len(groups))),
        physical_cores=groups,
        memory_bytes=detect_memory().total_bytes,
        features=features,
        description=description,
    )


def detect_memory() -> Memory:
    memory = psutil.virtual_memory()
    return Memory(total_bytes=memory.total, available_bytes=memory.available)


def detect_physical_cores() -> tuple[tuple[int, ...], ...]:
    """The logical processors this process may run on, grouped by the physical core they share.

    A container's CPU quota is obeyed: with more threads than the quota, every thread is stopped part of the time.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
    else:  # macOS
        allowed = list(range(os.cpu_count() or 1))
    groups: dict[str, list[int]] = {}
    for core in allowed:
        siblings = CPU_TOPOLOGY / f"cpu{core}" / "topology" / "thread_siblings_list"
        groups.setdefault(siblings.read_text().strip() if siblings.is_file() else str(core), []).append(core)
    limit = _read_cpu_quota()
    ordered = sorted(tuple(group) for group in groups.values())
    return tuple(ordered[: max(1, ceil(limit))]) if limit else tuple(ordered)


def _read_cpu_quota() -> float | None:
    """Cores' worth of time that the control group grants; None without a limit."""
    if not CGROUP_CPU_LIMIT.is_file():
        return None
    quota, period = CGROUP_CPU_LIMIT.read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def detect_processor() -> tuple[frozenset[str], str]:
    """The processor's feature flags that matter to us, and its name."""
    wanted = {
        "avx2",
        "avx512f",
        "avx512_vnni",
        "avx512_bf16",
        "avx512_fp16",
        "amx_bf16",
        "amx_int8",
        "amx_fp16",
    }
    flags: frozenset[str] = frozenset()
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().split("\n\n", 1)[0].splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "flags":
                flags = frozenset(value.split()) & wanted
            elif key.strip() == "model name":
                name = value.strip()
    return flags, name


def detect_cuda_devices(cores: tuple[int, ...], num_threads: int) -> list[Device]:
    """NVIDIA devices, asked of the driver's own tool: to ask torch would create a CUDA context in this process."""
    if not NVIDIA_DRIVER.exists() and shutil.which(NVIDIA_QUERY[0]) is None:
        return []
    try:
        answer = subprocess.run(
            NVIDIA_QUERY, capture_output=True, text=True, timeout=QUERY_TIMEOUT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [
        Device(
            name=f"cuda:{index.strip()}",
            kind=CUDA,
            index=int(index),
            cores=(),  # the feeding process is light; pinning it would only get in the way of its neighbours
            num_threads=max(1, min(4, num_threads)),
            memory_bytes=int(mebibytes) << 20,
            features=frozenset({f"sm_{capability.strip().replace('.', '')}"}),
            description=name.strip(),
        )
        for index, name, mebibytes, capability in csv.reader(answer.stdout.splitlines())
    ]


def detect_mps_devices(cores: tuple[int, ...], num_threads: int) -> list[Device]:
    """The GPU of an Apple processor, which shares the main memory."""
    if platform.system() != "Darwin" or platform.machine() != "arm64":
        return []
    memory_bytes = detect_memory().total_bytes
    return [
        Device(
            "mps:0",
            MPS,
            0,
            (),
            max(1, min(4, num_threads)),
            memory_bytes,
            frozenset(),
            platform.processor() or CPU,
        )
    ]
