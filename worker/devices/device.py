"""Devices that can hold a model, how they are selected and named, and the links between them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from typing import Final

from vectormill.domain.errors import ConfigurationError

NVLINK: Final = "nvlink"
PCIE: Final = "pcie"
SOCKETS: Final = "sockets"  # PCIe and the link between CPUs: the devices are on two NUMA nodes
MEMORY: Final = "memory"  # core sets of one CPU: what one writes, the other reads

# Bytes per second in one direction as collectives reach them, not as data sheets add them up: NVLink 4 with
# 18 links is 450 GB/s on paper, PCIe 4 x16 is 32. Only the order of magnitude matters here.
BYTES_PER_SECOND: Final[Mapping[str, float]] = {NVLINK: 200e9, PCIE: 20e9, SOCKETS: 10e9, MEMORY: 5e9}
# The time to start one collective: kernels and a handshake on GPUs, a loopback socket between processes on
# CPUs.
LATENCY_SECONDS: Final[Mapping[str, float]] = {NVLINK: 10e-6, PCIE: 20e-6, SOCKETS: 30e-6, MEMORY: 200e-6}

LINK_KINDS: Final = tuple(BYTES_PER_SECOND)


@dataclass(frozen=True, slots=True)
class Links:
    """The kinds of links between devices; `pairs` holds those that differ from `default`."""

    default: str = PCIE
    pairs: Mapping[frozenset[str], str] = field(default_factory=dict)

    def between(self, one: str, other: str) -> str:
        return self.pairs.get(frozenset((one, other)), self.default)

    def slowest(self, names: Iterable[str]) -> str:
        """Return the kind of the slowest link among the devices, which limits a collective."""
        kinds = [self.between(one, other) for one, other in combinations(names, 2)]
        return min(kinds, key=BYTES_PER_SECOND.__getitem__, default=self.default)


CPU: Final = "cpu"
CUDA: Final = "cuda"
MPS: Final = "mps"
VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"

# CPU flags for matrix arithmetic in bf16; without any of them bf16 is emulated, many times slower.
BF16_FEATURES: Final = frozenset({"avx512_bf16", "amx_bf16"})

# NVIDIA's Pascal, Volta and Turing; AMD's GPUs before CDNA and RDNA 3.
BF16_EMULATED: Final = frozenset(
    {"sm_60", "sm_61", "sm_70", "sm_72", "sm_75"}
    | {"gfx803", "gfx900", "gfx906", "gfx1010", "gfx1012", "gfx1030", "gfx1031", "gfx1032"}
)


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or a set of CPU cores. `name` is what a user writes: cuda:0, cpu:1.

    `cores` are the logical processors that the encoding process is pinned to; empty leaves it unpinned.
    `num_threads` is the number of physical cores among them. `num_tokenizer_threads`, if not 0, is the number
    of tokenizer threads for a device whose model uses no cores. `memory_bytes` is the device's whole memory,
    `free_bytes` what was unused when it was detected; None if unknown.
    """

    name: str
    kind: str
    index: int
    cores: tuple[int, ...]
    num_threads: int
    memory_bytes: int
    features: frozenset[str] = frozenset()
    description: str = ""
    reason: str = "requested"  # why it was selected, for the worker's report
    num_tokenizer_threads: int = 0
    uuid: str = ""  # identifies a GPU whichever are visible: the driver's UUID, or AMD's unique id
    free_bytes: int | None = None
    card: str = ""  # for a part of a GPU (MIG): the whole GPU's UUID, shared by its parts
    num_parts: int = 1  # of how many workers that share one GPU this device is one
    shares_host_memory: bool = False  # memory_bytes and free_bytes are then those of the host

    @property
    def has_bf16(self) -> bool:
        if self.kind == CUDA:
            return not self.features & BF16_EMULATED
        return bool(self.features & BF16_FEATURES)

    @property
    def compute_capability(self) -> int | None:
        """Return the compute capability, 90 for 9.0; None if the device has none or does not report it."""
        found = [int(feature[3:]) for feature in self.features if feature.startswith("sm_")]
        return found[0] if found else None


