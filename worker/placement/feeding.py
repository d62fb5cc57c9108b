"""Choose how many workers feed a GPU, so that a small model on a fast GPU does not wait for its host.

A worker claims, tokenizes and commits under one interpreter lock, so more cores do not make it faster beyond
the first two, but more workers do. Each has a model of its own on the GPU.
"""

from math import ceil
from typing import Final

from vectormill.models.model_shape import ModelShape
from worker.devices.device import CUDA, Device
from worker.placement.room import GIB, guess_flops

# Tokens per second that a worker with two cores feeds, in texts of 100 tokens: measured with eight of them on
# an H200 with 16 cores (docs/LOG.md, 2026-11-27). Texts of 16 tokens are fed at half the rate.
FED_TOKENS_PER_SECOND: Final = 500_000
CORES_PER_WORKER: Final = 2
# The memory that a part of a GPU has at least: for the batches of a worker, and for its weights in fp32.
LEAST_PART_BYTES: Final = 4 * GIB
BYTES_PER_VALUE: Final = 16


def choose_num_workers(device: Device, shape: ModelShape) -> tuple[int, str]:
    """Return how many workers should feed the device with texts for this model, and the reason."""
    if device.kind != CUDA:
        return 1, ""
    rate = guess_flops(device) / shape.flop_per_token
    num_values = sum(tensor.num_values for tensor in shape.tensors)
    limits = {
        f"it may compute some {rate:,.0f} tokens/s": ceil(rate / FED_TOKENS_PER_SECOND),
        f"it has {device.num_tokenizer_threads} cores of the host": device.num_tokenizer_threads
        // CORES_PER_WORKER,
        f"it has {device.memory_bytes // GIB} GiB of memory": device.memory_bytes
        // (LEAST_PART_BYTES + BYTES_PER_VALUE * num_values),
    }
    reason, count = min(limits.items(), key=lambda limit: limit[1])
    if count <= 1:
        return 1, ""
    return count, (
        f"{count} workers feed {device.name}: one feeds some {FED_TOKENS_PER_SECOND:,} tokens/s, and {reason}."
    )
