"""Read AMD's GPUs from the kernel's files (KFD), without a HIP context in this process.

Used only by worker.devices.detect. torch calls these GPUs cuda too, if it is built for ROCm. Source: kernel
documentation of amdgpu and amdkfd, sysfs topology; ROCm documentation, GPU isolation.
"""

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Final

from worker.devices.device import NVLINK, PCIE, SOCKETS

TOPOLOGY: Final = Path("/sys/class/kfd/kfd/topology/nodes")
ROCM_VISIBLE_DEVICES: Final = "ROCR_VISIBLE_DEVICES"
HIP_VISIBLE_DEVICES: Final = "HIP_VISIBLE_DEVICES"
# The heap types of the GPU's own memory, with and without CPU access; other types are caches and scratch.
MEMORY_HEAPS: Final = frozenset({1, 2})
INFINITY_FABRIC: Final = 11  # CRAT_IOLINK_TYPE_XGMI


@dataclass(frozen=True, slots=True)
class AmdGpu:
    """An AMD GPU. `node` is its number in the kernel, `processor` that of the CPU whose memory is nearest."""

    node: int
    uuid: str
    architecture: str  # such as gfx90a
    memory_bytes: int
    processor: int | None
    fabric: frozenset[int]  # the nodes that it reaches over Infinity Fabric


def is_built_for_rocm() -> bool:
    """Return True if torch was built for ROCm.

    Reads its files: an import takes seconds and creates a context.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).parent / "version.py"
    text = version.read_text(encoding="utf-8") if version.is_file() else ""
    return re.search(r"^hip\b.*=\s*['\"]", text, re.MULTILINE) is not None


def list_amd_gpus(topology: Path = TOPOLOGY) -> list[AmdGpu]:
    """Return all GPUs that this process may see, in the kernel's order, which is also ROCm's."""
    if not topology.is_dir():
        return []
    nodes: dict[int, Mapping[str, int]] = {}
    for path in topology.iterdir():
        try:
            nodes[int(path.name)] = _read_properties(path / "properties")
        except OSError:  # a container cannot read other containers' GPUs
            continue
    processors = {node for node, properties in nodes.items() if properties.get("cpu_cores_count", 0)}
    return [
        _describe(topology / str(node), node, nodes[node], processors)
        for node in sorted(nodes)
        if nodes[node].get("simd_count", 0)
    ]


def _describe(path: Path, node: int, properties: Mapping[str, int], processors: set[int]) -> AmdGpu:
    version = properties.get("gfx_target_version", 0)
    banks = [_read_properties(bank) for bank in path.glob("mem_banks/*/properties")]
    links = [_read_properties(link) for link in path.glob("io_links/*/properties")]
    near = [link["node_to"] for link in links if link.get("node_to") in processors]
    return AmdGpu(
        node=node,
        uuid=f"GPU-{properties.get('unique_id', 0):016x}",
        # 90010 is major 9, minor 0, stepping 10, which is written as a hexadecimal digit.
        architecture=f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}",
        memory_bytes=sum(bank["size_in_bytes"] for bank in banks if bank.get("heap_type") in MEMORY_HEAPS),
        processor=min(near, default=None),
        fabric=frozenset(
            link["node_to"]
            for link in links
            if link.get("type") == INFINITY_FABRIC and link["node_to"] not in processors
        ),
    )


def _read_properties(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdecimal()}


def select_visible_amd(environment: Mapping[str, str], gpus: Sequence[AmdGpu]) -> list[tuple[int, AmdGpu]]:
    """Return the GPUs that the environment leaves, in its order, with their numbers in HIP_VISIBLE_DEVICES.

    ROCR_VISIBLE_DEVICES is applied first and renumbers the GPUs; then HIP_VISIBLE_DEVICES applies, or else
    CUDA_VISIBLE_DEVICES.
    """
    left = list(_select(environment.get(ROCM_VISIBLE_DEVICES), gpus))
    wanted = environment.get(HIP_VISIBLE_DEVICES, environment.get("CUDA_VISIBLE_DEVICES"))
    return [(left.index(gpu), gpu) for gpu in _select(wanted, left)]


def _select(visible: str | None, gpus: Sequence[AmdGpu]) -> Iterator[AmdGpu]:
    """Yield the GPUs that a list names. As in CUDA, the list ends at the first entry that names no GPU."""
    if visible is None:
        yield from gpus
        return
    for entry in dict.fromkeys(part.strip() for part in visible.split(",")):
        if entry.isdecimal() and int(entry) < len(gpus):
            yield gpus[int(entry)]
            continue
        found = [gpu for gpu in gpus if gpu.uuid.lower() == entry.lower()]
        if not found:
            return
        yield found[0]


def find_amd_links(gpus: Mapping[str, AmdGpu]) -> dict[frozenset[str], str]:
    """Return the kind of link between every two GPUs, by name.

    Infinity Fabric counts as NVLink: it is as fast.
    """
    links = {}
    for names in combinations(gpus, 2):
        one, other = (gpus[name] for name in names)
        is_far = None not in (one.processor, other.processor) and one.processor != other.processor
        links[frozenset(names)] = NVLINK if other.node in one.fabric else SOCKETS if is_far else PCIE
    return links
