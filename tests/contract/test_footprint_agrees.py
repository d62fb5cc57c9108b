"""The predicted memory of a pass is at least what torch's allocator hands out, and at most 15 % more."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.tensor import DTensor

from tests.allocations import measure_peak_bytes
from tests.contract.packed_models import MODELS, PADDED_MODELS, TOKENIZER, make_transformer
from tests.contract.ranks import run_ranks
from vectormill.models.layouts import read_model_card
from vectormill.models.model_card import ModelCard
from vectormill.settings import ModelEntry
from worker.batching.batch import Batch
from worker.devices.device import CPU, Device, device_environment
from worker.encoder.choice import PACKED, PADDED
from worker.encoder.encoder import Choice, Encoder, EncoderOrder
from worker.model.torch_encoder import TorchEncoder
from worker.parallel.shard_encoder import ShardEncoder, load_shard
from worker.placement.footprint import SCRATCH_BYTES, WHOLE, Portion, list_shares, make_footprint
from worker.placement.placement import Rank
from worker.placement.strategies import FULLY_SHARDED, PIPELINE, SHARED, TENSOR
from worker.runner.starter import LOOPBACK

MOST_ABOVE = 1.15
DEVICE = Device("cpu:0", CPU, 0, (), 1, 1 << 34)
SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 8,
    "intermediate_size": 512,
    "max_position_embeddings": 600,
    "vocab_size": 3000,
}
NUM_LAYERS = 4
# A large batch of short texts, and a few long ones, whose masks and scores are larger.
BATCHES = ((64, 32), (4, 512))
# One of each kind: norms behind and before, a gate, windows in both directions and one, scores that are computed
# without a fused kernel, with and without relative positions.
IN_CORE = ("bert", "qwen3", "modernbert", "mistral, window", "gemma2", "deberta-v2")


def save_model(folder: Path, name: str) -> ModelCard:
    options = (MODELS | PADDED_MODELS)[name][1]
    more = SIZES | {"num_hidden_layers": NUM_LAYERS}
    more |= {key: size for key, size in (("head_dim", 16), ("position_buckets", 64)) if key in options}
    if name == "distilbert":
        more |= {"dim": 128, "hidden_dim": 512, "n_heads": 8, "n_layers": NUM_LAYERS}
    make_transformer(name, **more).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(TOKENIZER)
    return read_model_card("model", folder, ModelEntry(path=str(folder), pooling="mean"))


def compare(card: ModelCard, encoder: Encoder, precision: str, share: Portion = WHOLE) -> list[str]:
    """Where the prediction and what was measured are too far from each other."""
    arithmetic = "fp32" if precision == "int8" else precision
    footprint = make_footprint(
        card.find_shape(),
        precision,
        encoder.describe().attention,
        arithmetic=arithmetic,
        share=share,
        kind=CPU,
    )
    encoder.encode(Batch.from_ids([np.arange(5, 13, dtype=np.int32)] * 4))  # what is made once for all
    wrong = []
    for num_sequences, length in BATCHES:
        # One is shorter, so that there is padding, and with it a mask.
        rows = [np.arange(5, 5 + length - (row == 0), dtype=np.int32) for row in range(num_sequences)]
        batch = Batch.from_ids(rows)
        measured = measure_peak_bytes(lambda batch=batch: encoder.encode(batch))  # type: ignore[misc]
        num_own = -(-num_sequences // share.num_ranks) if share.strategy == FULLY_SHARDED else num_sequences
        foreseen = footprint.predict_batch_bytes(num_own, length) - SCRATCH_BYTES
        if not measured <= foreseen <= MOST_ABOVE * measured:
            wrong.append(
                f"{num_sequences} × {length}: {foreseen:,} for {measured:,} ({foreseen / measured:.2f})"
            )
    return wrong


def list_passes() -> Iterator[Any]:
    """Every family padded in fp32, and one of each kind in other ways; all in all ways among the slow tests."""
    for name in (*MODELS, *PADDED_MODELS):
        for attention in (PADDED,) if name in PADDED_MODELS else (PADDED, PACKED):
            for precision in ("fp32", "bf16", "int8"):
                ways = (attention, precision)
                is_quick = ways == (PADDED, "fp32") or (name in IN_CORE and ways != (PACKED, "int8"))
                yield pytest.param(name, *ways, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "attention", "precision"), [*list_passes()])
def test_a_pass_takes_what_is_foreseen(tmp_path: Path, name: str, attention: str, precision: str) -> None:
    card = save_model(tmp_path / "model", name)
    order = EncoderOrder(card, DEVICE, "torch", precision, 1, tmp_path, attention)
    encoder = TorchEncoder(order, Choice("torch", ""), Choice(precision, ""))
    assert not compare(card, encoder, precision)


def local_bytes(parameter: Any) -> int:
    return int((parameter.to_local() if isinstance(parameter, DTensor) else parameter).nbytes)


def measure_rank(number: int, world_size: int, directory: Path) -> None:
    """Leave what this rank found wrong with each model and strategy in `number.txt`."""
    wrong = []
    for folder in sorted(path for path in directory.iterdir() if path.is_dir()):
        card = read_model_card(folder.name, folder, ModelEntry(path=str(folder), pooling="mean"))
        for strategy in SHARED:
            if strategy == TENSOR and folder.name.startswith("deberta"):
                continue
            layers = (2,) * world_size if strategy == PIPELINE else (NUM_LAYERS,)
            rank = Rank(number, world_size, strategy, layers, directory / "meeting_point", 120.0)
            order = EncoderOrder(card, DEVICE, "torch", "fp32", 1, directory, PADDED, rank)
            share = list_shares(strategy, layers, world_size)[number]
            encoder = load_shard(order)
            assert isinstance(encoder, ShardEncoder)
            found = compare(card, encoder, "fp32", share)
            held = sum(local_bytes(each) for each in encoder._transformer.parameters())
            weights = make_footprint(card.find_shape(), "fp32", PADDED, share=share).weight_bytes
            if not held <= weights <= 1.01 * held:  # biases of columns are counted as if they were whole
                found.append(f"weights: {weights:,} for {held:,}")
            wrong += [f"{folder.name}, {strategy}, rank {number}: {each}" for each in found]
    (directory / f"{number}.txt").write_text("\n".join(wrong))


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("bert", "qwen3", "modernbert"), id="three families"),
        pytest.param(
            (
                "xlm-roberta",
                "modernbert",
                "mistral, window",
                "gemma2",
                "gemma3_text, both ways",
                "deberta-v2",
            ),
            id="the others",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_each_rank_takes_what_is_foreseen_by_every_strategy(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        save_model(tmp_path / name, name)
    calls = [(number, 2, tmp_path) for number in range(2)]
    run_ranks(measure_rank, calls, device_environment(DEVICE, 1) | LOOPBACK)
    assert "".join((tmp_path / f"{number}.txt").read_text() for number in range(2)) == ""
