"""Plans of models that score and extract: with their own heads, scores and precisions."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.classifiers import STRUCTBERT
from tests.models import read_card
from tests.rexuninlu import GOLDEN
from vectormill.domain.errors import ModelDoesNotFit, ModelError
from vectormill.models.model_shape import ModelShape
from vectormill.models.registry import Registry
from worker.devices.described import describe_inventory
from worker.placement.capacity import GIB, DeviceCapacity
from worker.placement.footprint import BIAS_BYTES, count_weights, make_footprint
from worker.placement.placement import Placement, PlanSettings, Replica
from worker.placement.replicas import ReplicaBuilder
from worker.placement.strategies import FULLY_SHARDED, PIPELINE, REPLICATE, TENSOR
from worker.plan import find_shape, plan_worker
from worker.settings import WorkerSettings

REX = GOLDEN / "model"


def plan(directory: Path, devices: str = "2x8GiB", **settings: object) -> Placement:
    card = Registry({}).outline(str(directory))
    return plan_worker(card, describe_inventory(devices), WorkerSettings(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", [PIPELINE, TENSOR, FULLY_SHARDED])
def test_structbert_is_shared_as_the_bert_that_it_is(strategy: str) -> None:
    placement = plan(STRUCTBERT / "model", strategy=strategy)
    assert placement.strategy == strategy
    assert all(shard.weight_bytes > 0 for each in placement.replicas[0].stages for shard in each.shards)


def test_the_last_stage_holds_the_head_in_fp32() -> None:
    shape = read_card(STRUCTBERT / "model").find_shape()
    hidden = shape.hidden_size
    assert shape.dense_values == (hidden * hidden + hidden) + (2 * hidden + 2)
    without = make_footprint(replace(shape, dense_values=0), "bf16", "padded (sdpa)")
    whole = make_footprint(shape, "bf16", "padded (sdpa)")
    assert whole.weight_bytes - without.weight_bytes == 4 * shape.dense_values


def test_a_head_is_outlined_where_there_are_no_weights_yet(tmp_path: Path) -> None:
    for file in (STRUCTBERT / "model").glob("*.json"):
        shutil.copy(file, tmp_path)
    outlined = find_shape(Registry({}).outline(str(tmp_path)))
    assert outlined.dense_values == read_card(STRUCTBERT / "model").find_shape().dense_values


@pytest.mark.parametrize("strategy", [REPLICATE, PIPELINE, FULLY_SHARDED])
def test_an_extraction_is_planned_in_the_precision_that_it_is_computed_in(strategy: str) -> None:
    placement = plan(REX, strategy=strategy)
    assert (placement.strategy, placement.precision) == (strategy, "bf16")
    shards = [shard for each in placement.replicas for stage in each.stages for shard in stage.shards]
    assert all(shard.activation_bytes > BIAS_BYTES for shard in shards)
    assert not any("int8" in proposal for proposal in placement.proposals)


def test_an_extraction_says_what_it_cannot_be() -> None:
    (tensor,) = [each for each in plan(REX).rejected if each.alternative == TENSOR]
    assert "relative positions" in tensor.reason
    with pytest.raises(ModelDoesNotFit, match="relative positions"):
        plan(REX, strategy=TENSOR)
    with pytest.raises(ModelError, match="only fp32 and bf16, not int8"):
        plan(REX, precision="int8")


def build(shape: ModelShape, strategy: str) -> Replica:
    rooms = tuple(DeviceCapacity(f"cuda:{number}", "cuda", 1024 * GIB, 1e12) for number in range(2))
    built = ReplicaBuilder(shape, PlanSettings("fp32", 512), "cuda").build(
        strategy, rooms[: 1 if strategy == REPLICATE else 2], "pcie"
    )
    assert isinstance(built, Replica)
    return built


def test_what_is_made_at_load_is_whole_on_every_rank_and_layer_by_layer_in_stages() -> None:
    shape = read_card(REX).find_shape()
    weights = count_weights(shape, "fp32", 4)
    made = shape.num_layers * weights.made_bytes
    assert made == 3 * 2 * 512 * 32 * 4
    (alone,) = build(shape, REPLICATE).stages[0].shards
    assert alone.weight_bytes == weights.total_bytes
    stages = [shard.weight_bytes for stage in build(shape, PIPELINE).stages for shard in stage.shards]
    assert sum(stages) == weights.total_bytes + weights.common_bytes  # each has the relative positions
    for shard in build(shape, FULLY_SHARDED).stages[0].shards:
        assert shard.weight_bytes == -(-(weights.total_bytes - made) // 2) + made + weights.row_bytes
