"""Pairs judged in this process: by our engine in any of its ways, and by transformers as it is. Measures no time."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.cases.tasks.pair_model import load_pair_tokenizer
from benchmarks.pair_texts import Pair
from benchmarks.probes.machine import benchmark_device
from vectormill.domain.tasks.pair import join_pair
from vectormill.models.model_card import ModelCard
from vectormill.models.registry import EncodingOptions, make_spec
from vectormill.settings import Settings
from worker.devices.detect import detect_inventory
from worker.devices.device import BF16_FEATURES, Device, parse_devices
from worker.encoder.choice import BF16, FP32
from worker.engine.engine import EncodeRequest, Engine
from worker.plan import plan_worker
from worker.runner.starter import Sharing
from worker.settings import load_worker_settings

REQUEST: Final = "benchmark"
HALVES: Final = "cpu:0,cpu:1"

Scores = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class JudgingWay:
    """A way of our engine. `settings` are those of a worker; with a strategy two halves of the processor are ranks."""

    name: str
    precision: str = FP32
    settings: Mapping[str, Any] = field(default_factory=dict)
    strategy: str = ""


def judge_by_engine(card: ModelCard, way: JudgingWay, pairs: Sequence[Pair], cache_dir: Path) -> Scores:
    """[n, labels]. Raises VectormillError where the model cannot be held or computed in that way."""
    with _starting(card, way, cache_dir) as engine:
        texts = [join_pair(pair.text.encode(), pair.text_pair.encode()) for pair in pairs]
        spec = make_spec(card, EncodingOptions())
        request = EncodeRequest(
            REQUEST, spec, texts, interactive=False, max_text_chars=Settings().max_text_chars
        )
        result = engine.encode(request, threading.Event())
    assert not result.failures, "every pair of docstrings can be judged"
    scores: Scores = result.results.matrix.copy()
    return scores


@contextmanager
def _starting(card: ModelCard, way: JudgingWay, cache_dir: Path) -> Iterator[Engine]:
    settings = load_worker_settings(precision=way.precision, reuse_bytes=0, **way.settings)
    sharing = _share(card, way) if way.strategy else None
    device = sharing.devices[0] if sharing is not None else find_device(way.precision)
    engine = Engine(card, device, settings, cache_dir, sharing=sharing)
    try:
        engine.start()
        yield engine
    finally:
        engine.stop()


def find_device(precision: str) -> Device:
    """The processor. That of bf16 is said to have it: emulated it is slow, and rounds as one that has it."""
    device = benchmark_device()
    return replace(device, features=device.features | BF16_FEATURES) if precision == BF16 else device


def _share(card: ModelCard, way: JudgingWay) -> Sharing:
    """The planner's own replica of two ranks. Raises its refusal."""
    inventory = detect_inventory()
    settings = load_worker_settings(devices=HALVES, strategy=way.strategy, precision=way.precision)
    replica = plan_worker(card, inventory, settings).replicas[0]
    there = {device.name: device for device in parse_devices(HALVES, inventory)}
    return Sharing(replica, tuple(there[name] for name in replica.devices))


def judge_by_transformers(card: ModelCard, pairs: Sequence[Pair]) -> Scores:
    """[n, labels] in fp32, a pair at a time: without padding, and beside nothing."""
    import torch
    from transformers import AutoModelForSequenceClassification

    tokenizer = load_pair_tokenizer(card.path)
    model = AutoModelForSequenceClassification.from_pretrained(card.path, dtype=torch.float32).eval()
    rows = []
    with torch.inference_mode():
        for pair in pairs:
            inputs = tokenizer(
                pair.text, pair.text_pair, truncation=True, max_length=card.max_tokens, return_tensors="pt"
            )
            rows.append(model(**inputs).logits[0].softmax(-1).numpy())
    return np.stack(rows)
