"""Every precision gives its vectors on lesser processors, too: those that this machine's libraries can be told to be.

torch and oneDNN can: they compute bf16 with whatever is left. openvino has no such switch; without AVX512 it
computes fp32 when bf16 is asked for, which keeps every bound. `python -m tests.contract.test_lesser_processors
DIRECTORY` prints the smallest cosine of each precision to the vectors of sentence-transformers, and what torch
takes the processor for.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.architecture.sources import ROOT
from tests.models import TinyModels, encode, reference, smallest_cosine
from tests.processors import with_bf16
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor

BOUNDS = {"fp32": 0.9999, "bf16": 0.999, "int8": 0.999}
# What torch is told, what oneDNN is, which feature it takes to be that, and what torch then says that it is.
KINDS = (
    ("default", "SSE41", None, ("DEFAULT", "NO AVX")),  # nothing of AVX
    ("avx2", "AVX2", "avx2", ("AVX2",)),  # processors of 2013 to today, without bf16 and without VNNI
    ("avx512", "AVX512_CORE_VNNI", "avx512f", ("AVX512",)),  # AVX512 without bf16
)


@pytest.mark.parametrize(
    ("torch_kind", "onednn_kind", "feature", "names"), KINDS, ids=[kind[0] for kind in KINDS]
)
def test_every_precision_keeps_its_bound_on_a_lesser_processor(
    torch_kind: str, onednn_kind: str, feature: str | None, names: tuple[str, ...], tmp_path: Path
) -> None:
    if feature is not None and feature not in detect_inventory().features:
        pytest.skip(
            f"this processor lacks {feature}: torch believes what it is told, and dies of its own instructions"
        )
    environment = os.environ | {"ATEN_CPU_CAPABILITY": torch_kind, "ONEDNN_MAX_CPU_ISA": onednn_kind}
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.test_lesser_processors", str(tmp_path)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("kind") in names
    for name, cosine in found.items():
        assert cosine >= BOUNDS[name.split()[1]], (name, found)


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
