"""Detect the devices of this machine, GPUs through NVML and KFD. The only module that queries hardware."""

import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Final

import psutil

from worker.devices.control_groups import OWN, ROOT, list_memory_limits, read_cpu_quota
from worker.devices.device import CPU, CUDA, MEMORY, MPS, PCIE, VISIBLE_DEVICES, Device, Inventory, Links
from worker.devices.kfd import (
    TOPOLOGY,
    find_amd_links,
    is_built_for_rocm,
    list_amd_gpus,
    select_visible_amd,
)
from worker.devices.nvml import Nvml, list_gpus, open_nvml, read_links, read_use, select_visible

CPU_TOPOLOGY: Final = Path("/sys/devices/system/cpu")

USED_STEP_BYTES: Final = 256 << 20

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - only its free space is read
# NCCL's buffers take some 10 MiB for each pair of GPUs and channel.
LEAST_SHARED_BYTES: Final = 1 << 30

# The CPU flags by which libraries choose kernels and we choose the precision.
PROCESSOR_FEATURES: Final = frozenset(
    {
        "avx2",
        "avx_vnni",
        "avx512f",
        "avx512_vnni",
        "avx512_bf16",
        "avx512_fp16",
        "amx_bf16",
        "amx_int8",
        "amx_fp16",
    }
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Memory:
    """The total and free bytes of main memory at one moment."""

    total_bytes: int
    available_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.available_bytes

    @property
    def used_share(self) -> float:
        return self.used_bytes / self.total_bytes


def detect_inventory(environment: dict[str, str] | None = None) -> Inventory:
    """Return the devices that this process may use.

    `environment` defaults to a copy of this process's own; a batch system such as Slurm says there which GPUs are ours.
    Those that are there are named by UUID afterwards: if one is lost, indices change.
    """
    if environment is None:
        # Imported here, because settings import pydantic: 15 MiB that the model process, which only needs
        # memory, is spared.
        from vectormill.settings import process_environment

        environment = process_environment()
    groups = detect_physical_cores()
    nodes = tuple(_find_node(group[0]) for group in groups)
    cores = tuple(core for group in groups for core in group)
    features, description = detect_processor()
    memory = detect_memory()
    gpus, links = list[Device](), Links(PCIE)
    if nvml := open_nvml():
        gpus = detect_cuda_devices(environment, len(groups), nvml)
        links = detect_links(gpus, nvml)
        nvml.nvmlShutdown()  # a GPU that a process holds open cannot be reset; the next detection looks anew
    if not gpus:
        gpus, links = detect_rocm_devices(environment, len(groups))
    return Inventory(
        accelerators=(*gpus, *detect_mps_devices(cores, len(groups))),
        physical_cores=groups,
        memory_bytes=memory.total_bytes,
        features=features,
        description=description,
        links=links,
        free_bytes=memory.available_bytes,
        core_nodes=nodes,
    )


def detect_driver() -> str:
    """Return the version of NVIDIA's driver; empty without one."""
    nvml = open_nvml()
    if nvml is None:
        return ""
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    finally:
        nvml.nvmlShutdown()


def detect_links(gpus: Sequence[Device], nvml: Nvml) -> Links:
    """Return the kinds of links between the GPUs, by their names."""
    if len(gpus) < 2:
        return Links(PCIE)
    names = {gpu.uuid: gpu.name for gpu in gpus}
    kinds = read_links(nvml, list(names))
    return Links(PCIE, {frozenset(names[uuid] for uuid in pair): kind for pair, kind in kinds.items()})


def detect_memory(root: Path = ROOT, own: Path = OWN) -> Memory:
    """Return the main memory, capped by the limits of the control groups, beyond which processes are killed."""
    machine, limits = psutil.virtual_memory(), list_memory_limits(root, own)
    return Memory(
        total_bytes=min([machine.total, *(limit for limit, _ in limits)]),
        available_bytes=max(0, min([machine.available, *(limit - used for limit, used in limits)])),
    )


def describe_shared_memory(devices: Sequence[Device], path: Path = SHARED_MEMORY) -> str:
    """Return what GPUs that share a model lack if there is little memory for processes to share; mostly empty."""
    if len(devices) < 2 or devices[0].kind != CUDA or not path.is_dir():
        return ""
    free_bytes = psutil.disk_usage(str(path)).free
    if free_bytes >= LEAST_SHARED_BYTES:
        return ""
    return (
        f"{path} has {free_bytes >> 20} MiB, and GPUs without peer access exchange tensors there, so NCCL may fail or "
        "hang. Start the container by `docker run --shm-size 2g`, or in Compose with shm_size: 2gb."
    )


def _read_number(path: Path) -> int | None:
    """Return the number in a file; None if the file is missing or says "max"."""
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None


def detect_physical_cores() -> tuple[tuple[int, ...], ...]:
    """Return the logical processors that this process may use, grouped by physical core.

    A container's CPU quota is respected: with more threads than the quota every thread would be throttled.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
    else:  # macOS
        allowed = list(range(os.cpu_count() or 1))
    groups: dict[str, list[int]] = {}
    for core in allowed:
        siblings = CPU_TOPOLOGY / f"cpu{core}" / "topology" / "thread_siblings_list"
        groups.setdefault(siblings.read_text().strip() if siblings.is_file() else str(core), []).append(core)
    limit = read_cpu_quota()
    # Cores of one NUMA node come together, so that a share of them is near its memory; some machines
    # interleave the numbers.
    ordered = sorted(
        (tuple(group) for group in groups.values()),
        key=lambda group: (
            _read_number(CPU_TOPOLOGY / f"cpu{group[0]}" / "topology" / "physical_package_id") or 0,
            _find_node(group[0]),
            group,
        ),
    )
    return tuple(ordered[: max(1, ceil(limit))]) if limit else tuple(ordered)


def _find_node(core: int) -> int:
    """Return a logical processor's NUMA node, from a link in its folder; 0 if the kernel reports none."""
    nodes = sorted((CPU_TOPOLOGY / f"cpu{core}").glob("node[0-9]*"))
    return int(nodes[0].name.removeprefix("node")) if nodes else 0


def detect_processor() -> tuple[frozenset[str], str]:
    """Return the CPU feature flags that matter here, and the CPU's name."""
    flags: frozenset[str] = frozenset()
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().split("\n\n", 1)[0].splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "flags":
                flags = frozenset(value.split()) & PROCESSOR_FEATURES
            elif key.strip() == "model name":
                name = value.strip()
    return flags, name


def detect_cuda_devices(environment: dict[str, str], num_threads: int, nvml: Nvml) -> list[Device]:
    """Return the NVIDIA devices from the driver; asking torch would create a CUDA context in this process.

    They are numbered as CUDA numbers them for this process: cuda:0 is the first that CUDA_VISIBLE_DEVICES leaves.
    Processes are pinned to them by UUID, so that the order of numbering does not matter.
    """
    try:
        gpus, visible = select_visible(environment.get(VISIBLE_DEVICES), list_gpus(nvml))
    except nvml.NVMLError as error:
        logger.warning("Cannot list the NVIDIA GPUs, so none is used: %s.", error)
        return []
    if visible is not None:
        environment[VISIBLE_DEVICES] = visible
    host = detect_memory()
    return [
        Device(
            name=f"cuda:{index}",
            kind=CUDA,
            index=index,
            cores=(),  # the feeding process is light; pinning it would only hinder its neighbours
            num_threads=max(1, min(4, num_threads)),
            memory_bytes=gpu.memory_bytes or host.total_bytes,
            features=frozenset({"sm_{}{}".format(*gpu.capability)}),
            description=gpu.name,
            num_tokenizer_threads=max(1, num_threads // len(gpus)),  # the GPUs share the cores evenly
            uuid=gpu.uuid,
            free_bytes=host.available_bytes
            if gpu.memory_bytes is None or gpu.free_bytes is None
            else round_free_bytes(gpu.memory_bytes, gpu.free_bytes),
            card=gpu.card,
            shares_host_memory=gpu.memory_bytes is None,
        )
        for index, gpu in enumerate(gpus)
    ]


def round_free_bytes(memory_bytes: int, free_bytes: int) -> int:
    """Return the free bytes with the used memory rounded, so that equal cards compare as equal."""
    return memory_bytes - -(-(memory_bytes - free_bytes) // USED_STEP_BYTES) * USED_STEP_BYTES


def detect_rocm_devices(
    environment: Mapping[str, str], num_threads: int, topology: Path = TOPOLOGY
) -> tuple[list[Device], Links]:
    """Return AMD's devices and their links from the kernel. In torch they are cuda:0, cuda:1, …"""
    gpus = list_amd_gpus(topology)
    if gpus and not is_built_for_rocm():
        logger.warning(
            "Found %d AMD GPUs, but torch is not built for ROCm, so none is used. Set TORCH_INDEX_URL to the index for "
            "ROCm and run `make setup`.",
            len(gpus),
        )
        return [], Links(MEMORY)
    visible = select_visible_amd(environment, gpus)
    devices = [
        Device(
            name=f"cuda:{index}",
            kind=CUDA,
            index=index,
            cores=(),
            num_threads=max(1, min(4, num_threads)),
            memory_bytes=gpu.memory_bytes,
            features=frozenset({gpu.architecture}),
            description=f"AMD {gpu.architecture}",
            num_tokenizer_threads=max(1, num_threads // len(visible)),
            uuid=str(number),
        )
        for index, (number, gpu) in enumerate(visible)
    ]
    links = find_amd_links({device.name: gpu for device, (_, gpu) in zip(devices, visible, strict=True)})
    return devices, Links(PCIE, links) if devices else Links(MEMORY)


def detect_mps_devices(cores: tuple[int, ...], num_threads: int) -> list[Device]:
    """Return the GPU of an Apple chip, which shares main memory with the CPU."""
    if platform.system() != "Darwin" or platform.machine() != "arm64":
        return []
    memory = detect_memory()
    return [
        Device(
            "mps:0",
            MPS,
            0,
            (),
            max(1, min(4, num_threads)),
            memory.total_bytes,
            frozenset(),
            platform.processor() or CPU,
            free_bytes=memory.available_bytes,
            shares_host_memory=True,
        )
    ]


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The use of a device at one moment. None means unknown."""

    memory_used_bytes: int | None
    memory_total_bytes: int
    utilisation: float | None


def join_uses(uses: Sequence[DeviceUse]) -> DeviceUse:
    """Return the memory of the fullest of these devices, and the mean of their known utilisations."""
    fullest = max(uses, key=lambda use: (use.memory_used_bytes or 0) / max(1, use.memory_total_bytes))
    known = [use.utilisation for use in uses if use.utilisation is not None]
    return replace(fullest, utilisation=fmean(known) if known else None)


class DeviceSampler:
    """A sampler of the use of one of a worker's devices. Used by one thread.

    For a GPU it reports the use by all programs, from the driver. For other devices, whose memory is shared,
    it reports the use by the encoding process; utilisation is then the process's share of the device's
    threads since the last sample.
    """

    def __init__(self, device: Device, find_pid: Callable[[], int | None], nvml: Nvml | None = None) -> None:
        self._device = device
        self._find_pid = find_pid
        self._nvml = nvml or (open_nvml() if device.kind == CUDA else None)
        self._process: psutil.Process | None = None

    def sample(self) -> DeviceUse:
        if self._nvml is not None:
            if (use := read_use(self._nvml, self._device.uuid)) is not None:
                used_bytes, total_bytes, utilisation = use
                if total_bytes is None:
                    host = detect_memory()
                    used_bytes, total_bytes = host.used_bytes, host.total_bytes
                return DeviceUse(used_bytes, total_bytes, utilisation)
        elif self._device.kind != CUDA:
            return self._sample_process()
        return DeviceUse(None, self._device.memory_bytes, None)

    def _sample_process(self) -> DeviceUse:
        total_bytes, pid = self._device.memory_bytes, self._find_pid()
        try:
            is_new = self._process is None or self._process.pid != pid
            if is_new:
                self._process = psutil.Process(pid) if pid is not None else None
            if self._process is None:
                return DeviceUse(None, total_bytes, None)
            percent = self._process.cpu_percent()  # since the previous call; the first call has no reference
            utilisation = None if is_new else min(percent / 100 / self._device.num_threads, 1.0)
            return DeviceUse(self._process.memory_info().rss, total_bytes, utilisation)
        except psutil.Error:  # the process has just ended
            self._process = None
            return DeviceUse(None, total_bytes, None)
