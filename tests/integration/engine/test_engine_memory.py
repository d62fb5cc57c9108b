"""An engine whose model process runs out of memory: the real torch encoder, under a limit that the kernel enforces.

The factories of this file load it in the model process and then limit that process's address space to a little more
than it has, so that large batches fail in the allocator itself. Only Linux obeys that limit.
"""

import resource
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.models import read_card, write_wide_bert
from tests.processors import with_bf16, without_bf16
from tests.rank_processes import starting_engines
from tests.sick_encoders import NUM_SICK, take_illness
from vectormill.jobs.item import OUT_OF_MEMORY
from vectormill.models.registry import EncodingOptions, ModelCard, make_spec
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor
from worker.encoder.backends import load_encoder
from worker.encoder.encoder import DirectEncoder, Encoder, EncoderOrder, EncoderReport
from worker.engine.engine import DEFAULT_FACTORY, Engine
from worker.engine.request import EncodeRequest, EncodeResult
from worker.settings import WorkerSettings

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux",
        reason="RLIMIT_AS is not obeyed outside Linux, so that no allocation can be made to fail",
    ),
]

MEBIBYTE = 1 << 20
# As promised for a text in any company (docs/ARCHITECTURE.md).
SMALLEST_COSINES = {"fp32": 0.9999, "bf16": 0.999}
NUM_TOKENS = {"fp32": 4096, "bf16": 8192}
WORDS = ("the", "engine", "reads", "many", "words", "and", "gives", "every", "text", "one", "vector")


class LateLimited(DirectEncoder):
    """Has all the memory that it wants until it was loaded and has encoded two batches."""

    def __init__(self, encoder: Encoder, is_limited: bool) -> None:
        self._encoder = encoder
        self._num_unlimited = 2 if is_limited else sys.maxsize

    def encode(self, batch: Batch) -> Ragged:
        self._num_unlimited -= 1
        if self._num_unlimited == -1:
            limit_memory(5 * MEBIBYTE)
        return self._encoder.encode(batch)

    def describe(self) -> EncoderReport:
        return self._encoder.describe()


def limit_memory(free_bytes: int) -> None:
    limit = psutil.Process().memory_info().vms + free_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def load_limited(order: EncoderOrder, free_bytes: int) -> Encoder:
    encoder = load_encoder(order)
    # Threads, their stacks and the kernels' own memory come with the first batch: they shall lie below the limit.
    encoder.encode(Batch.from_ids([np.arange(5, 69, dtype=np.int32)] * 4))
    limit_memory(free_bytes)
    return encoder


def load_with_little_memory(order: EncoderOrder) -> Encoder:
    """The widest tensor takes 128 kB a token in fp32, and half in bf16: that of NUM_TOKENS does not fit even alone, and
    a quarter does. All else is small beside it, so that no other allocation fails: where a processor has instructions
    for bf16, torch and oneDNN make kernels for each shape, and die of a segmentation fault when those find no room.
    """
    return load_limited(order, 400 * MEBIBYTE)


def load_with_next_to_nothing(order: EncoderOrder) -> Encoder:
    """The first process only: with 5 MiB torch encodes hardly anything, and oneDNN makes no kernel for bf16."""
    return LateLimited(load_encoder(order), take_illness(order.cache_dir / NUM_SICK))


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return read_card(write_wide_bert(tmp_path_factory.mktemp("wide")))


MakeEngine = Callable[..., Engine]


@contextmanager
def making_engines(card: ModelCard, cache_dir: Path, precision: str) -> Iterator[MakeEngine]:
    def make(function: str | None = None, **settings: Any) -> Engine:
        choices = {"backend": "torch", "precision": precision, "attention": "padded", **settings}
        factory = f"tests.integration.engine.test_engine_memory:{function}" if function else DEFAULT_FACTORY
        device = split_processor(detect_inventory(), 1)[0]
        device = with_bf16(device) if precision == "bf16" else without_bf16(device)
        return start(Engine(card, device, WorkerSettings(**choices), cache_dir, factory=factory))

    with starting_engines() as start:
        yield make


