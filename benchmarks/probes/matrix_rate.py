"""The rate of matrix products that torch reaches here: the limit that an encoder's arithmetic is compared with.

Runs as a child (`python -m benchmarks.probes.matrix_rate KIND PRECISION …`), so that torch is pinned and its memory is
given back. Knows nothing of models.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vectormill.settings import process_environment
from worker.devices.device import CPU, CUDA, Device, device_environment

# On a processor: large enough to hide every start, small enough that three matrices of fp32 are 48 MiB. A GPU needs
# more to be filled.
SIZES: Final[Mapping[str, int]] = {CPU: 2048, CUDA: 8192}
MIN_SECONDS: Final = 2.0
MIN_REPETITIONS: Final = 5
TIMEOUT_SECONDS: Final = 300.0
GIGA: Final = 1e9


def measure_matrix_rates(device: Device) -> dict[str, float]:
    """Precision -> GFLOP/s, with the device's own threads; bf16 only where it has instructions for that."""
    precisions = ["fp32", "bf16"] if device.has_bf16 else ["fp32"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.probes.matrix_rate", device.kind, *precisions],
        env=process_environment() | device_environment(device),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=True,
    )
    rates: dict[str, float] = json.loads(done.stdout)
    return rates


def main(kind: str, precisions: Sequence[str]) -> Mapping[str, float]:
    """Measures in this process, on the one device that it sees."""
    import torch

    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return {precision: _measure(kind, kinds[precision], SIZES[kind]) for precision in precisions}


def _measure(device: str, kind: Any, size: int) -> float:
    """GFLOP/s of the fastest of several products: a limit, so the best that was seen."""
    from torch import cuda, matmul, randn

    left, right = (randn(size, size, device=device).to(kind) for _ in range(2))
    out = matmul(left, right)
    fastest, num_done, began = float("inf"), 0, time.perf_counter()
    while num_done < MIN_REPETITIONS or time.perf_counter() - began < MIN_SECONDS:
        if device == CUDA:
            cuda.synchronize()
        start = time.perf_counter()
        matmul(left, right, out=out)
        if device == CUDA:
            cuda.synchronize()
        fastest = min(fastest, time.perf_counter() - start)
        num_done += 1
    return 2 * size**3 / fastest / GIGA


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2:])))
