"""What each rank of a shared model runs in the tests.

Every model in the directory is divided in every way and encodes the same batches; what this rank answers is left there.
"""

import json
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor
from transformers import AttentionInterface

from tests.adapters import ADAPTER
from tests.contract.packed_models import make_sequences
from tests.contract.waits import RefusesWaiting
from vectormill.domain.task import DENSE
from vectormill.models.layouts import read_model_card
from vectormill.models.model_card import ModelCard
from vectormill.ragged import Ragged
from vectormill.settings import ModelEntry
from worker.batching.batch import OUTPUTS, Batch
from worker.devices.device import CPU, Device
from worker.encoder.backends import load_encoder
from worker.encoder.choice import PACKED, PADDED
from worker.encoder.encoder import Encoder, EncoderOrder
from worker.encoder.outputs import BITS, POOLED, find_bits
from worker.model.packed import make_attention
from worker.parallel.agreement import set_attention
from worker.parallel.shard_encoder import ShardEncoder
from worker.placement.placement import Rank
from worker.placement.strategies import FULLY_SHARDED, OFFLOAD, SHARED, TENSOR
from worker.tokens.tokenized import SPANS

NUM_LAYERS: Final = 4
SMALLEST_VOCABULARY: Final = 263  # StructBERT's
STUB: Final = "vectormill_stub"
# Those that are also computed packed: learned positions, positions behind the padding id, rotary ones in both
# directions with windows, and causal with grouped heads, with and without windows.
PACKED_MODELS: Final = ("bert", "xlm-roberta", "modernbert", "qwen3", "qwen3, window", "structbert, labels")
# Models whose weights are compressed, by the name of their folder: what they are made of, and their precision. Wide
# enough that ranks cut no group of numbers with one scale, and that the vocabulary is compressed too.
COMPRESSED: Final = {
    "bert, int8": "bert",
    "modernbert, labels, int8": "modernbert",
    "bert, adapter, int8": "bert",
    "modernbert, adapter, int8": "modernbert",
    "qwen3, adapter, int8": "qwen3",
}
WIDE: Final = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "vocab_size": 4200}
# Classifiers, by the name of their folder: their architecture, and StructBERT as it is published. One of each kind of
# layout; tests/contract/test_classifiers_agree.py has every head.
LABELED: Final = {f"{kind}, labels": kind for kind in ("structbert", "qwen3", "deberta-v2")}
# Models with an adapter for every linear layer and the vocabulary; some of the compressed ones have one too.
ADAPTED: Final = {f"{kind}, adapter": kind for kind in ("bert", "modernbert", "qwen3", "deberta-v2")}
# RexUniNLU as it is published, and what it is asked lies in its folder.
EXTRACTING: Final = {f"rexuninlu, {model}": model for model in ("model", "model_b")}
# Models with sparse and multi-vector outputs, whose names tell what they are.
REPRESENTING: Final = ("bge-m3", "splade")
SEQUENCES: Final = "sequences.pickle"
DEVICE: Final = Device("cpu:0", CPU, 0, (), 1, 1 << 30)


def stage_layers(strategy: str, world_size: int, num_layers: int = NUM_LAYERS) -> tuple[int, ...]:
    """Stages of unequal size where that is possible."""
    if strategy in (TENSOR, FULLY_SHARDED, OFFLOAD):
        return (num_layers,)
    return (*(1,) * (world_size - 1), num_layers - world_size + 1)


def strategies_of(name: str) -> tuple[str, ...]:
    """Those by which the model can be divided."""
    without = {TENSOR} if name.startswith("deberta") or name in EXTRACTING else set()
    return tuple(each for each in SHARED if each not in without)


def precision_of(name: str) -> str:
    return name.rpartition(", ")[2] if name in COMPRESSED else "fp32"


def read_batches(folder: Path) -> list[Batch]:
    """What the model in the folder is given."""
    if folder.name in REPRESENTING:
        return [ask_outputs(batch, read_card(folder)) for batch in batches()]
    if folder.name not in EXTRACTING:
        return batches()
    sequences: Batch = pickle.loads((folder / SEQUENCES).read_bytes())
    return [sequences.part(start, min(start + 12, len(sequences))) for start in range(0, len(sequences), 12)]


