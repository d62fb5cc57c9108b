"""The predicted memory of ranks, compared with what their processes really take."""

import numpy as np
import pytest

from benchmarks.children.gauged import Reading
from benchmarks.placed import PlacedModel, plan_replica
from tests.rank_processes import find_two
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.devices.device import CPU
from worker.encoder.choice import FP32
from worker.placement.placement import Shard
from worker.placement.strategies import FULLY_SHARDED, PIPELINE
from worker.runner.starter import Sharing


@pytest.mark.parametrize(
    "strategy",
    [
        PIPELINE,  # hidden states wait and leave
        # The vocabulary, half of this model, is gathered for a moment.
        pytest.param(FULLY_SHARDED, marks=pytest.mark.slow),
    ],
)
def test_what_the_plan_counts_for_a_rank_is_near_what_it_really_takes(strategy: str) -> None:
    for shard, reading in measure_ranks(CPU, strategy, 1024):
        predicted = shard.weight_bytes + shard.activation_bytes
        most = reading.peak_bytes - reading.before_bytes
        # Pages of libraries' code are counted or not: how many are mapped is the kernel's choice, not the model's.
        taken = min(max(predicted, most - reading.file_bytes), most)
        assert abs(predicted / taken - 1) < 0.15, (shard, reading)


def measure_ranks(kind: str, strategy: str, batch_tokens: int) -> list[tuple[Shard, Reading]]:
    """The prediction for each of two ranks, and what it has taken, with batches as large as the plan allows."""
    _, devices = find_two(kind)
    card = Registry({}).card(DEFAULT_MODEL, weights=True)
    replica = plan_replica(card, devices, FP32, strategy, 128, batch_tokens)
    # Every eighth is shorter, so that there is padding, and with it a mask.
    texts = [
        np.arange(1000, 1128 - (place % 8 == 7), dtype=np.int32)
        for place in range(replica.max_batch_tokens // 128)
    ]
    giving_back = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # as above
    with PlacedModel(Sharing(replica, devices), card, FP32, environment=giving_back) as system:
        for _ in range(2):  # what a kernel makes once for all is predicted with every batch
            system.encode(texts, replica.max_batch_tokens)
        readings = system.readings()
    shards = [shard for stage in replica.stages for shard in stage.shards]
    assert len(shards) == 2
    return list(zip(shards, readings, strict=True))
