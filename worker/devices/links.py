"""Links: how fast two devices of one machine talk to each other. Asks no hardware; knows no models."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

NVLINK: Final = "nvlink"
PCIE: Final = "pcie"
SOCKETS: Final = "sockets"  # PCIe, and between the processors: the devices hang on two NUMA nodes
MEMORY: Final = "memory"  # core sets of one processor: what one writes, the other reads

# Bytes a second in one direction, as collectives reach them, not as data sheets add them up: NVLink 4 of 18 links is
# 450 GB/s on paper, PCIe 4 x16 is 32. Orders of magnitude decide here, not digits.
BYTES_PER_SECOND: Final[Mapping[str, float]] = {NVLINK: 200e9, PCIE: 20e9, SOCKETS: 10e9, MEMORY: 5e9}
# Starting one collective: kernels and a handshake on GPUs, a loopback socket between processes on CPUs.
LATENCY_SECONDS: Final[Mapping[str, float]] = {NVLINK: 10e-6, PCIE: 20e-6, SOCKETS: 30e-6, MEMORY: 200e-6}

LINK_KINDS: Final = tuple(BYTES_PER_SECOND)


@dataclass(frozen=True, slots=True)
class Links:
    """The kind of link between any two devices; `pairs` holds those that differ from `default`."""

    default: str = PCIE
    pairs: Mapping[frozenset[str], str] = field(default_factory=dict)

    def between(self, one: str, other: str) -> str:
        return self.pairs.get(frozenset((one, other)), self.default)

    def slowest(self, names: Iterable[str]) -> str:
        """Return the kind of the slowest link among the devices: a collective is as fast as that one."""
        kinds = [self.between(one, other) for one, other in combinations(names, 2)]
        return min(kinds, key=BYTES_PER_SECOND.__getitem__, default=self.default)
