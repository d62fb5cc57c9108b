"""`engine --device cuda`: its models of random weights, its texts and its report, without a GPU."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cases.engine.shapes import describe_engine, find_device, judge, make_mixed
from benchmarks.models.random_weights import (
    count_bytes,
    plan_shards,
    to_bf16,
    write_random_model,
    write_shards,
)
from benchmarks.models.shapes import GPU_SHAPES, SHAPES
from benchmarks.order import BenchmarkFailed
from benchmarks.probes.model_cost import read_shapes
from benchmarks.probes.peak import PeakSampler
from benchmarks.results.comparison import Comparison
from benchmarks.systems.protocol import Pass
from benchmarks.systems.turns import Record
from vectormill.models.model_card import read_model_card
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.devices.device import Inventory


def test_a_shape_has_the_size_of_the_model_that_it_is_named_after() -> None:
    """Parameters that are multiplied with, from the shapes' own numbers: embeddings are not among them."""
    found = {}
    for name in GPU_SHAPES:
        config = SHAPES[name].config
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        if SHAPES[name].model_type == "bert":
            layer = 4 * hidden * hidden + 2 * hidden * inner
        else:
            kept = config["num_key_value_heads"] * config["head_dim"]
            layer = 2 * hidden * hidden + 2 * hidden * kept + 3 * hidden * inner
        found[name] = config["num_hidden_layers"] * layer
    assert found["bert-base"] == pytest.approx(85e6, rel=0.02)
    assert found["bert-large"] == pytest.approx(302e6, rel=0.02)
    assert found["qwen3-7b"] == pytest.approx(7e9, rel=0.02)


@pytest.mark.parametrize(("name", "pooling"), [("tiny", ("mean",)), ("tiny-qwen3", ("last_token",))])
def test_a_model_of_random_weights_is_one_that_our_worker_can_load(
    name: str, pooling: tuple[str, ...], tmp_path: Path
) -> None:
    directory = write_random_model(SHAPES[name], Registry({}).card(DEFAULT_MODEL).path, tmp_path / name)
    card = read_model_card(name, directory)
    assert (card.dimension, card.max_tokens, card.pooling, card.normalize) == (64, 512, pooling, True)
    (weights,) = directory.glob("*.safetensors")
    assert (
        card.num_parameters == count_bytes({name: tuple(s) for name, s in read_shapes(weights).items()}) // 2
    )


def test_a_large_model_is_cut_into_shards_that_an_index_lists(tmp_path: Path) -> None:
    tensors = {"a.weight": (8, 8), "b.weight": (8, 8), "norm.weight": (4,), "norm.bias": (4,)}
    assert [list(shard) for shard in plan_shards(tensors, 200)] == [
        ["a.weight"],
        ["b.weight", "norm.weight", "norm.bias"],
    ]
    write_shards(tensors, tmp_path, shard_bytes=200)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    second = tmp_path / index["weight_map"]["norm.bias"]
    assert read_shapes(second) == {"b.weight": [8, 8], "norm.weight": [4], "norm.bias": [4]}
    values = np.frombuffer(second.read_bytes()[-16:], dtype=np.uint16).astype(np.uint32) << 16
    assert values.view(np.float32).tolist() == [1.0] * 4 + [0.0] * 4


def test_bf16_is_the_upper_half_of_a_float() -> None:
    assert to_bf16(np.array([1.0, -2.0], dtype=np.float32)).tolist() == [0x3F80, 0xC000]


def test_a_run_for_a_gpu_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "benchmarks.cases.engine.shapes.detect_inventory",
        lambda: Inventory((), ((0,),), 1 << 30, frozenset(), ""),
    )
    with pytest.raises(BenchmarkFailed, match="no device 'cuda' here; there is cpu, and no GPU"):
        find_device("cuda")


def test_a_mix_has_about_the_tokens_of_its_shape_and_never_a_text_twice() -> None:
    card = Registry({}).card(DEFAULT_MODEL)
    texts = [f"text number {number}" for number in range(100)]  # five tokens each
    mix = make_mixed(SHAPES["tiny"], card, texts, None)
    assert len(mix.texts) == len(set(mix.texts)) == SHAPES["tiny"].num_tokens // 5
    assert len(make_mixed(SHAPES["tiny"], card, texts, 7).texts) == 7


def test_memory_is_that_above_what_was_taken_before() -> None:
    readings = itertools.chain([5, 7, 9], itertools.repeat(6))
    with PeakSampler(lambda: next(readings), pause_seconds=0.001) as memory:
        while memory.growth_bytes < 4:  # the test's own time limit ends it
            pass
    assert memory.growth_bytes == 4


def test_our_engine_is_judged_by_the_faster_of_the_peers() -> None:
    report = {
        "precision": {"value": "bf16", "reason": "the device computes bf16 natively"},
        "pass_stage_seconds": {"tokenize": 0.5, "run": 0.9},
    }
    comparison = Comparison(
        mix="tiny, mixed lengths",
        description="texts of a test",
        num_texts=10,
        num_tokens=100,
        flop=5e9,
        peer="small",
        records={
            "engine": Record("our engine alone", [Pass(1.0, 100, 100)], report=report),
            "small": Record("batches of 32", [Pass(4.0, 100, 120)]),
            "large": Record("batches of 256", [Pass(1.5, 100, 120)]),
        },
        precisions=dict.fromkeys(("engine", "small", "large"), "bf16"),
        limits={"bf16": 10.0, "fp32": 1.0},
    )
    rows = [measure.row() for measure in judge(SHAPES["tiny"], comparison)]
    assert rows == [
        ("tiny: our engine, of the matrix rate", "50.0%", "≥ 55%, **missed**"),
        ("tiny: our engine, to batches of 256", "1.50×", "≥ 2×, **missed**"),
    ]
    assert describe_engine(comparison) == [
        "our engine: precision bf16 (the device computes bf16 natively).",
        "at work in the last pass of 1.00 s: tokenize 0.5 s, run 0.9 s. Other stages than run have several threads.",
    ]
