"""What the tests here run on: `pytest tests/gpu`, on a machine with a GPU, shows what no other machine can.

Rows for the CPU run the same code wherever there is none, so that a test is not first run on the day it is needed.
"""

import pytest
import torch

from worker.devices.detect import detect_inventory
from worker.devices.device import Device, split_processor

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU on this machine")
NEEDS_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees no two GPUs here")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


def find_device(kind: str) -> Device:
    inventory = detect_inventory()
    return inventory.accelerators[0] if kind == "cuda" else split_processor(inventory, 1)[0]
