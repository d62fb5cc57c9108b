"""Devices described in text such as "4x24GiB,nvlink" or "2x32cores,256GiB", for planning purchases."""

import re
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Final

from vectormill.domain.errors import ConfigurationError
from worker.devices.device import CUDA, MEMORY, NVLINK, PCIE, SOCKETS, Device, Inventory, Links, divide_gpu

NVLINK_PAIRS: Final = "nvlink-pairs"
DESCRIBED_LINKS: Final = (NVLINK, NVLINK_PAIRS, PCIE, SOCKETS)
GROUP: Final = re.compile(
    r"(?:(?P<count>\d+)x)?(?P<size>\d+(?:\.\d+)?)GiB(?:@(?P<capability>sm_\d+))?(?:\*(?P<parts>\d+))?"
)
PROCESSOR: Final = re.compile(r"(?:^|,)(?:(?P<nodes>\d+)x)?(?P<cores>\d+)cores,(?P<size>\d+(?:\.\d+)?)GiB$")
MOST_DEVICES: Final = 64
MOST_CORES: Final = 4096


# The processor of GPUs that are described alone.
UNDESCRIBED: Final = Inventory((), ((0,),), memory_bytes=0, features=frozenset(), description="described")


def is_description(text: str) -> bool:
    """Return True if the text describes devices ("2x24GiB") rather than naming existing ones ("cuda:0")."""
    return bool(re.search(r"\dGi?B|cores", text))  # 8x80GB is refused with how to write it


def describe_inventory(text: str) -> Inventory:
    """Return the inventory for "[COUNTx]SIZEGiB[@sm_NN][*PARTS][+…][,LINK]": CUDA devices linked by PCIe.

    With `*PARTS` so many workers share each of these GPUs.
    `nvlink` connects all of them, `nvlink-pairs` the first with the second and so on; with `sockets` the
    second half of the devices is on another CPU. "[NODESx]Ncores,SIZEGiB", alone or at the end, is the
    processor: NUMA nodes with that many cores each, and their total memory. Raises ConfigurationError with the
    grammar.
    """
    text = asked = text.replace(" ", "")
    machine = UNDESCRIBED
    if processor := PROCESSOR.search(text):
        machine = _describe_processor(
            int(processor["nodes"] or 1), int(processor["cores"]), float(processor["size"])
        )
        text = text[: processor.start()]
        if not text:
            return machine
    groups, _, link = text.partition(",")
    link = link or PCIE
    sizes: list[tuple[float, str, int]] = []
    for part in groups.split("+"):
        match = GROUP.fullmatch(part)
        if match is None or link not in DESCRIBED_LINKS:
            raise ConfigurationError(
                f"Invalid devices {asked!r}: expected GPUs with their memory in GiB, such as 4x24GiB,nvlink or "
                f"2x24GiB+1x80GiB@sm_90, with one of the links {', '.join(DESCRIBED_LINKS)}, a processor such as "
                "2x32cores,256GiB, or both."
            )
        each = float(match["size"]), match["capability"] or "sm_80", int(match["parts"] or 1)
        sizes += [each] * int(match["count"] or 1)
    if not 1 <= len(sizes) <= MOST_DEVICES or min(size * parts for size, _, parts in sizes) <= 0:
        raise ConfigurationError(
            f"Invalid devices {text!r}: expected 1 to {MOST_DEVICES} devices with more than 0 GiB of memory each."
        )
    num_cores = len(machine.physical_cores) if machine is not UNDESCRIBED else 0
    devices = tuple(
        Device(
            name=f"cuda:{index}",
            kind=CUDA,
            index=index,
            cores=(),
            num_threads=1,
            memory_bytes=int(size * (1 << 30)),
            features=frozenset({capability}),
            description=f"a GPU of {size:g} GiB",
            reason="described",
            num_tokenizer_threads=num_cores and max(1, num_cores // len(sizes)),
        )
        for index, (size, capability, _) in enumerate(sizes)
    )
    names, half = [device.name for device in devices], len(devices) // 2
    links = Links(link)
    if link == NVLINK_PAIRS:
        links = Links(PCIE, {frozenset(pair): NVLINK for pair in list(pairwise(names))[::2]})
    elif link == SOCKETS:
        halves = [*combinations(names[:half], 2), *combinations(names[half:], 2)]
        links = Links(SOCKETS, {frozenset(pair): PCIE for pair in halves})
    divided = [
        part
        for device, (*_, parts) in zip(devices, sizes, strict=True)
        for part in (divide_gpu(device, parts) if parts > 1 else [device])
    ]
    return replace(machine, accelerators=tuple(divided), links=links)


def _describe_processor(num_nodes: int, num_cores: int, size: float) -> Inventory:
    """Return a CPU with one thread per core, numbered node by node, without bf16."""
    if not 1 <= num_nodes * num_cores <= MOST_CORES or size <= 0:
        raise ConfigurationError(
            f"Invalid processor: expected 1 to {MOST_CORES} cores and more than 0 GiB of memory."
        )
    return Inventory(
        accelerators=(),
        physical_cores=tuple((core,) for core in range(num_nodes * num_cores)),
        memory_bytes=int(size * (1 << 30)),
        features=frozenset(),
        description=f"{num_nodes} x {num_cores} cores",
        links=Links(MEMORY),
        core_nodes=tuple(core // num_cores for core in range(num_nodes * num_cores)),
    )
