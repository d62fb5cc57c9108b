"""Several models on one machine: devices, cores and memory are divided among them, and the plans say how."""

from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vectormill.domain.errors import ConfigurationError, ModelDoesNotFit, ModelError
from vectormill.models.model_card import ModelCard
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.devices.described import describe_inventory
from worker.devices.device import CPU, Inventory
from worker.encoder.choice import choose_precision
from worker.launcher import assign_replicas
from worker.placement.capacity import OVERHEAD_BYTES
from worker.placement.strategies import OFFLOAD, REPLICATE
from worker.placement.tenants import Planned
from worker.plan import find_shape, follow_plan, plan_machine, plan_worker
from worker.settings import WorkerSettings

GIB = 1 << 30
PLANS = Path(__file__).parents[3] / "docs/plans"
SEVEN_B, SEVENTY_B = str(PLANS / "mistral-7b"), str(PLANS / "llama-70b")


@cache
def outline(model: str) -> ModelCard:
    card = Registry({}).outline(model)
    return card if card.static is not None else replace(card, shape=find_shape(card))


def plan(
    devices: str | Inventory,
    *models: str,
    named: str = "auto",
    precision: str = "auto",
    strategy: str = "auto",
) -> tuple[Planned, ...]:
    inventory = describe_inventory(devices) if isinstance(devices, str) else devices
    wanted = WorkerSettings(devices=named, precision=precision, strategy=strategy)
    return plan_machine([outline(model) for model in models], inventory, wanted)


def check_memory(inventory: Inventory, plans: tuple[Planned, ...]) -> None:
    """All plans together keep below the share of every device, and of main memory, that may be filled."""
    held = dict.fromkeys((device.name for device in inventory.accelerators), 0)
    layers = 0
    for planned in plans:
        for replica in planned.placement.replicas:
            for shard in (shard for stage in replica.stages for shard in stage.shards):
                held[shard.device] += shard.weight_bytes + shard.activation_bytes + OVERHEAD_BYTES["cuda"]
                layers += shard.host_bytes
    for device in inventory.accelerators:
        assert held[device.name] <= 0.9 * device.memory_bytes
    assert layers <= 0.9 * inventory.memory_bytes


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from([16, 24, 48, 80]), min_size=1, max_size=4),
    st.sampled_from([24, 80, 160, 512]),
    st.lists(st.sampled_from([DEFAULT_MODEL, SEVEN_B, SEVENTY_B]), min_size=2, max_size=3),
    st.sampled_from(["auto", "fp32", "int8"]),
    st.sampled_from(["pcie", "nvlink-pairs"]),
    st.sampled_from(["auto", "auto", OFFLOAD]),
)
@example([24] * 8, 512, [SEVEN_B, SEVEN_B], "fp32", "pcie", "auto")
@example([80] * 4, 512, [SEVENTY_B, SEVENTY_B], "auto", "nvlink-pairs", "auto")
@example([80, 80], 80, [SEVENTY_B, SEVENTY_B], "auto", "pcie", "auto")
@example([16] * 4, 24, [SEVEN_B] * 4, "fp32", "pcie", "auto")
def test_main_memory_changes_no_plan_for_several_models_and_is_given_away_once(
    sizes: list[int], memory: int, models: list[str], precision: str, link: str, strategy: str
) -> None:
    gpus = "+".join(f"{size}GiB" for size in sizes) + f",{link}"
    inventory = describe_inventory(f"{gpus},16cores,{memory}GiB")
    try:
        plans = plan(inventory, *models, precision=precision, strategy=strategy)
    except ModelDoesNotFit:
        plans = ()
    check_memory(inventory, plans)
    try:
        expected = plan(gpus, *models, precision=precision, strategy=strategy)
    except ModelDoesNotFit:
        return
    assert [each.placement for each in plans] == [each.placement for each in expected]


def test_main_memory_goes_to_the_models_that_need_it() -> None:
    large, small = plan("2x24GiB,16cores,280GiB", SEVENTY_B, SEVEN_B)
    assert large.placement.strategy == OFFLOAD
    assert small.placement.strategy == REPLICATE
    plans = plan("2x80GiB,16cores,160GiB", SEVENTY_B, SEVENTY_B)
    assert [each.placement.strategy for each in plans] == [OFFLOAD, OFFLOAD]


