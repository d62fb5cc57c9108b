"""How records of one mix become a comparison: the tokens they all had, what these take, and in which precision."""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.mixes import Mix
from benchmarks.peers.catalogue import GPU_PEERS, OPENVINO, PEERS
from benchmarks.probes.machine import benchmark_device
from benchmarks.probes.model_cost import ModelCost
from benchmarks.results.comparison import Comparison
from benchmarks.systems.line_up import BOUNDS, OURS
from benchmarks.systems.turns import Record
from vectormill.models.model_card import ModelCard
from worker.encoder.choice import BF16, FP32, choose_precision
from worker.settings import load_worker_settings
from worker.tokens.tokenizer import Tokenizer

SHOWN_CHARS: Final = 300


class WithReasons(Protocol):
    """What several systems did."""

    def reasons(self) -> Mapping[str, str]:
        """Why some were not measured, by name."""
        ...


def compare(
    mix: Mix, card: ModelCard, records: Mapping[str, Record], limits: Mapping[str, float], peer: str
) -> Comparison:
    """`peer` is the key of the record that all others are compared with; `limits` are GFLOP/s by precision."""
    lengths = count_tokens(card, mix.texts)
    return Comparison(
        mix=mix.name,
        description=mix.description,
        num_texts=len(mix.texts),
        num_tokens=int(lengths.sum()),
        flop=ModelCost.of(card).count_flop(lengths),
        peer=peer,
        records=records,
        precisions={name: find_precision(name, record) for name, record in records.items()},
        limits=limits,
    )


def count_tokens(card: ModelCard, texts: Sequence[str]) -> NDArray[np.int64]:
    """Real tokens of each text, cut as every system cuts them: the same count for all, so that rates compare."""
    tokenizer = Tokenizer(card.path, lowercase=card.lowercase)
    return tokenizer.tokenize(texts, card.max_tokens, truncate=True).lengths


def find_precision(name: str, record: Record) -> str:
    """That of its arithmetic: what an engine of ours says, or what the peer was asked for."""
    said = record.report.get("precision")
    if isinstance(said, Mapping):
        return str(said.get("value"))
    if name in (*OURS, *BOUNDS):
        return choose_precision(load_worker_settings().precision, benchmark_device()).value
    if name == OPENVINO and benchmark_device().has_bf16:
        return BF16  # OpenVINO's own default where the processor has the instructions
    return next((peer.precision for peer in (*PEERS, *GPU_PEERS) if peer.name == name), FP32)


def list_reasons(comparisons: Sequence[WithReasons]) -> list[str]:
    """A sentence for each system that was not measured, with the last line of its reason: the error's own."""
    reasons = {name: reason for each in comparisons for name, reason in each.reasons().items()}
    return [
        f"{name} was not measured: {_last_line(reason)[:SHOWN_CHARS]}" for name, reason in reasons.items()
    ]


def _last_line(text: str) -> str:
    return ([line.strip() for line in text.splitlines() if line.strip()] or [""])[-1]
