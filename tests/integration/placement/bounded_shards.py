"""Shards of which the last rank has no memory for a text of more than MOST_TOKENS, even alone."""

from typing import Final

from worker.batching.batch import Batch
from worker.encoder.encoder import EncoderOrder, ForwardPass
from worker.parallel.shard_encoder import ShardEncoder

FACTORY: Final = "tests.integration.placement.bounded_shards:load_bounded_shard"
MOST_TOKENS: Final = 100


class BoundedShard(ShardEncoder):
    def prepare(self, batch: Batch) -> ForwardPass:
        if self._rank.is_last and batch.max_length > MOST_TOKENS:
            raise RuntimeError("can't allocate memory")
        return super().prepare(batch)


def load_bounded_shard(order: EncoderOrder) -> BoundedShard:
    assert order.rank is not None
    return BoundedShard(order, order.rank)