@pytest.fixture(scope="module", params=["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def precision(request: pytest.FixtureRequest) -> str:
    """bf16 on every machine: where it is emulated, libraries take memory in other places and say other words."""
    return str(request.param)


@pytest.fixture
def make_engine(card: ModelCard, tmp_path: Path, precision: str) -> Iterator[MakeEngine]:
    with making_engines(card, tmp_path, precision) as make:
        yield make


@dataclass(frozen=True, slots=True)
class Shortage:
    """What an engine made of large batches with little memory, and another engine, which has enough."""

    result: EncodeResult
    report: Mapping[str, Any]
    next_result: EncodeResult


@pytest.fixture(scope="module")
def shortage(card: ModelCard, precision: str, tmp_path_factory: pytest.TempPathFactory) -> Shortage:
    num_tokens = NUM_TOKENS[precision]
    texts = make_texts(num_tokens // 256, 250)
    with making_engines(card, tmp_path_factory.mktemp("cache"), precision) as make:
        first = make("load_with_little_memory", max_batch_tokens=num_tokens)
        result, report = encode(first, card, texts), first.report()
        first.stop()
        second = make(max_batch_tokens=num_tokens)
        return Shortage(result, report, encode(second, card, texts))


def encode(engine: Engine, card: ModelCard, texts: list[str]) -> EncodeResult:
    spec = make_spec(card, EncodingOptions())
    encoded = [text.encode() for text in texts]
    return engine.encode(EncodeRequest("r", spec, encoded, False, 1_000_000), threading.Event())


def make_texts(num_texts: int, num_words: int) -> list[str]:
    return [
        " ".join(WORDS[(i + j * j) % len(WORDS)] for j in range(num_words - i % 7)) for i in range(num_texts)
    ]


def test_batches_that_do_not_fit_are_tried_in_parts_and_every_text_gets_its_vector(
    shortage: Shortage, precision: str
) -> None:
    result, report = shortage.result, shortage.report
    assert not result.failures
    cosines = (result.vectors * shortage.next_result.vectors).sum(axis=1)
    assert float(cosines.min()) >= SMALLEST_COSINES[precision]
    assert report["num_out_of_memory"] >= 1
    assert report["num_restarts"] == 0 or precision == "bf16", "oneDNN may make no kernel any more behind it"
    assert report["budgets"]["up to 256"]["max_batch_tokens"] <= NUM_TOKENS[precision] // 2
    assert report["budgets"]["up to 64"]["max_batch_tokens"] == NUM_TOKENS[precision], "another length class"
    assert report["num_sequences"] == NUM_TOKENS[precision] // 256
    assert report["peak_memory_bytes"] >= report["memory_bytes"] > 100 * MEBIBYTE


def test_a_text_that_does_not_fit_alone_fails_alone(
    make_engine: MakeEngine, card: ModelCard, precision: str
) -> None:
    texts = make_texts(20, 30)
    texts[7] = make_texts(1, 7900)[0]
    engine = make_engine("load_with_little_memory", max_batch_tokens=16384)
    result = encode(engine, card, texts)
    assert {index: failure.code for index, failure in result.failures.items()} == {7: OUT_OF_MEMORY}
    assert result.num_tokens[7] == 0
    assert np.flatnonzero(~result.vectors.any(axis=1)).tolist() == [7]
    again = encode(engine, card, texts[:7])
    assert float((again.vectors * result.vectors[:7]).sum(axis=1).min()) >= SMALLEST_COSINES[precision]
    if precision == "fp32":
        assert "allocate" in result.failures[7].detail
        assert engine.report()["num_restarts"] == 0


def test_healthy_texts_lose_nothing_to_a_process_that_has_no_memory_left(
    make_engine: MakeEngine, card: ModelCard, tmp_path: Path
) -> None:
    (tmp_path / NUM_SICK).write_text("1")
    texts = make_texts(20, 40)
    engine = make_engine("load_with_next_to_nothing", max_batch_tokens=4096)
    result = encode(engine, card, texts)
    assert not result.failures
    assert result.vectors.any(axis=1).all()
    assert engine.is_healthy()
