"""Ranks that have a batch queued behind the current one: the order of all, and what becomes of two when one is lost."""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.faulty_engine import runner_pids
from tests.integration.placement.queued_shards import CRASH, EXHAUST, FACTORY, HOLD
from tests.rank_processes import share_between_two, starting_engines
from tests.waiting import wait_for
from vectormill.models.registry import DEFAULT_MODEL, EncodingOptions, Registry, make_spec
from worker.batching.batch import Batch, OwnedBatch
from worker.engine import engine as engine_module
from worker.engine.engine import Engine
from worker.engine.request import EncodeRequest
from worker.engine.request_queue import RequestQueue
from worker.placement.strategies import FULLY_SHARDED, PIPELINE, TENSOR
from worker.runner.messages import Encode
from worker.runner.runner_group import RunnerGroup
from worker.runner.starter import RunnerStarter
from worker.settings import WorkerSettings

CARD = Registry({}).card(DEFAULT_MODEL, weights=True)
SPEC = make_spec(CARD, EncodingOptions())
TEXTS = [f"text number {number} of a few more, " + "and longer " * (number % 12) for number in range(60)]
QUESTIONS = [f"question {number}?" for number in range(8)]
BATCH_TOKENS = 128

Vectors = NDArray[np.float32]


@pytest.fixture(scope="module")
def expected() -> tuple[Vectors, Vectors]:
    """Of TEXTS and of QUESTIONS."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(CARD.path), device="cpu")
    return tuple(model.encode(texts, normalize_embeddings=True) for texts in (TEXTS, QUESTIONS))


@pytest.fixture
def make_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Engine]]:
    monkeypatch.setattr(engine_module, "RunnerStarter", partial(RunnerStarter, shard_factory=FACTORY))

    def make(strategy: str) -> Engine:
        sharing = share_between_two(CARD, strategy)
        settings = WorkerSettings(
            precision="fp32", max_batch_tokens=BATCH_TOKENS, reuse_bytes=0, attention="packed"
        )
        return start(Engine(CARD, sharing.devices[0], settings, tmp_path, sharing=sharing))

    with starting_engines() as start:
        yield make


def encode(engine: Engine, texts: list[str], *, interactive: bool = False) -> Vectors:
    request = EncodeRequest("r", SPEC, [text.encode() for text in texts], interactive, 10_000)
    return engine.encode(request, threading.Event()).vectors


class Bulk:
    """All texts on their way through an engine, two batches of them started on every rank and held there."""

    def __init__(self, engine: Engine, threads: ThreadPoolExecutor, directory: Path) -> None:
        self.engine, self.threads = engine, threads
        self._hold = directory / HOLD
        self._hold.touch()
        self.vectors = threads.submit(encode, engine, TEXTS)
        started = engine._executor._in_flight.started
        wait_for(lambda: len(started) == 2)
        self.started = sorted(started)

    def let_go(self) -> None:
        self._hold.unlink()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as running:
        yield running


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Encode]:
    """Every batch that a group was given."""
    batches: list[Encode] = []
    send = RunnerGroup.send

    def note(group: RunnerGroup, message: Encode) -> None:
        batches.append(message)
        send(group, message)

    monkeypatch.setattr(RunnerGroup, "send", note)
    return batches


def list_texts(batch: Batch) -> list[list[int]]:
    return [batch.part(place, place + 1).input_ids.tolist() for place in range(len(batch))]


def assert_alike(vectors: Vectors, expected: Vectors) -> None:
    assert vectors.shape == expected.shape
    assert (vectors * expected).sum(axis=1).min() >= 0.9999


def test_urgent_batches_overtake_alike_on_all_ranks(
    make_engine: Callable[[str], Engine],
    threads: ThreadPoolExecutor,
    expected: tuple[Vectors, Vectors],
    tmp_path: Path,
) -> None:
    engine = make_engine(PIPELINE)
    report = engine.report()
    assert (report["is_packed"], report["is_queued"]) == (True, True)
    bulk = Bulk(engine, threads, tmp_path)
    urgent = threads.submit(encode, engine, QUESTIONS, interactive=True)
    outstanding = engine._executor._in_flight.outstanding
    wait_for(lambda: any(work.is_urgent for work in list(outstanding.values())))
    assert sorted(engine._executor._in_flight.started) == bulk.started, "what is started is not overtaken"
    bulk.let_go()
    assert_alike(urgent.result(), expected[1])
    assert_alike(bulk.vectors.result(), expected[0])
    assert engine.report()["num_restarts"] == 0


def test_a_rank_that_is_killed_takes_both_batches_along_and_neither_is_to_blame(
    make_engine: Callable[[str], Engine],
    threads: ThreadPoolExecutor,
    expected: tuple[Vectors, Vectors],
    tmp_path: Path,
) -> None:
    engine = make_engine(PIPELINE)
    first = runner_pids()
    bulk = Bulk(engine, threads, tmp_path)
    os.kill(first[1], signal.SIGKILL)
    bulk.let_go()
    assert_alike(bulk.vectors.result(), expected[0])
    assert set(first).isdisjoint(runner_pids()), "the rank that waited for the dead one has ended too"
    assert engine.report()["num_restarts"] == 1


def test_a_rank_that_ends_itself_behind_a_first_batch_has_each_of_both_tried_alone(
    make_engine: Callable[[str], Engine],
    threads: ThreadPoolExecutor,
    expected: tuple[Vectors, Vectors],
    sent: list[Encode],
    tmp_path: Path,
) -> None:
    engine = make_engine(FULLY_SHARDED)
    hold, crash, num_before = tmp_path / HOLD, tmp_path / CRASH, len(sent)
    hold.touch()
    crash.touch()
    vectors = threads.submit(encode, engine, TEXTS)
    wait_for(lambda: not crash.exists())
    hold.unlink()
    assert_alike(vectors.result(), expected[0])
    assert engine.report()["num_restarts"] == 1
    suspects = [each.batch.input_ids.tolist() for each in sent[num_before : num_before + 2]]
    again = [each.batch.input_ids.tolist() for each in sent[num_before + 2 :]]
    assert all(suspect in again for suspect in suspects), "whole, and neither in parts"


def test_the_second_of_two_batches_that_runs_out_of_memory_is_tried_in_parts_and_not_the_first(
    make_engine: Callable[[str], Engine],
    threads: ThreadPoolExecutor,
    expected: tuple[Vectors, Vectors],
    sent: list[Encode],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first goes back to those that wait, of which smaller batches are built for the budget that was halved."""
    waiting_again: list[OwnedBatch] = []
    take_back = RequestQueue.take_back

    def note(queue: RequestQueue, works: Iterable[OwnedBatch]) -> list[OwnedBatch]:
        kept = take_back(queue, works := list(works))
        waiting_again.extend(work for work in works if not any(work is each for each in kept))
        return kept

    monkeypatch.setattr(RequestQueue, "take_back", note)
    engine = make_engine(TENSOR)
    (tmp_path / EXHAUST).touch()
    bulk = Bulk(engine, threads, tmp_path)
    first, second = ({each.number: each.batch for each in sent}[number] for number in bulk.started)
    bulk.let_go()
    assert_alike(bulk.vectors.result(), expected[0])
    report: dict[str, Any] = engine.report()
    assert (report["num_out_of_memory"], report["num_restarts"]) == (1, 1)
    later = [each.batch.input_ids.tolist() for each in sent if each.number > bulk.started[1]]
    alone = list_texts(second)
    assert all(text in later for text in alone)
    untried = [text for work in waiting_again for text in list_texts(work.batch)]
    # It may have been answered before the other one failed; then it is not sent again.
    assert all(text in untried or text not in later for text in list_texts(first))
    assert not any(text in untried for text in list_texts(second))