@pytest.mark.parametrize(
    ("devices", "models"),
    [
        ("1x24GiB", [DEFAULT_MODEL, SEVEN_B]),
        ("2x24GiB", [SEVEN_B, SEVEN_B]),
        ("4x24GiB,nvlink", [SEVEN_B, DEFAULT_MODEL, SEVEN_B]),
        ("8x80GiB,nvlink", [SEVENTY_B, SEVEN_B]),
        ("1x80GiB", [SEVEN_B, SEVEN_B, DEFAULT_MODEL]),
    ],
)
def test_models_of_one_machine_never_fill_a_device_together(devices: str, models: list[str]) -> None:
    plans = plan(devices, *models)
    check_memory(describe_inventory(devices), plans)
    assert [planned.name for planned in plans] == [Registry({}).outline(model).name for model in models]


def test_models_that_fit_beside_each_other_share_all_devices_and_say_so() -> None:
    plans = plan("2x80GiB", DEFAULT_MODEL, SEVEN_B)
    for planned in plans:
        assert planned.placement.strategy == REPLICATE
        assert len(planned.placement.replicas) == 2
        assert f"{DEFAULT_MODEL} and mistral-7b share these devices" in planned.placement.reasons[0]


def test_models_that_do_not_fit_beside_each_other_have_devices_of_their_own_and_say_so() -> None:
    one, other = plan("2x24GiB", SEVEN_B, SEVEN_B)
    assert (one.placement.devices, other.placement.devices) == (("cuda:0",), ("cuda:1",))
    assert one.placement.reasons[0] == (
        "The devices are divided among 2 models: mistral-7b has cuda:0; mistral-7b has cuda:1."
    )


def test_models_that_fit_in_no_way_are_refused_with_what_to_do() -> None:
    with pytest.raises(ModelDoesNotFit, match="vectormill worker --model NAME"):
        plan("1x16GiB", SEVEN_B, SEVEN_B)


@pytest.mark.parametrize("devices", ["8cores,32GiB", "2x8cores,64GiB", "3cores,16GiB"])
def test_cores_are_divided_among_models_and_no_core_is_given_twice(devices: str) -> None:
    plans = plan(devices, DEFAULT_MODEL, DEFAULT_MODEL)
    cores = [{core for device in planned.devices for core in device.cores} for planned in plans]
    assert not cores[0] & cores[1]
    assert len(cores[0] | cores[1]) == len(describe_inventory(devices).physical_cores)
    assert "models share the processor:" in plans[0].placement.reasons[0]
    assert abs(len(cores[0]) - len(cores[1])) <= 1


def test_fewer_cores_than_models_are_shared() -> None:
    plans = plan("1cores,16GiB", DEFAULT_MODEL, DEFAULT_MODEL)
    assert [planned.devices[0].cores for planned in plans] == [(0,), (0,)]
    assert "all cores, as the others do," in plans[0].placement.reasons[0]


def test_main_memory_is_divided_too() -> None:
    inventory = replace(describe_inventory("8cores,64GiB"), free_bytes=40 * GIB)
    plans = plan(inventory, DEFAULT_MODEL, SEVEN_B)
    offered = [planned.placement.replicas[0].stages[0].shards[0].capacity_bytes for planned in plans]
    assert sum(offered) + 2 * OVERHEAD_BYTES[CPU] <= 0.9 * 64 * GIB - 24 * GIB
    assert offered[0] < offered[1]


def test_every_numa_node_has_a_replica_of_its_own_with_its_cores_and_memory() -> None:
    (planned,) = plan("2x32cores,256GiB", DEFAULT_MODEL)
    assert [device.name for device in planned.devices] == ["cpu:0", "cpu:1"]
    assert [device.cores for device in planned.devices] == [tuple(range(32)), tuple(range(32, 64))]
    assert [device.memory_bytes for device in planned.devices] == [128 * GIB] * 2
    assert planned.placement.strategy == REPLICATE
    assert len(planned.placement.replicas) == 2