@dataclass(frozen=True, slots=True)
class Inventory:
    """The devices that exist: accelerators, and CPU threads grouped by physical core."""

    accelerators: tuple[Device, ...]
    physical_cores: tuple[tuple[int, ...], ...]
    memory_bytes: int
    features: frozenset[str]
    description: str
    links: Links = field(default_factory=Links)
    free_bytes: int | None = None  # free main memory
    core_nodes: tuple[int, ...] = ()  # the NUMA node of each physical core; empty if there is only one

    @property
    def host(self) -> Device:
        """Return the processor as one device, with all of main memory."""
        return Device("cpu", CPU, 0, (), 1, self.memory_bytes, free_bytes=self.free_bytes)

    def with_cores(self, first: int, end: int) -> "Inventory":
        """Return this inventory limited to a range of the physical cores."""
        return replace(
            self, physical_cores=self.physical_cores[first:end], core_nodes=self.core_nodes[first:end]
        )


def parse_devices(text: str, inventory: Inventory) -> list[Device]:
    """Return the devices named by "auto", "cpu", "cuda", "mps" or a list such as "cuda:0,cuda:1".

    auto takes every accelerator, or else the CPU: one device per NUMA node. CPU devices that are named, such
    as "cpu:0,cpu:1", share the cores evenly, so that two workers on one machine do not compete. Raises
    ConfigurationError with the devices that exist.
    """
    accelerators = {device.name: device for device in inventory.accelerators}
    if text == "auto":
        if inventory.accelerators:
            return [replace(device, reason="every GPU is used") for device in inventory.accelerators]
        return [replace(device, reason="no GPU was found") for device in split_by_node(inventory)]
    if text == CPU:
        return split_by_node(inventory)
    if text in (CUDA, MPS):
        found = [device for device in inventory.accelerators if device.kind == text]
        if found:
            return found
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) != len(names):
        raise ConfigurationError(f"Invalid devices {text!r}: a device is listed twice.")
    num_cpus = sum(name.startswith("cpu:") for name in names)
    processors = {device.name: device for device in split_processor(inventory, num_cpus)} if num_cpus else {}
    known = accelerators | processors
    for name in names:
        if name not in known:
            there = ", ".join([*accelerators, "cpu"])
            hint = (
                f" ({num_cpus} CPU devices are cpu:0 to cpu:{num_cpus - 1})"
                if name.startswith("cpu:")
                else ""
            )
            raise ConfigurationError(
                f"Unknown device {name!r}; this machine has: {there}{hint}. For others, `vectormill plan` takes a "
                "description such as 2x24GiB."
            )
    return [known[name] for name in names]


def divide_gpus(text: str, inventory: Inventory) -> tuple[str, Inventory]:
    """Divide each GPU whose name is followed by a number of workers, as in "cuda:0*4", into so many devices.

    Return the names of all devices, and the inventory that has these. Each part has an equal share of the memory and of
    the host's threads, and its workers compute in turn with those of the others. Raises ConfigurationError.
    """
    if "*" not in text:
        return text, inventory
    names: list[str] = []
    divided: dict[str, list[Device]] = {}
    for written in text.split(","):
        name, star, count = written.strip().partition("*")
        if not star:
            names.append(name)
            continue
        if not count.isdecimal() or int(count) == 0:
            raise ConfigurationError(
                f"Invalid devices {text!r}: after * there must be a number of workers, as in cuda:0*4."
            )
        for device in parse_devices(name, inventory):
            if device.kind == CPU:
                raise ConfigurationError(
                    f"Invalid devices {text!r}: only a GPU can be shared so. Write cpu:0,cpu:1 for workers that share "
                    "the cores of a processor."
                )
            divided[device.name] = divide_gpu(device, int(count))
            names += [part.name for part in divided[device.name]]
    accelerators = [part for device in inventory.accelerators for part in divided.get(device.name, [device])]
    return ",".join(names), replace(inventory, accelerators=tuple(accelerators))


