"""Query NVIDIA's driver (NVML) for GPUs, without a CUDA context in this process.

Used only by worker.devices.detect. The functions are those of pynvml (nvidia-ml-py), NVIDIA's own binding;
tests pass another object with the same functions.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any, Final, Protocol

from worker.devices.device import NVLINK, PCIE, SOCKETS

logger = logging.getLogger(__name__)


class Nvml(Protocol):
    """The part of pynvml that is used. Handles are opaque; every function may raise NVMLError."""

    NVMLError: type[Exception]
    NVMLError_NotSupported: type[Exception]

    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...
    def nvmlDeviceGetName(self, handle: Any) -> str: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...
    def nvmlDeviceGetMigMode(self, handle: Any) -> Sequence[int]: ...
    def nvmlDeviceGetP2PStatus(self, one: Any, other: Any, what: int) -> int: ...
    def nvmlDeviceGetTopologyCommonAncestor(self, one: Any, other: Any) -> int: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any: ...


# From nvml.h: the kind of peer access to query, its "yes", and the topology level of a path through another
# CPU.
P2P_NVLINK: Final = 2
P2P_OK: Final = 0
TOPOLOGY_SYSTEM: Final = 50


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or one part of a partitioned GPU (MIG). `index` is the GPU's place on the bus.

    Its memory is None if it has none of its own but shares the host's, as GB10 and Jetson do.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int | None
    free_bytes: int | None
    capability: tuple[int, int]
    card: str = ""  # for a part: the UUID of the whole GPU


def open_nvml() -> Nvml | None:
    """Initialize NVML. Return None without an NVIDIA driver, which is normal and not logged."""
    try:
        import pynvml  # imported late: `vectormill doctor` runs without the worker's packages
    except ImportError:
        logger.warning(
            "Cannot look for NVIDIA GPUs: install nvidia-ml-py, which comes with vectormill[worker]."
        )
        return None
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    except pynvml.NVMLError as error:
        logger.warning("An NVIDIA driver is installed, but it cannot be queried for its GPUs: %s.", error)
        return None
    nvml: Nvml = pynvml
    return nvml


def list_gpus(nvml: Nvml) -> list[Gpu]:
    """Return all GPUs in bus order. A partitioned GPU is listed as its parts."""
    gpus: list[Gpu] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpus += _describe(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index))
        except nvml.NVMLError as error:  # a GPU that fell off the bus does not affect the others
            _warn_once(f"Ignoring GPU {index}, because the driver cannot describe it: {error}.")
    return gpus


@cache
def _warn_once(message: str) -> None:
    """Log a warning that is no news at the next detection, a minute later."""
    logger.warning("%s", message)


def _describe(nvml: Nvml, index: int, whole: Any) -> Iterator[Gpu]:
    """Yield a GPU, or the parts of a partitioned one."""
    capability = nvml.nvmlDeviceGetCudaComputeCapability(whole)
    handles, card = [whole], ""
    with suppress(nvml.NVMLError):  # most GPUs cannot be partitioned
        if nvml.nvmlDeviceGetMigMode(whole)[0]:
            handles, card = [], nvml.nvmlDeviceGetUUID(whole)
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(whole) if card else 0):
        with suppress(nvml.NVMLError):  # no part at this index, or none that this container may use
            handles.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, place))
    for handle in handles:
        total, free, _ = _read_memory(nvml, handle)
        name = nvml.nvmlDeviceGetName(handle)
        yield Gpu(index, nvml.nvmlDeviceGetUUID(handle), name, total, free, capability, card)


def _read_memory(nvml: Nvml, handle: Any) -> tuple[int | None, int | None, int | None]:
    """Return the total, free and used bytes; None for a GPU that shares the host's memory."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError_NotSupported:
        return None, None, None
    return memory.total, memory.free, memory.used


def select_visible(visible: str | None, gpus: Sequence[Gpu]) -> tuple[list[Gpu], str | None]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order, and the variable with their UUIDs as its entries.

    None (variable unset) leaves all. Entries are indices or prefixes of UUIDs; the index of a partitioned GPU means its
    first part. An entry that names no GPU stays, as it may name one that comes later; in CUDA it ends the list, as ""
    and -1 do here too. Source: CUDA C++ Programming Guide, environment variables.
    """
    if visible is None:
        return list(gpus), None
    settled: dict[str, Gpu | None] = {}
    for entry in (part.strip() for part in visible.split(",")):
        if entry in ("", "-1"):  # the two ways to ask for no GPU
            break
        if entry.isdecimal():
            found = next((gpu for gpu in gpus if gpu.index == int(entry)), None)
        else:
            is_uuid = entry.startswith(("GPU-", "MIG-"))
            found = next((gpu for gpu in gpus if is_uuid and gpu.uuid.startswith(entry)), None)
        settled[found.uuid if found else entry] = found
        if not found:
            _warn_once(f"CUDA_VISIBLE_DEVICES names {entry!r}, which is not a GPU of this machine.")
    return [gpu for gpu in settled.values() if gpu], ",".join(settled)


def read_use(nvml: Nvml, uuid: str) -> tuple[int | None, int | None, float | None] | None:
    """Return the used and total bytes of a GPU, and its utilisation in the last second, 0 to 1.

    None if the driver cannot say, for example while the GPU is being reset; None for the memory of a GPU that has none
    of its own, and mostly for the utilisation of a part of a GPU.
    """
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        total, _, used = _read_memory(nvml, handle)
    except nvml.NVMLError:
        return None
    try:
        utilisation: float | None = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except nvml.NVMLError:
        utilisation = None
    return used, total, utilisation


def read_links(nvml: Nvml, uuids: Sequence[str]) -> dict[frozenset[str], str]:
    """Return the kind of link between every two GPUs, by UUID; PCIe if the driver does not say."""
    return {frozenset(pair): _read_link(nvml, *pair) for pair in combinations(uuids, 2)}


def _read_link(nvml: Nvml, one: str, other: str) -> str:
    try:
        handles = nvml.nvmlDeviceGetHandleByUUID(one), nvml.nvmlDeviceGetHandleByUUID(other)
    except nvml.NVMLError:
        return PCIE
    try:
        if nvml.nvmlDeviceGetP2PStatus(*handles, P2P_NVLINK) == P2P_OK:
            return NVLINK
    except nvml.NVMLError:  # raised for parts of a GPU, and by drivers of consumer cards
        pass
    try:
        is_far = nvml.nvmlDeviceGetTopologyCommonAncestor(*handles) >= TOPOLOGY_SYSTEM
    except nvml.NVMLError:
        return PCIE
    return SOCKETS if is_far else PCIE
