"""Every precision gives its vectors on lesser processors, too: those that this machine's libraries can be told to be.

torch and oneDNN can: they compute bf16 with whatever is left. openvino has no such switch; without AVX512 it computes
fp32 when bf16 is asked for, which keeps every bound.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT
from worker.devices.detect import detect_inventory

pytestmark = pytest.mark.tail

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
        [sys.executable, "-m", "tests.contract.lesser_program", str(tmp_path)],
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
