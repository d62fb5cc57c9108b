"""All that two GPUs must show first. Elsewhere each test says that it is skipped; rows for the CPU run the same code.

Two processors run the imported tests in tests/integration/placement; what they ask for is found here, so that here two
GPUs run them. That each strategy gives the vectors of a processor is also in test_engine_on_gpu.py.
"""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from tests.faulty_engine import be_patient, runner_pids
from tests.gpu.devices import NEEDS_TWO_GPUS
from tests.integration.placement.test_footprint_measured import measure_ranks
from tests.integration.placement.test_queued_ranks import QUESTIONS, encode
from tests.integration.placement.test_shared_engine import (
    TEXTS,
    encode_by_reference,
    has_been_rebuilt,
    make_engine,
    test_a_pipeline_gives_them_too_and_a_rank_that_is_killed_ends_its_replica_which_is_built_anew,
    test_fully_sharded_ranks_give_the_vectors_of_the_reference_library,
    test_texts_that_fit_on_no_rank_take_one_load_each_at_most_and_the_others_are_encoded,
)
from tests.waiting import wait_for
from worker.devices.device import CPU, CUDA
from worker.engine import engine as engine_module
from worker.engine.engine import Engine
from worker.placement.strategies import PIPELINE, SHARED, TENSOR
from worker.runner.starter import RunnerStarter

__all__ = [
    "make_engine",
    "test_a_pipeline_gives_them_too_and_a_rank_that_is_killed_ends_its_replica_which_is_built_anew",
    "test_fully_sharded_ranks_give_the_vectors_of_the_reference_library",
    "test_texts_that_fit_on_no_rank_take_one_load_each_at_most_and_the_others_are_encoded",
]

TWO_GPUS = pytest.param(CUDA, marks=NEEDS_TWO_GPUS)
KINDS = [CPU, TWO_GPUS]
MOST_ABOVE = 1.15
# So many times all texts take some seconds.
NUM_ROUNDS = {CPU: 12, CUDA: 1000}
LOAD_SECONDS = 60.0


@pytest.fixture(params=[TWO_GPUS])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@NEEDS_TWO_GPUS
@pytest.mark.parametrize("strategy", SHARED)
def test_the_allocator_hands_out_what_the_plan_predicts_and_no_more(strategy: str) -> None:
    for shard, reading in measure_ranks(CUDA, strategy, 1 << 16):
        taken = reading.peak_bytes - reading.before_bytes
        predicted = shard.weight_bytes + shard.activation_bytes
        assert taken <= predicted <= MOST_ABOVE * taken, (shard, reading)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", [PIPELINE, TENSOR])
def test_a_query_is_answered_while_bulk_goes_on(
    make_engine: Callable[..., Engine], kind: str, strategy: str
) -> None:
    engine = make_engine(strategy)
    expected = encode(engine, QUESTIONS)
    num_before = engine.report()["num_batches"]
    with ThreadPoolExecutor(1) as threads:
        texts = [f"{text} {number}" for number in range(NUM_ROUNDS[kind]) for text in TEXTS]
        bulk = threads.submit(encode, engine, texts)
        wait_for(lambda: engine.report()["num_batches"] > num_before + 2)
        answers = encode(engine, [f"{question} again" for question in QUESTIONS], interactive=True)
        assert not bulk.done()
        assert (answers * expected).sum(axis=1).min() > 0.8, "one word more in each"
        assert len(bulk.result()) == len(texts)


@NEEDS_TWO_GPUS
def test_a_rank_that_runs_out_of_memory_ends_its_replica_and_the_next_has_smaller_batches(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    factory = partial(RunnerStarter, shard_factory="tests.gpu.cramped:load_cramped_shard")
    monkeypatch.setattr(engine_module, "RunnerStarter", factory)
    engine = make_engine(TENSOR, {"max_batch_tokens": 1 << 18, "reuse_bytes": 0})
    vectors = encode(engine, [f"{number} " + "many words " * 60 for number in range(4000)])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
    report = engine.report()
    assert 0 < report["num_restarts"] <= report["num_out_of_memory"]
    assert (encode(engine, TEXTS) * encode_by_reference()).sum(axis=1).min() >= 0.9999


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_collective_that_takes_too_long_ends_all_ranks(
    make_engine: Callable[..., Engine], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the time-out of NCCL or gloo, which is only for a worker that sees nothing itself."""
    monkeypatch.setattr(engine_module, "COLLECTIVE_GRACE_SECONDS", 1.0)
    timeouts = {"model_load_timeout_seconds": LOAD_SECONDS, "forward_timeout_seconds": LOAD_SECONDS}
    engine = make_engine(TENSOR, timeouts)
    be_patient(engine)
    first = runner_pids()
    os.kill(first[1], signal.SIGSTOP)
    assert (encode(engine, TEXTS) * encode_by_reference()).sum(axis=1).min() >= 0.9999
    wait_for(lambda: has_been_rebuilt(engine), seconds=60)
    assert set(first).isdisjoint(runner_pids())
