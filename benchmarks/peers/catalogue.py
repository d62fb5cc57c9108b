"""Peers: which encoders are compared with ours, and where one cannot run. Starts nothing and installs nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Final

from worker.devices.device import Device
from worker.encoder.choice import BF16, FP32

SENTENCE_TRANSFORMERS: Final = "sentence-transformers"
OPENVINO: Final = "sentence-transformers-openvino"
_SENTENCE_TRANSFORMER_MODULE: Final = "benchmarks.systems.peers.sentence_transformer"
_INFINITY_MODULE: Final = "benchmarks.systems.peers.infinity"


@dataclass(frozen=True, slots=True)
class Peer:
    """`module` is its child; `environment` names its pinned requirements, and None is the environment we run in. Where
    the `package` is installed in ours, it runs there.
    """

    name: str
    title: str
    module: str
    environment: str | None = None
    package: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    precision: str = FP32


PEERS: Final = (
    Peer(SENTENCE_TRANSFORMERS, "sentence-transformers", _SENTENCE_TRANSFORMER_MODULE),
    Peer(
        "sentence-transformers-bf16",
        "sentence-transformers, bf16",
        _SENTENCE_TRANSFORMER_MODULE,
        options={"precision": BF16},
        precision=BF16,
    ),
    Peer(
        OPENVINO,
        "sentence-transformers, OpenVINO",
        _SENTENCE_TRANSFORMER_MODULE,
        environment="openvino",
        options={"backend": "openvino"},
    ),
    Peer(
        "sentence-transformers-onnx",
        "sentence-transformers, ONNX",
        _SENTENCE_TRANSFORMER_MODULE,
        environment="onnx",
        options={"backend": "onnx"},
    ),
    Peer(
        "infinity", "infinity, torch", _INFINITY_MODULE, environment="infinity", options={"engine": "torch"}
    ),
    Peer(
        "infinity-optimum",
        "infinity, optimum",
        _INFINITY_MODULE,
        environment="infinity-optimum",
        options={"engine": "optimum"},
    ),
)
# On a GPU: bf16 with the best attention there is, at the library's own batch size and at one that fills a large card.
GPU_PEERS: Final = tuple(
    Peer(
        f"sentence-transformers-{batch_size}",
        f"sentence-transformers, bf16, batches of {batch_size}",
        _SENTENCE_TRANSFORMER_MODULE,
        options={"precision": BF16, "attention": "best", "batch_size": str(batch_size)},
        precision=BF16,
    )
    for batch_size in (32, 256)
)
# Its own batching and attention; an environment of several gigabytes, so that only `gpu` asks for it.
VLLM: Final = Peer(
    "vllm", "vLLM, bf16", "benchmarks.systems.peers.vllm", environment="vllm", package="vllm", precision=BF16
)


def runs_in_ours(peer: Peer) -> bool:
    """Whether it is in the environment we run in."""
    return peer.environment is None or (peer.package is not None and find_spec(peer.package) is not None)


def find_obstacle(peer: Peer, device: Device) -> str | None:
    """Why a peer is not to be run on a device, as a sentence; None when it can be tried."""
    if peer.precision == BF16 and not device.has_bf16:
        return "This processor has neither AVX512-BF16 nor AMX; torch would emulate bf16 for minutes."
    return None
