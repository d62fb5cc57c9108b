"""Two stages of which the first says what it has begun, and the last waits if a file in the cache directory says so."""

from itertools import count
from pathlib import Path
from typing import Final

from tests.waiting import wait_for
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.encoder import EncoderOrder, ForwardPass
from worker.parallel.shard_encoder import ShardEncoder
from worker.placement.placement import Rank

FACTORY: Final = "tests.integration.placement.stepping_shards:load_stepping_shard"
# The last rank computes nothing while it exists.
HOLD: Final = "hold"
# The last rank computes its next batch, and removes the file, when the first rank has begun the one after it.
STEP: Final = "step"


class SteppingShard(ShardEncoder):
    def __init__(self, order: EncoderOrder, rank: Rank) -> None:
        super().__init__(order, rank)
        self.directory: Path = order.cache_dir
        self.is_last = rank.is_last
        self.numbers = count()

    def prepare(self, batch: Batch) -> ForwardPass:
        return SteppingPass(super().prepare(batch), self, next(self.numbers))


class SteppingPass:
    def __init__(self, inner: ForwardPass, shard: SteppingShard, number: int) -> None:
        self._inner, self._shard, self._number = inner, shard, number

    def start(self) -> None:
        self._inner.start()

    def results(self) -> Ragged:
        directory = self._shard.directory
        if self._shard.is_last:
            wait_for(lambda: not (directory / HOLD).exists(), 120)
            if (directory / STEP).exists():
                wait_for((directory / f"begun {self._number + 1}").exists, 30)
                (directory / STEP).unlink()
        else:
            (directory / f"begun {self._number}").touch()
        return self._inner.results()


def load_stepping_shard(order: EncoderOrder) -> SteppingShard:
    assert order.rank is not None
    return SteppingShard(order, order.rank)
