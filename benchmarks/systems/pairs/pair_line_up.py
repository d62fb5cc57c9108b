"""The line-up of systems that judge pairs: ours, and peers of its own catalogue."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.pair_texts import Pair
from benchmarks.peers.catalogue import Peer
from benchmarks.systems.line_up import MODEL, LineUp
from benchmarks.systems.pairs.pair_service import PairService
from benchmarks.systems.protocol import PRECISION
from vectormill.files.ndjson import ItemJson
from worker.encoder.choice import BF16, FP32, INT8

NAIVE: Final = "naive"
NAIVE_BATCH: Final = 16
# Weights in a quarter of the memory; decision 0053 says what they change in decisions.
INT8_ENGINE: Final = Peer(
    "engine-int8",
    "our engine alone, int8 weights",
    "benchmarks.systems.engine_alone",
    options={PRECISION: INT8},
    precision=INT8,
)
_CROSS_ENCODER: Final = "benchmarks.systems.pairs.cross_encoder"


@dataclass(frozen=True, slots=True)
class PairLineUp(LineUp):
    """`pairs` by the name of a mix; `mixes` are not looked at."""

    pairs: Mapping[str, Sequence[Pair]] = field(default_factory=dict)

    def make_service(self) -> PairService:
        items: dict[str, Sequence[ItemJson]] = {
            name: [
                {"key": f"{number}", "text": pair.text, "text_pair": pair.text_pair}
                for number, pair in enumerate(pairs)
            ]
            for name, pairs in self.pairs.items()
        }
        return PairService(self.directory, items, self.service_settings(), MODEL)

    def _write_texts(self) -> None:
        texts = {name: [[pair.text, pair.text_pair] for pair in pairs] for name, pairs in self.pairs.items()}
        (self.directory / "texts.json").write_text(json.dumps(texts), encoding="utf-8")


def make_naive(num_timed: int) -> Peer:
    return Peer(
        NAIVE,
        f"transformers, padded to the limit, batches of {NAIVE_BATCH}",
        "benchmarks.systems.pairs.naive",
        options={"batch_size": str(NAIVE_BATCH), "num_timed": str(num_timed)},
    )


def make_cross_encoder(batch_size: int, backend: str = "torch", precision: str = FP32) -> Peer:
    """`CrossEncoder.predict` with these options."""
    words = {"openvino": "OpenVINO, "}.get(backend, "bf16, " if precision == BF16 else "")
    return Peer(
        f"cross-encoder-{backend}-{precision}-{batch_size}",
        f"CrossEncoder.predict, {words}batches of {batch_size}",
        _CROSS_ENCODER,
        environment="openvino" if backend == "openvino" else None,
        options={"backend": backend, "batch_size": str(batch_size), "precision": precision},
        precision=precision,
    )
