"""What each rank of a shared model runs in the tests.

Every model in the directory is divided in every way and encodes the same batches; what this rank answers is left there.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor
from transformers import AttentionInterface

from tests.contract.packed_models import make_sequences
from tests.contract.waits import RefusesWaiting
from vectormill.models.model_card import read_model_card
from worker.batching.batch import Batch
from worker.devices.device import CPU, Device
from worker.encoder.encoder import EncoderOrder
from worker.model.architectures import PACKED, PADDED
from worker.model.packed_attention import make_attention
from worker.parallel.forms.probe import set_attention
from worker.parallel.shard_encoder import ShardEncoder
from worker.placement.rank import Rank
from worker.placement.strategies import FULLY_SHARDED, SHARED, TENSOR

NUM_LAYERS: Final = 4
STUB: Final = "vectormill_stub"
# Those that are also computed packed: learned positions, positions behind the padding id, rotary ones in both
# directions with windows, and causal with grouped heads, with and without windows.
PACKED_MODELS: Final = ("bert", "xlm-roberta", "modernbert", "qwen3", "qwen3, window")
# Models whose weights are compressed, by the name of their folder: what they are made of, and their precision. Wide
# enough that ranks cut no group of numbers with one scale, and that the vocabulary is compressed too.
COMPRESSED: Final = {"bert, int8": "bert", "modernbert, int8": "modernbert"}
WIDE: Final = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 4200}
DEVICE: Final = Device("cpu:0", CPU, 0, (), 1, 1 << 30)


def stage_layers(strategy: str, world_size: int) -> tuple[int, ...]:
    """Stages of unequal size where that is possible."""
    if strategy in (TENSOR, FULLY_SHARDED):
        return (NUM_LAYERS,)
    return {2: (1, 3), 4: (1, 1, 1, 1)}[world_size]


def strategies_of(name: str) -> tuple[str, ...]:
    """Those by which the model can be divided."""
    without = {TENSOR} if name.startswith("deberta") else set()
    return tuple(each for each in SHARED if each not in without)


def precision_of(name: str) -> str:
    return name.rpartition(", ")[2] if name in COMPRESSED else "fp32"


def batches() -> list[Batch]:
    """A batch of every length, one of a single text, and one with fewer texts than ranks, each behind a prompt."""
    sequences = make_sequences()
    return [
        Batch.from_ids(sequences, [2] + [0] * (len(sequences) - 1)),
        Batch.from_ids(sequences[2:3]),
        Batch.from_ids([sequences[6], sequences[0], sequences[4]], [3, 1, 16]),
    ]


def attentions_of(name: str) -> tuple[str, ...]:
    return (PADDED, PACKED) if name in PACKED_MODELS else (PADDED,)


def encode_with_all(number: int, world_size: int, directory: Path) -> None:
    """The answers of one rank, as `number.npz` in the directory."""
    answers: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32 | np.int64]]] = {}
    for folder in sorted(path for path in directory.iterdir() if path.is_dir()):
        card = read_model_card(folder.name, folder, pooling="mean+last_token")
        for strategy in strategies_of(folder.name):
            layers = stage_layers(strategy, world_size)
            rank = Rank(number, world_size, strategy, layers, 3, directory / "meeting_point", 60.0)
            for attention in attentions_of(folder.name):
                order = EncoderOrder(
                    card, DEVICE, "torch", precision_of(folder.name), 1, directory, attention, rank
                )
                encoder = ShardEncoder(order, rank)
                assert encoder.describe().is_packed == (attention == PACKED)
                for place, batch in enumerate(batches()):
                    # The kernel of a processor asks where each sequence ends; that of a GPU does not.
                    with nullcontext() if attention == PACKED else RefusesWaiting():
                        vectors = encoder.encode(batch).matrix
                    answers[f"{folder.name}|{strategy}|{attention}|{place}"] = vectors
                if attention == PACKED:
                    check_waits(encoder)
                answers[f"{folder.name}|{strategy}|bytes"] = np.array(encoder.num_bytes_read)
    np.savez(directory / f"{number}.npz", allow_pickle=False, **answers)


def check_waits(encoder: ShardEncoder) -> None:
    """All of a packed pass but the kernel, which asks a processor and not a GPU: stages, shares and pooling."""

    def attend_to_oneself(query: Tensor, *_: Any) -> Tensor:
        return query.contiguous()

    AttentionInterface.register(STUB, make_attention(attend_to_oneself))
    set_attention(encoder._transformer, STUB)
    for batch in batches():
        with RefusesWaiting():
            encoder.encode(batch)
