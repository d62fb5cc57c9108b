"""The device never waits: while one chunk is encoded, another is tokenized and a third is written to Postgres.

A real model process that holds still, a tokenizer and a commit that stop at a gate: each stage is seen busy while the
others are. Nothing here measures time.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest
from sqlalchemy import Engine

from tests.database import ask
from tests.faulty_engine import HANG_WHILE_FILE_EXISTS, SPEC, making_engines
from tests.protocol import dispatch_all, make_items, submit
from tests.waiting import wait_for
from vectormill.domain.task import EMBED
from vectormill.jobs.jobs import find_job
from vectormill.jobs.transitions import add_up_jobs
from vectormill.settings import Settings
from worker.chunk.chunk_encoder import ChunkEncoder, Result
from worker.chunk.commit import PostgresSink
from worker.chunk.counts import Timesheet
from worker.chunk.leases import LeaseKeeper
from worker.engine.engine import Engine as EncodingEngine
from worker.identity import WorkerIdentity
from worker.tasks.embed import Embed

PATIENCE_SECONDS = 120


class Gate:
    """A place in a stage: tells that somebody stands there, and lets nobody through before it is opened."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self._is_open = threading.Event()

    def pass_through(self) -> None:
        self.is_reached.set()
        assert self._is_open.wait(PATIENCE_SECONDS), "the gate was never opened"

    def open(self) -> None:
        self._is_open.set()


class GatedSink(PostgresSink):
    """Writes as the worker does, when its gate is open."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, threading.Event())
        self.gate = Gate()

    def commit(self, *arguments: Any) -> float:
        self.gate.pass_through()
        return super().commit(*arguments)


@pytest.fixture
def encoding(tmp_path: Path) -> Iterator[EncodingEngine]:
    with making_engines(tmp_path) as make:
        engine = make(max_batch_tokens=2048)
        engine.start()
        yield engine


def test_one_chunk_is_tokenized_and_another_written_while_the_device_encodes_a_third(
    engine: Engine, encoding: EncodingEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = WorkerIdentity("fake-cpu0@test", uuid4(), uuid4(), SPEC.model, slots=4)
    keeper = LeaseKeeper(engine, identity, dict, heartbeat_seconds=0.5, lease_seconds=30)
    sink, tokenizing = GatedSink(engine), Gate()
    timesheet = Timesheet(lambda: encoding.run_seconds)
    encoder = ChunkEncoder(engine, encoding, keeper, sink, timesheet, identity, Settings())
    job = submit(engine, make_items(12), spec=SPEC)
    first, second, third = [dispatch.chunk_id for dispatch in dispatch_all(engine)]
    held, results = tmp_path / HANG_WHILE_FILE_EXISTS, list[Result]()

    keeper.start()
    with ThreadPoolExecutor(3) as threads:
        written = threads.submit(encoder.encode_chunk, first)
        assert sink.gate.is_reached.wait(PATIENCE_SECONDS)

        held.touch()
        encoded = threads.submit(encoder.encode_chunk, second)
        wait_for(lambda: len(encoding._executor._in_flight.outstanding) == 1)

        tokenizer = cast(Embed, encoding._tasks[EMBED])._tokenizer
        tokenize = tokenizer.tokenize

        def tokenize_behind_the_gate(*arguments: Any, **options: Any) -> Any:
            tokenizing.pass_through()
            return tokenize(*arguments, **options)

        monkeypatch.setattr(tokenizer, "tokenize", tokenize_behind_the_gate)
        tokenized = threads.submit(encoder.encode_chunk, third)
        assert tokenizing.is_reached.wait(PATIENCE_SECONDS)

        # Now each stage has a chunk in hand. The third one's batch reaches the device before the second's has ended.
        assert not any(chunk.done() for chunk in (written, encoded, tokenized))
        tokenizing.open()
        wait_for(lambda: len(encoding._executor._in_flight.outstanding) == 2)
        held.unlink()
        sink.gate.open()
        results += [chunk.result(PATIENCE_SECONDS) for chunk in (written, encoded, tokenized)]
    keeper.stop()

    assert [result["outcome"] for result in results] == ["done"] * 3
    add_up_jobs(engine)  # no scheduler does it here, for commits that found the job's row locked
    ended = ask(engine, find_job, job.id)
    assert (ended.state, ended.num_done) == ("completed", 12)
    assert set(ended.stage_shares) == {"load", "tokenize", "wait", "collate", "run", "collect", "persist"}
    assert ended.bottleneck is not None
