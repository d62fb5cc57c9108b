"""A shared engine works on as many batches at once as it has stages, and queries overtake what it was not yet sent."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.integration.placement.stepping_shards import FACTORY, HOLD, STEP
from tests.rank_processes import share_between_two, starting_engines
from tests.reference import packaged_reference
from tests.waiting import wait_for
from vectormill.models.registry import DEFAULT_MODEL, EncodingOptions, Registry, make_spec
from vectormill.ragged import Ragged
from worker.batching.batch import OwnedBatch
from worker.engine import engine as engine_module
from worker.engine.engine import Engine
from worker.engine.request import EncodeRequest
from worker.engine.request_queue import RequestQueue
from worker.placement.strategies import PIPELINE
from worker.runner.messages import BATCHES_AHEAD
from worker.runner.starter import RunnerStarter
from worker.settings import WorkerSettings

CARD = Registry({}).card(DEFAULT_MODEL, weights=True)
SPEC = make_spec(CARD, EncodingOptions())
TEXTS = [f"text number {number} of a few more, " + "and longer " * (number % 12) for number in range(60)]
NUM_STAGES = 2


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(engine_module, "RunnerStarter", partial(RunnerStarter, shard_factory=FACTORY))
    sharing = share_between_two(CARD, PIPELINE)
    settings = WorkerSettings(precision="fp32", max_batch_tokens=128, reuse_bytes=0)
    with starting_engines() as start:
        yield start(Engine(CARD, sharing.devices[0], settings, tmp_path, sharing=sharing))


def encode(
    engine: Engine, texts: list[str], *, interactive: bool = False
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    request = EncodeRequest("r", SPEC, [text.encode() for text in texts], interactive, 10_000)
    return engine.encode(request, threading.Event()).vectors


def test_the_first_stage_computes_the_next_batch_while_the_last_one_has_the_one_before(
    engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / STEP).touch()
    vectors = encode(engine, TEXTS)
    expected = np.asarray(packaged_reference().encode(TEXTS, normalize_embeddings=True))
    assert (vectors * expected).sum(axis=1).min() >= 0.9999
    assert not (tmp_path / STEP).exists()
    assert engine.report()["num_restarts"] == 0


def test_a_query_is_answered_before_the_bulk_that_was_submitted_ahead_of_it(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivered: list[bool] = []
    deliver = RequestQueue.deliver

    def note(queue: RequestQueue, work: OwnedBatch, results: Ragged, *seconds: float) -> None:
        delivered.append(work.is_urgent)
        deliver(queue, work, results, *seconds)

    monkeypatch.setattr(RequestQueue, "deliver", note)
    (tmp_path / HOLD).touch()
    outstanding = engine._executor._in_flight.outstanding
    num_sent = NUM_STAGES + BATCHES_AHEAD
    with ThreadPoolExecutor(2) as threads:
        bulk = threads.submit(encode, engine, TEXTS)
        wait_for(lambda: len(outstanding) == num_sent)
        query = threads.submit(encode, engine, ["what is asked?"], interactive=True)
        wait_for(lambda: any(work.is_urgent for work in list(outstanding.values())))
        (tmp_path / HOLD).unlink()
        assert len(query.result()) == 1
        assert len(bulk.result()) == len(TEXTS)
    assert delivered.index(True) == num_sent, "what ranks have is not overtaken"
    assert len(delivered) > 2 * num_sent, "and there was more"
