"""An engine whose model several devices share: the same vectors, and one rank that dies or fails ends them all."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from tests.faulty_engine import allow_passes, be_patient, runner_pids
from tests.integration.placement.bounded_shards import FACTORY, MOST_TOKENS
from tests.rank_processes import share_between_two, starting_engines
from tests.reference import packaged_reference
from tests.waiting import wait_for
from vectormill.jobs.item import OUT_OF_MEMORY
from vectormill.models.registry import DEFAULT_MODEL, EncodingOptions, Registry, make_spec
from worker.devices.device import CPU
from worker.engine import engine as engine_module
from worker.engine.engine import Engine
from worker.engine.request import EncodeRequest, RunnerDied
from worker.placement.strategies import FULLY_SHARDED, PIPELINE, TENSOR
from worker.runner.starter import RunnerStarter
from worker.settings import WorkerSettings

CARD = Registry({}).card(DEFAULT_MODEL, weights=True)
SPEC = make_spec(CARD, EncodingOptions())
TEXTS = [f"text number {number} of a few more, " + "and longer " * (number % 12) for number in range(60)]

# So many batches are a good part of a second, in which a rank is killed.
NUM_ROUNDS = 12

WEIGHT_BYTES = sum(path.stat().st_size for path in CARD.path.glob("*.safetensors"))

MakeEngine = Callable[..., Engine]


@pytest.fixture
def kind() -> str:
    """The kind of the devices, which tests/gpu replaces."""
    return CPU


@pytest.fixture
def make_engine(tmp_path: Path, kind: str) -> Iterator[MakeEngine]:
    def make(strategy: str, more: Mapping[str, Any] = MappingProxyType({}), **options: Any) -> Engine:
        sharing = share_between_two(CARD, strategy, kind)
        settings = WorkerSettings(**{"precision": "fp32", "max_batch_tokens": 1024, **more})
        return start(Engine(CARD, sharing.devices[0], settings, tmp_path, sharing=sharing, **options))

    with starting_engines() as start:
        yield make


def encode(engine: Engine, texts: list[str]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    request = EncodeRequest("r", SPEC, [text.encode() for text in texts], False, 10_000)
    return engine.encode(request, threading.Event()).vectors


@cache
def encode_by_reference() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.asarray(packaged_reference().encode(TEXTS, normalize_embeddings=True))


def start_and_compare(make_engine: MakeEngine, strategy: str) -> Engine:
    """A shared engine that has given the vectors of the reference library: a start takes two processes some seconds."""
    engine = make_engine(strategy)
    vectors = encode(engine, TEXTS)
    assert (vectors * encode_by_reference()).sum(axis=1).min() >= 0.9999
    alone = encode(engine, TEXTS[7:8])
    assert (alone[0] * vectors[7]).sum() >= 0.99999
    report = engine.report()
    assert strategy in report["backend"]["reason"]
    assert [loading["device"] for loading in report["loadings"]] in (["cpu:0", "cpu:1"], ["cuda:0", "cuda:1"])
    num_bytes = sum(loading["num_bytes"] for loading in report["loadings"])
    assert 0.95 * WEIGHT_BYTES < num_bytes < 2 * WEIGHT_BYTES  # all but the pooler; embeddings perhaps twice
    return engine


def test_fully_sharded_ranks_give_the_vectors_of_the_reference_library(make_engine: MakeEngine) -> None:
    start_and_compare(make_engine, FULLY_SHARDED)


def has_been_rebuilt(engine: Engine) -> bool:
    report = engine.report()
    return (report["num_restarts"], report["state"]) == (1, "running")


def test_a_pipeline_gives_them_too_and_a_rank_that_is_killed_ends_its_replica_which_is_built_anew(
    make_engine: MakeEngine,
) -> None:
    engine = start_and_compare(make_engine, PIPELINE)
    num_before = engine.report()["num_batches"]
    first = runner_pids()
    assert len(first) == 2
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(
            encode, engine, [f"{text} {number}" for number in range(NUM_ROUNDS) for text in TEXTS]
        )
        wait_for(lambda: engine.report()["num_batches"] >= num_before + 2)
        os.kill(first[1], signal.SIGKILL)
        assert len(running.result()) == NUM_ROUNDS * len(TEXTS), "nobody but the killer is to blame"
    wait_for(lambda: has_been_rebuilt(engine), seconds=60)
    assert set(first).isdisjoint(runner_pids()), "the rank that waited for the dead one has ended too"
    assert encode(engine, ["what no rank", "has computed", "before"]).shape == (3, CARD.dimension)


@pytest.mark.parametrize(
    ("longest_text_tokens", "most_restarts"), [(0, 3), (MOST_TOKENS, 0)], ids=["not predicted", "predicted"]
)
def test_texts_that_fit_on_no_rank_take_one_load_each_at_most_and_the_others_are_encoded(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, longest_text_tokens: int, most_restarts: int
) -> None:
    monkeypatch.setattr(engine_module, "RunnerStarter", partial(RunnerStarter, shard_factory=FACTORY))
    engine = make_engine(PIPELINE, longest_text_tokens=longest_text_tokens)
    too_long = [f"{number} {'and much longer ' * 60}" for number in range(2)]
    texts = [*too_long, *TEXTS]
    request = EncodeRequest("r", SPEC, [text.encode() for text in texts], False, 10_000)
    result = engine.encode(request, threading.Event())
    assert {place: failure.code for place, failure in result.failures.items()} == dict.fromkeys(
        range(2), OUT_OF_MEMORY
    )
    assert (result.vectors[2:] * encode_by_reference()).sum(axis=1).min() >= 0.9999
    report = engine.report()
    assert report["num_restarts"] <= most_restarts
    assert engine.is_healthy()


def test_tensor_parallel_ranks_give_them_too_and_one_that_stops_answering_is_ended_with_its_replica(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that is stopped keeps its pipe open: only the time that a forward pass may take tells."""
    engine = start_and_compare(make_engine, TENSOR)
    first = runner_pids()
    os.kill(first[1], signal.SIGSTOP)
    allow_passes(engine, 3.0)
    with pytest.raises(RunnerDied, match="took more than 3 s"):
        encode(engine, [f"{text} again" for text in TEXTS])
    be_patient(engine)
    stuck, stopped = [said.getMessage() for said in caplog.records if "rank " in said.getMessage()]
    assert "took more than 3 s, rank 0, not done with the batch" in stuck
    assert "_functional_collectives.py" in stuck, "where it waits for the other"
    assert "worker/parallel/shard_encoder.py" in stuck, "and in which kind of forward pass"
    assert f"process {first[1]} on cpu:1" in stopped
    assert "no answer" in stopped
    wait_for(lambda: has_been_rebuilt(engine), seconds=60)
    assert set(first).isdisjoint(runner_pids())
    assert encode(engine, ["what no rank", "has computed", "before"]).shape == (3, CARD.dimension)
