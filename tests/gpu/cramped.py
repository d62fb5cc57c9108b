"""A GPU with so little memory that large batches of a small model do not fit: for tests, in the model's process."""

from typing import Final

import torch

from worker.devices.device import CUDA
from worker.encoder.backends import load_encoder
from worker.encoder.encoder import Encoder, EncoderOrder

# all-MiniLM-L6-v2 has 45 MB of weights, and needs about 8 kB a token.
CRAMPED_BYTES: Final = 500_000_000


def cap_memory() -> None:
    _, total_bytes = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(CRAMPED_BYTES / total_bytes)


def load_cramped_encoder(order: EncoderOrder) -> Encoder:
    cap_memory()
    return load_encoder(order)


def load_cramped_shard(order: EncoderOrder) -> Encoder:
    """Load a rank of which the last alone has little memory, on a GPU."""
    if order.rank is not None and order.rank.is_last and order.device.kind == CUDA:
        cap_memory()
    return load_encoder(order)
