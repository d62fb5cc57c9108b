"""The rate of matrix products that torch reaches here: the limit that an encoder's arithmetic is compared with.

Runs as a child (`python -m benchmarks.probes.matrix_rate PRECISION …`), so that torch is pinned and its memory is given
back. Knows nothing of models.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final

from vectormill.cli.settings import read_environment
from worker.devices.device import Device, device_environment

# Large enough to hide every start, small enough that three matrices of fp32 are 48 MiB.
SIZE: Final = 2048
MIN_SECONDS: Final = 2.0
MIN_REPETITIONS: Final = 5
TIMEOUT_SECONDS: Final = 300.0
GIGA: Final = 1e9


def measure_matrix_rates(device: Device) -> dict[str, float]:
    """Precision -> GFLOP/s, with the device's own threads; bf16 only where the processor has instructions for it."""
    precisions = ["fp32", "bf16"] if device.has_bf16 else ["fp32"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.probes.matrix_rate", *precisions],
        env=read_environment() | device_environment(device),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=True,
    )
    rates: dict[str, float] = json.loads(done.stdout)
    return rates


def main(precisions: Sequence[str]) -> Mapping[str, float]:
    """Measures in this process."""
    import torch

    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return {precision: _measure(kinds[precision]) for precision in precisions}


def _measure(kind: object) -> float:
    """GFLOP/s of the fastest of several products: a limit, so the best that was seen."""
    from torch import matmul, ones

    left, right = ones(SIZE, SIZE, dtype=kind), ones(SIZE, SIZE, dtype=kind)
    out = matmul(left, right)
    fastest, num_done, began = float("inf"), 0, time.perf_counter()
    while num_done < MIN_REPETITIONS or time.perf_counter() - began < MIN_SECONDS:
        start = time.perf_counter()
        matmul(left, right, out=out)
        fastest = min(fastest, time.perf_counter() - start)
        num_done += 1
    return 2 * SIZE**3 / fastest / GIGA


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
