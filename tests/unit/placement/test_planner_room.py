"""What a plan makes of too little memory: shorter batches, shorter texts, other precisions, and what others use."""

from dataclasses import replace
from pathlib import Path

import pytest

from vectormill.domain.errors import ModelDoesNotFit
from vectormill.models.registry import Registry
from worker.batching.budget import BudgetRules, TokenBudget
from worker.devices.described import describe_inventory
from worker.devices.detect import round_free_bytes
from worker.devices.device import CUDA, Inventory
from worker.placement.capacity import OVERHEAD_BYTES
from worker.placement.placement import Placement
from worker.placement.strategies import REPLICATE
from worker.plan import plan_worker
from worker.settings import WorkerSettings

GIB = 1 << 30
SEVEN_B = str(Path(__file__).parents[3] / "docs/plans/mistral-7b")  # reads 32,768 tokens
SMALL = "all-MiniLM-L6-v2"


def plan(inventory: Inventory, model: str = SEVEN_B, **settings: object) -> Placement:
    return plan_worker(Registry({}).outline(model), inventory, WorkerSettings(**settings))  # type: ignore[arg-type]


def used_by_others(inventory: Inventory, *used_gib: float) -> Inventory:
    return replace(
        inventory,
        accelerators=tuple(
            replace(device, free_bytes=device.memory_bytes - int(gib * GIB))
            for device, gib in zip(inventory.accelerators, used_gib, strict=True)
        ),
    )


def test_a_plan_that_has_no_room_for_a_full_batch_is_made_and_rated_by_what_it_holds() -> None:
    # 512 tokens are the longest text of this model, and 4,096 were wanted.
    placement = plan(describe_inventory("1x0.9GiB"), SMALL)
    (replica,) = placement.replicas
    assert 256 <= replica.max_batch_tokens < 4096
    assert replica.relative_rate < 0.8
    assert placement.longest_text_tokens == replica.longest_text_tokens == 256


def test_every_precision_that_fits_is_offered_the_one_that_loses_least_first() -> None:
    with pytest.raises(ModelDoesNotFit) as refused:
        plan(describe_inventory("1x12GiB"))
    first, *_ = str(refused.value).splitlines()[1:]
    assert first.startswith(
        "  (1) --precision int8: the weights take 7.0 GiB, and replicate on 1 device fits"
    )
    with pytest.raises(ModelDoesNotFit) as refused:
        plan(describe_inventory("1x24GiB"), precision="fp32")
    ways = str(refused.value).splitlines()[1:]
    assert [way.split()[2] for way in ways[:2]] == ["bf16:", "int8:"]


def test_what_others_use_of_a_device_is_not_planned() -> None:
    cards = describe_inventory("2x24GiB")
    assert plan(cards).strategy == REPLICATE
    shared = plan(used_by_others(cards, 10, 10))
    assert shared.strategy != REPLICATE
    assert "and what others use (10.0 GiB of cuda:0, 10.0 GiB of cuda:1)" in shared.reasons[0]
    with pytest.raises(ModelDoesNotFit, match=r"others use 40\.0 GiB"):
        plan(used_by_others(cards, 20, 20))


def test_cards_of_which_a_little_is_used_stay_alike() -> None:
    free = [round_free_bytes(24 * GIB, 24 * GIB - (used << 20)) for used in (310, 330, 0)]
    assert free == [24 * GIB - GIB // 2, 24 * GIB - GIB // 2, 24 * GIB]


@pytest.mark.parametrize("share", [None, 0.7, 1.0])
@pytest.mark.parametrize("devices", ["1x24GiB", "3x12GiB", "4x16GiB,nvlink-pairs", "1x24GiB+2x16GiB"])
def test_a_planned_batch_is_never_shrunk_by_the_watermark_at_rest(devices: str, share: float | None) -> None:
    settings = WorkerSettings() if share is None else WorkerSettings(memory_high_watermark=share)
    budget = TokenBudget(BudgetRules(32_768, high_watermark=settings.memory_high_watermark))
    inventory = used_by_others(
        describe_inventory(devices), *[0.5] * len(describe_inventory(devices).accelerators)
    )
    memory = {device.name: device.memory_bytes for device in inventory.accelerators}
    placement = plan(inventory, memory_high_watermark=settings.memory_high_watermark)
    for replica in placement.replicas:
        for shard in (shard for stage in replica.stages for shard in stage.shards):
            held = OVERHEAD_BYTES[CUDA] + shard.weight_bytes + shard.activation_bytes + GIB // 2
            assert not budget.observe_memory(held / memory[shard.device])
