"""Shards with a device that queues batches, as a GPU does: a thread that computes what it is given, in that order.

What the shards say to each other, they say from there. Files in the cache directory have one of them come to harm.
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.waiting import wait_for
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.encoder import EncoderOrder, EncoderReport, ForwardPass
from worker.parallel.shard_encoder import ShardEncoder
from worker.placement.placement import Rank
from worker.runner import runner_process

FACTORY: Final = "tests.integration.placement.queued_shards:load_queued_shard"
# Nothing is computed while it exists.
HOLD: Final = "hold"
# What the last rank does, once, with a batch that is started behind another; the file goes.
EXHAUST: Final = "exhaust"
CRASH: Final = "crash"
HARMED: Final = 1


class QueuedShard(ShardEncoder):
    def __init__(self, order: EncoderOrder, rank: Rank) -> None:
        super().__init__(order, rank)
        self.directory: Path = order.cache_dir
        self.is_harmed = rank.number == HARMED
        self.device = ThreadPoolExecutor(1)
        self.num_queued = 0

    def prepare(self, batch: Batch) -> ForwardPass:
        return QueuedPass(super().prepare(batch), self)

    def describe(self) -> EncoderReport:
        return replace(super().describe(), is_queued=True)

    def takes(self, harm: str) -> bool:
        """Whether it is to happen now."""
        file = self.directory / harm
        if not self.is_harmed or self.num_queued < 2 or not file.exists():
            return False
        file.unlink()
        return True


class QueuedPass:
    def __init__(self, inner: ForwardPass, shard: QueuedShard) -> None:
        self._inner = inner
        self._shard = shard
        self._computed: Future[Ragged] | None = None

    def start(self) -> None:
        self._shard.num_queued += 1
        if self._shard.takes(CRASH):
            os._exit(7)
        is_exhausted = self._shard.takes(EXHAUST)
        self._computed = self._shard.device.submit(self._compute, is_exhausted)

    def results(self) -> Ragged:
        assert self._computed is not None
        try:
            return self._computed.result()
        finally:
            self._shard.num_queued -= 1

    def _compute(self, is_exhausted: bool) -> Ragged:
        wait_for(lambda: not (self._shard.directory / HOLD).exists(), 120)
        if is_exhausted:
            raise RuntimeError("can't allocate memory")
        return self._inner.results()


class PatientStream(runner_process.Stream):
    """While nothing is computed it waits for a second batch, and does not depend on how soon that one comes."""

    directory: Path

    def _start_next(self, *, must_wait: bool) -> bool:
        return super()._start_next(must_wait=must_wait or (self.directory / HOLD).exists())


def load_queued_shard(order: EncoderOrder) -> QueuedShard:
    assert order.rank is not None
    PatientStream.directory = order.cache_dir
    vars(runner_process)["Stream"] = PatientStream
    # However slow the machine is: behind a batch that took longer none is queued.
    runner_process.LONGEST_QUEUED_SECONDS = float("inf")  # type: ignore[attr-defined]
    return QueuedShard(order, order.rank)