def ask_outputs(batch: Batch, card: ModelCard) -> Batch:
    """Return the batch with other outputs asked for by each sequence, and two passages by each that asks for them."""
    everything = find_bits((*card.outputs, POOLED) if DENSE in card.outputs else card.outputs)
    wishes = [everything, *(BITS[name] for name in card.outputs), 0 if DENSE in card.outputs else everything]
    bits = [wishes[number % len(wishes)] for number in range(len(batch))]
    spans = [
        np.array([0, (length + 1) // 2, length // 2, length] if asked & BITS[POOLED] else [], np.int32)
        for asked, length in zip(bits, batch.lengths.tolist(), strict=True)
    ]
    more = {OUTPUTS: Ragged.from_scalars(np.array(bits, np.int32)), SPANS: Ragged.from_rows(spans, np.int32)}
    return Batch({**batch.inputs, **more})


def batches() -> list[Batch]:
    """A batch of every length, one of a single text, and one with fewer texts than ranks, each behind a prompt."""
    sequences = [ids % SMALLEST_VOCABULARY for ids in make_sequences()]
    return [
        Batch.from_ids(sequences, [2] + [0] * (len(sequences) - 1)),
        Batch.from_ids(sequences[2:3]),
        Batch.from_ids([sequences[6], sequences[0], sequences[4]], [3, 1, 16]),
    ]


def read_card(folder: Path) -> ModelCard:
    """Vectors are of two poolings; a head says itself what it reads."""
    gives_vectors = "labels" not in folder.name and folder.name not in {*EXTRACTING, *REPRESENTING}
    pooling = "mean+last_token" if gives_vectors else None
    adapter = ADAPTER if "adapter" in folder.name else None
    return read_model_card(
        folder.name, folder, ModelEntry(path=str(folder), pooling=pooling, adapter=adapter)
    )


def read_num_layers(folder: Path) -> int:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return int(config["num_hidden_layers"])


def attentions_of(name: str) -> tuple[str, ...]:
    return (PADDED, PACKED) if name in PACKED_MODELS else (PADDED,)


def encode_with_all(
    number: int, world_size: int, directory: Path, strategies: tuple[str, ...] = SHARED
) -> None:
    """The answers of one rank, as `number.npz` in the directory."""
    answers: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32 | np.int64]]] = {}
    for folder in sorted(path for path in directory.iterdir() if path.is_dir()):
        card = read_card(folder)
        for strategy in (each for each in (*strategies_of(folder.name), OFFLOAD) if each in strategies):
            layers = stage_layers(strategy, world_size, read_num_layers(folder))
            num_offloaded = layers[0] if strategy == OFFLOAD else 0
            rank = Rank(
                number, world_size, strategy, layers, directory / "meeting_point", 60.0, num_offloaded
            )
            for attention in attentions_of(folder.name):
                order = EncoderOrder(
                    card, DEVICE, "torch", precision_of(folder.name), 1, directory, attention, rank
                )
                encoder = load_encoder(order)
                assert encoder.describe().is_packed == (attention == PACKED)
                for place, batch in enumerate(read_batches(folder)):
                    # The kernel of a processor asks where each sequence ends; that of a GPU does not. How many cells
                    # there are an extraction asks on both.
                    may_wait = attention == PACKED or card.is_extractor
                    with nullcontext() if may_wait else RefusesWaiting():
                        rows = encoder.encode(batch)
                    name = f"{folder.name}|{strategy}|{attention}|{place}"
                    answers |= {name: rows.covered, f"{name}|lengths": rows.lengths}
                if attention == PACKED:
                    assert isinstance(encoder, ShardEncoder)
                    check_waits(encoder)
                answers[f"{folder.name}|{strategy}|bytes"] = np.array(count_bytes_read(encoder))
    np.savez(directory / f"{number}.npz", allow_pickle=False, **answers)


def count_bytes_read(encoder: Encoder) -> int:
    return sum(loading.num_bytes for loading in encoder.describe().loadings)


def check_waits(encoder: ShardEncoder) -> None:
    """All of a packed pass but the kernel, which asks a processor and not a GPU: stages, shares and pooling."""

    def attend_to_oneself(query: Tensor, *_: Any) -> Tensor:
        return query.contiguous()

    AttentionInterface.register(STUB, make_attention(attend_to_oneself))
    set_attention(encoder._transformer, STUB)
    for batch in batches():
        with RefusesWaiting():
            encoder.encode(batch)