def test_no_two_devices_of_any_model_overlap_where_models_cut_through_nodes() -> None:
    plans = plan("2x8cores,64GiB", *[DEFAULT_MODEL] * 3)
    cores = [set(device.cores) for planned in plans for device in planned.devices]
    assert all(not one & other for one, other in combinations(cores, 2))
    assert all(max(each) // 8 == min(each) // 8 for each in cores), "no device spans two nodes"


def test_a_plan_of_one_model_does_not_depend_on_the_order_of_the_others() -> None:
    first, second = plan("2x80GiB", DEFAULT_MODEL, SEVEN_B)
    other, one = plan("2x80GiB", SEVEN_B, DEFAULT_MODEL)
    assert first.placement.replicas == one.placement.replicas
    assert second.placement.replicas == other.placement.replicas


def test_two_models_on_two_numa_nodes_have_one_each() -> None:
    plans = plan("2x32cores,256GiB", DEFAULT_MODEL, DEFAULT_MODEL)
    assert [[device.num_threads for device in planned.devices] for planned in plans] == [[32], [32]]


def test_workers_that_share_a_gpu_have_a_whole_model_each_and_never_split_it_between_them() -> None:
    (planned,) = plan("2x24GiB,nvlink", DEFAULT_MODEL, named="cuda:0*3,cuda:1")
    assert [replica.devices for replica in planned.placement.replicas] == [
        ("cuda:0.0",), ("cuda:0.1",), ("cuda:0.2",), ("cuda:1",),
    ]  # fmt: skip
    assert planned.placement.strategy == REPLICATE
    shared = [replica.stages[0].shards[0] for replica in planned.placement.replicas[:3]]
    whole = planned.placement.replicas[3].stages[0].shards[0]
    assert all(shard.capacity_bytes < whole.capacity_bytes / 3 for shard in shared)
    with pytest.raises(ModelDoesNotFit):
        plan("1x24GiB", SEVEN_B, named="cuda:0*2")


STATIC = Path(__file__).parents[2] / "data" / "model2vec" / "whole"


@pytest.mark.parametrize("named", ["auto", "cuda", "cuda:0", "cuda:0*2", "cpu"])
def test_static_embeddings_are_placed_on_the_processor_whichever_device_is_named(named: str) -> None:
    (planned,) = plan("1x24GiB,16cores,64GiB", str(STATIC), named=named)
    (replica,) = planned.placement.replicas
    assert replica.devices == ("cpu:0",)
    assert planned.placement.precision == "fp32"
    assert planned.placement.longest_text_tokens == 512


def test_static_embeddings_leave_the_gpus_to_other_models() -> None:
    first, second = plan("2x24GiB,nvlink,16cores,64GiB", str(STATIC), SEVEN_B)
    assert [replica.devices for replica in first.placement.replicas] == [("cpu:0",)]
    assert {device.kind for device in second.devices} == {"cuda"}
    assert any("added up by the processor" in reason for reason in first.placement.reasons)
    with pytest.raises(ConfigurationError, match="runs on the processor, which the description leaves out"):
        plan("2x24GiB", str(STATIC), SEVEN_B)


def test_static_embeddings_share_a_processor_with_other_models() -> None:
    plans = plan("16cores,64GiB", DEFAULT_MODEL, str(STATIC), named="cpu")
    assert [len(planned.devices[0].cores) for planned in plans] == [8, 8]


def make_host(num_gpus: int, free_gib: int = 36) -> Inventory:
    """Return a host of 40 GiB whose GPUs have no memory of their own."""
    host = replace(describe_inventory("8cores,40GiB"), free_bytes=free_gib * GIB)
    gpus = describe_inventory(f"{num_gpus}x40GiB").accelerators
    shared = (replace(gpu, free_bytes=free_gib * GIB, shares_host_memory=True) for gpu in gpus)
    return replace(host, accelerators=tuple(shared))


def count_taken(plans: tuple[Planned, ...]) -> int:
    """Return the bytes that the plans may fill: what a static model needs, and all that others are offered."""
    taken = 0
    for planned in plans:
        for replica in planned.placement.replicas:
            for shard in (shard for stage in replica.stages for shard in stage.shards):
                is_static = "added up by the processor" in str(planned.placement.reasons)
                held = shard.weight_bytes + shard.activation_bytes if is_static else shard.capacity_bytes
                taken += held + OVERHEAD_BYTES[shard.device.split(":")[0]]
    return taken


@pytest.mark.parametrize(
    ("num_gpus", "named", "models"),
    [
        (1, "cuda:0,cpu:0", [DEFAULT_MODEL]),
        (1, "cuda:0*2,cpu:0", [DEFAULT_MODEL]),
        (2, "auto", [DEFAULT_MODEL]),
        (1, "auto", [DEFAULT_MODEL, str(STATIC)]),
        (2, "auto", [DEFAULT_MODEL, str(STATIC), SEVEN_B]),
        (2, "cuda:0,cuda:1,cpu:0", [DEFAULT_MODEL, DEFAULT_MODEL]),
    ],
)
def test_memory_that_gpus_share_with_the_processor_is_planned_once(
    num_gpus: int, named: str, models: list[str]
) -> None:
    plans = plan(make_host(num_gpus), *models, named=named)
    assert 0.8 * 32 * GIB < count_taken(plans) <= 0.9 * 40 * GIB - 4 * GIB


def test_what_other_models_take_is_their_own_and_used_by_nobody_else() -> None:
    cards = describe_inventory("1x24GiB")
    inventory = replace(cards, accelerators=(replace(cards.accelerators[0], free_bytes=22 * GIB),))
    for planned in plan(inventory, DEFAULT_MODEL, SEVEN_B):
        (device,) = planned.devices
        assert device.free_bytes is not None
        used = device.memory_bytes - device.free_bytes
        assert abs(used / device.memory_bytes - 2 / 24) < 0.001
        assert device.num_parts == 2
        assert planned.placement.relative_rate == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("devices", "wanted", "expected"),
    [
        ("1x16GiB@sm_75+1x16GiB@sm_86", "auto", "fp16"),  # bf16 would be emulated by the first
        ("1x16GiB@sm_86+1x16GiB@sm_75", "auto", "fp16"),
        ("2x16GiB@sm_86", "auto", "bf16"),
        ("2x16GiB@sm_75", "auto", "fp16"),
        ("1x24GiB@sm_86+1x24GiB@sm_75", "fp32", "fp32"),
    ],
)
def test_a_model_is_planned_in_a_precision_that_all_devices_support(
    devices: str, wanted: str, expected: str
) -> None:
    card = Registry({}).outline(SEVEN_B)
    asked = WorkerSettings(precision=wanted)
    inventory = describe_inventory(devices)
    (planned,) = plan_machine([card], inventory, asked)
    assert planned.placement.precision == expected
    for assignment in assign_replicas(planned):
        followed = follow_plan(asked, card, assignment).precision
        each = [choose_precision(followed, device, card.model_type) for device in inventory.accelerators]
        assert {choice.value for choice in each} == {expected}


def test_a_precision_that_one_device_would_emulate_is_refused() -> None:
    card = Registry({}).outline(SEVEN_B)
    with pytest.raises(ModelError, match="a GPU of 16 GiB would emulate bf16; use fp16"):
        plan_worker(card, describe_inventory("1x24GiB@sm_86+1x16GiB@sm_75"), WorkerSettings(precision="bf16"))
    with pytest.raises(ModelDoesNotFit, match="int8 weights are computed in bf16 on some of these devices"):
        plan_worker(
            card,
            describe_inventory("1x16GiB@sm_75+1x16GiB@sm_86"),
            WorkerSettings(precision="int8", strategy="pipeline"),
        )


def test_only_precisions_that_all_devices_support_are_proposed() -> None:
    with pytest.raises(ModelDoesNotFit) as refused:
        plan_worker(
            Registry({}).outline(SEVEN_B),
            describe_inventory("1x24GiB@sm_75"),
            WorkerSettings(precision="fp32", strategy="replicate"),
        )
    ways = str(refused.value).splitlines()[1:]
    assert [way.split()[2] for way in ways[:2]] == ["fp16:", "int8:"]