def divide_gpu(device: Device, count: int) -> list[Device]:
    """Return the parts of a GPU that so many workers share, each with its memory and threads."""
    return [
        replace(
            device,
            name=f"{device.name}.{number}",
            memory_bytes=device.memory_bytes // count,
            free_bytes=None if device.free_bytes is None else device.free_bytes // count,
            num_threads=max(1, device.num_threads // count),
            num_tokenizer_threads=device.num_tokenizer_threads
            and max(1, device.num_tokenizer_threads // count),
            card=device.card or device.uuid or device.name,
            num_parts=count,
            reason=f"one of {count} workers that share {device.name}",
        )
        for number in range(count)
    ]


def split_processor(inventory: Inventory, num_devices: int) -> list[Device]:
    """Split the CPU into devices with equally many physical cores; a remainder goes to the first ones."""
    groups = inventory.physical_cores
    if num_devices > len(groups):
        raise ConfigurationError(
            f"{num_devices} CPU devices need at least as many cores, but only {len(groups)} are available."
        )
    bounds = [len(groups) - len(groups) * (num_devices - i) // num_devices for i in range(num_devices + 1)]
    return _make_processors(inventory, bounds)


def split_by_node(inventory: Inventory) -> list[Device]:
    """Return one device per NUMA node, so that no process reads its weights from another CPU's memory."""
    nodes = inventory.core_nodes
    changes = [place for place, (one, other) in enumerate(pairwise(nodes), start=1) if one != other]
    return _make_processors(inventory, [0, *changes, len(inventory.physical_cores)])


def _make_processors(inventory: Inventory, bounds: Sequence[int]) -> list[Device]:
    """Return a device for each range of cores between consecutive bounds, with its share of the memory."""
    groups, num_devices = inventory.physical_cores, len(bounds) - 1
    return [
        Device(
            name=f"cpu:{index}",
            kind=CPU,
            index=index,
            cores=tuple(sorted(core for group in groups[start:end] for core in group)),
            num_threads=end - start,
            memory_bytes=inventory.memory_bytes // num_devices,
            free_bytes=None if inventory.free_bytes is None else inventory.free_bytes // num_devices,
            features=inventory.features,
            description=inventory.description,
        )
        for index, (start, end) in enumerate(pairwise(bounds))
    ]


def thread_environment(num_threads: int, num_tokenizer_threads: int = 0) -> dict[str, str]:
    """Return variables with thread counts for OpenMP (torch), MKL, OpenBLAS (NumPy) and Rayon (tokenizers).

    Each of these would otherwise start one thread per core of the machine. Set them before any of these is
    imported.

    On a CPU the tokenizer gets as many threads as the model, on the same cores. Fewer would not disturb the
    model less: a forward pass continues when its last thread is done, so losing one core for long costs more
    than losing all of them briefly. A GPU's model needs no cores, and a fast GPU uses all that they can
    tokenize.
    """
    threads = str(num_threads)
    environment = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
    environment["RAYON_NUM_THREADS"] = str(num_tokenizer_threads or num_threads)
    # Set explicitly, so that tokenizers does not warn about forked processes.
    environment["TOKENIZERS_PARALLELISM"] = "true"
    return environment


def device_environment(device: Device, num_threads: int | None = None) -> dict[str, str]:
    """Return variables that pin a process to the device with its threads. Set them before importing torch."""
    environment = thread_environment(num_threads or device.num_threads)
    # Without the bus order, CUDA numbers GPUs by speed and nvidia-smi by slot.
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    environment[VISIBLE_DEVICES] = (device.uuid or str(device.index)) if device.kind == CUDA else ""
    # For AMD's GPUs; if both are set, HIP reads only this one.
    environment["HIP_VISIBLE_DEVICES"] = environment[VISIBLE_DEVICES]
    return environment
