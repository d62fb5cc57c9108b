"""Encodes the texts of the tests in several precisions, in a process that is told to behave as a lesser processor.

`python -m tests.contract.lesser_program DIRECTORY` prints the smallest cosine of each to the vectors of
sentence-transformers, and what torch takes the processor for.
"""

import json
import sys
from pathlib import Path

import torch

from tests.models import TinyModels, encode, reference, smallest_cosine
from tests.processors import with_bf16
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    device = with_bf16(split_processor(detect_inventory(), 1)[0])
    models = TinyModels(directory)
    found: dict[str, object] = {"kind": torch.backends.cpu.get_cpu_capability()}
    for architecture in ("Bert", "Qwen3"):
        model = models.transformer(architecture)
        expected = reference(model)
        for precision in ("fp32", "bf16", "int8"):
            vectors = encode(model, "torch", directory, precision=precision, device=device)
            found[f"{architecture} {precision}"] = smallest_cosine(vectors, expected)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
