"""plan_placement, as a table of machines and models, and what has to hold for every plan."""

import re
import time
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vectormill.domain.errors import ConfigurationError, ModelDoesNotFit
from vectormill.models.model_shape import ModelShape, TensorSize
from worker.devices.described import describe_inventory
from worker.devices.device import BYTES_PER_SECOND, CPU, PCIE, Inventory, divide_gpus
from worker.placement.capacity import GIB, DeviceCapacity
from worker.placement.placement import Placement, PlanSettings, Replica
from worker.placement.planner import plan_placement
from worker.placement.replicas import DoesNotFit, ReplicaBuilder
from worker.placement.strategies import (
    FULLY_SHARDED,
    HYBRID,
    NUM_SLOTS,
    OFFLOAD,
    PIPELINE,
    REPLICATE,
    SHARED,
    TENSOR,
)


@dataclass(frozen=True)
class Model:
    shape: ModelShape
    max_tokens: int


def model(
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    vocabulary: int,
    *,
    kv_heads: int | None = None,
    max_tokens: int = 512,
    is_gated: bool = False,
) -> Model:
    """An architecture from the numbers of its config.json."""
    shared = kv_heads or heads
    keys = hidden * shared // heads
    widths = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    widths += [(intermediate, hidden)] * (2 if is_gated else 1) + [(hidden, intermediate)]
    tensors = [TensorSize("embeddings.weight", (vocabulary, hidden), None)]
    tensors += [TensorSize("layer.weight", shape, layer) for layer in range(layers) for shape in widths]
    size = hidden // heads
    shape = ModelShape(
        layers,
        hidden,
        heads,
        shared,
        size,
        intermediate,
        is_gated,
        tensors=tuple(tensors),
        model_type="qwen3" if is_gated else "bert",
        sees_later=not is_gated,
    )
    return Model(shape, max_tokens)


MODELS = {
    "22M": model(6, 384, 1536, 12, 30522, max_tokens=256),  # all-MiniLM-L6
    "110M": model(12, 768, 3072, 12, 30522),  # BERT-base
    "335M": model(24, 1024, 4096, 16, 30522),  # BERT-large
    "560M": model(24, 1024, 4096, 16, 250002),  # XLM-R-large
    "0.6B": model(
        28, 1024, 3072, 16, 151936, kv_heads=8, max_tokens=8192, is_gated=True
    ),  # Qwen3-Embedding-0.6B
    "4B": model(36, 2560, 9728, 32, 151936, kv_heads=8, max_tokens=8192, is_gated=True),  # Qwen3-Embedding-4B
    "7B": model(
        32, 4096, 14336, 32, 32000, kv_heads=8, max_tokens=4096, is_gated=True
    ),  # Mistral-7B embedders
    "70B": model(80, 8192, 28672, 64, 128256, kv_heads=8, max_tokens=4096, is_gated=True),  # Llama-70B
}

# Devices, model, precision, strategy, devices of each replica, reason.
CASES = [
    ("1x8GiB", "22M", "fp32", REPLICATE, [1], "tiny"),
    ("1x8GiB", "4B", "int8", REPLICATE, [1], "3.9 GiB in int8; 6.8 in bf16 would not fit"),
    ("2x8GiB", "7B", "int8", PIPELINE, [2], "6.9 GiB exceed the 6.2 of one"),
    (
        "4x8GiB",
        "7B",
        "bf16",
        PIPELINE,
        [4],
        "three quarters of a card are not enough for half of the weights",
    ),
    ("2x16GiB", "7B", "bf16", PIPELINE, [2], "99 % of a card are weights: fits, but leaves too little room"),
    ("2x16GiB,nvlink", "7B", "bf16", PIPELINE, [2], "the same, where all-reduces are cheap"),
    (
        "3x16GiB,nvlink",
        "7B",
        "bf16",
        PIPELINE,
        [3],
        "8 key heads are not divisible by 3, and two ranks leave a card idle",
    ),
    ("4x16GiB,nvlink-pairs", "7B", "bf16", PIPELINE, [2, 2], "each pair over its own bridge"),
    ("4x16GiB,sockets", "7B", "bf16", PIPELINE, [2, 2], "each pair on its own processor"),
    ("2x24GiB", "7B", "bf16", REPLICATE, [1, 1], "fits twice"),
    ("2x24GiB", "7B", "fp32", PIPELINE, [2], "26 GiB"),
    ("4x24GiB", "7B", "fp32", PIPELINE, [2, 2], "as small as fits, replicated"),
    ("8x24GiB", "22M", "bf16", REPLICATE, [1] * 8, "no reason to share"),
    ("4x24GiB", "70B", "int8", PIPELINE, [4], "68 GiB"),
    ("8x24GiB", "70B", "bf16", PIPELINE, [8], "130 GiB over PCIe"),
    ("8x24GiB,nvlink", "70B", "bf16", PIPELINE, [8], "130 GiB over NVLink"),
    ("2x80GiB", "70B", "bf16", PIPELINE, [2], "over PCIe all-reduces cost more than the bubble"),
    ("2x80GiB,nvlink", "70B", "bf16", PIPELINE, [2], "over NVLink they do not"),
    ("8x80GiB,nvlink", "70B", "bf16", PIPELINE, [2] * 4, "groups as small as fit"),
    ("8x80GiB", "70B", "int8", PIPELINE, [2] * 4, "68 of 71 GiB leave no room for what is restored"),
    ("8x141GiB,nvlink", "70B", "bf16", PIPELINE, [2] * 4, "130 GiB are just too many for one"),
    ("8x141GiB,nvlink", "70B", "int8", REPLICATE, [1] * 8, "quantization makes replicas"),
    ("1x24GiB+1x8GiB", "7B", "bf16", PIPELINE, [2], "the small card takes some layers off the large one"),
    ("2x16GiB+2x80GiB", "7B", "bf16", HYBRID, [1, 1, 2], "large cards alone, small ones together"),
    ("1x80GiB+1x24GiB", "70B", "int8", PIPELINE, [2], "unequal stages"),
    ("1x8GiB+1x24GiB", "335M", "fp32", REPLICATE, [1, 1], "replicas on cards of two sizes"),
]


@pytest.mark.parametrize(("devices", "model", "precision", "strategy", "sizes", "reason"), CASES)
def test_a_machine_and_a_model_get_the_strategy_that_an_engineer_would_choose(
    devices: str, model: str, precision: str, strategy: str, sizes: list[int], reason: str
) -> None:
    start = time.process_time()
    placement = plan(devices, model, precision)
    assert time.process_time() - start < 1, reason
    assert placement.strategy == strategy, reason
    assert sorted(len(replica.devices) for replica in placement.replicas) == sorted(sizes), reason
    check_plan(placement, describe_inventory(devices))


def test_layers_that_cannot_be_cut_are_divided_in_another_way() -> None:
    chosen, inventory = MODELS["7B"], describe_inventory("2x16GiB,nvlink")
    why = "its heads share their positions"
    settings = PlanSettings(
        "bf16",
        chosen.max_tokens,
        find_obstacle=lambda strategy, _, precision: why if strategy == TENSOR else "",
    )
    placement = plan_placement(inventory, chosen.shape, settings)
    assert placement.strategy == PIPELINE
    assert any("its heads share their positions" in rejection.reason for rejection in placement.rejected)


def plan(devices: str, name: str, precision: str, strategy: str = "auto") -> Placement:
    chosen = MODELS[name]
    settings = PlanSettings(precision, chosen.max_tokens, strategy=strategy)
    return plan_placement(describe_inventory(devices), chosen.shape, settings)


def check_plan(placement: Placement, inventory: Inventory) -> None:
    """What holds for every plan."""
    memory = {device.name: device.memory_bytes for device in inventory.accelerators}
    held = [shard for replica in placement.replicas for stage in replica.stages for shard in stage.shards]
    assert all(shard.weight_bytes + shard.activation_bytes <= memory[shard.device] for shard in held)
    assert all(shard.weight_bytes + shard.activation_bytes <= shard.capacity_bytes for shard in held)
    assert len({shard.device for shard in held}) == len(held), "no device holds two things"
    assert {shard.device for shard in held} | set(placement.idle) == set(memory), (
        "every device is busy or explained"
    )
    assert all(len(reason) > 10 for reason in placement.idle.values())
    for replica in placement.replicas:
        layers = [(stage.first_layer, stage.num_layers) for stage in replica.stages]
        assert all(count > 0 for _, count in layers)
        starts = [sum(count for _, count in layers[:place]) for place in range(len(layers))]
        assert [first for first, _ in layers] == starts, "stages are consecutive"
        assert replica.max_batch_tokens > 0
        assert replica.relative_rate > 0
    assert placement.reasons


fleets = st.lists(st.sampled_from([8, 12, 16, 24, 40, 80]), min_size=1, max_size=5)
kinds_of_links = st.sampled_from(["pcie", "nvlink", "nvlink-pairs", "sockets"])


@settings(max_examples=80, deadline=None)
@given(fleets, st.sampled_from(sorted(MODELS)), st.sampled_from(["fp32", "bf16", "int8"]), kinds_of_links)
def test_a_plan_never_exceeds_a_device_and_never_idles_one_without_saying_why(
    sizes: list[int], name: str, precision: str, link: str
) -> None:
    devices = "+".join(f"{size}GiB" for size in sizes) + f",{link}"
    try:
        placement = plan(devices, name, precision)
    except ModelDoesNotFit as error:
        message = str(error)
    else:
        check_plan(placement, describe_inventory(devices))
        return
    assert "iB more" in message or "lack" in message
    assert "(1)" in message


@settings(max_examples=40, deadline=None)
@given(
    fleets,
    st.sampled_from([8, 16, 80]),
    st.sampled_from(["0.6B", "7B", "70B"]),
    st.sampled_from(["pcie", "nvlink"]),
    st.sampled_from(["", ",16cores,20GiB", ",16cores,160GiB"]),
)
@example([24], 4, "70B", "pcie", ",16cores,160GiB")
@example([24], 24, "70B", "pcie", ",16cores,160GiB")
def test_a_plan_never_gets_worse_when_a_device_is_added(
    sizes: list[int], more: int, name: str, link: str, host: str
) -> None:
    def predict(fleet: list[int]) -> tuple[float, bool]:
        devices = "+".join(f"{size}GiB" for size in fleet) + f",{link}{host}"
        try:
            placement = plan(devices, name, "bf16")
        except ModelDoesNotFit:
            return 0.0, False
        assert host or placement.strategy != OFFLOAD
        return placement.relative_rate, placement.strategy == OFFLOAD

    # A simpler plan is taken when it is at most 5 % slower; beyond that, more devices are never slower.
    (before, is_offload), (after, is_offload_still) = predict(sizes), predict([*sizes, more])
    assert after >= 0.95 * before - 1e-9 or (after and is_offload and not is_offload_still)


def test_main_memory_that_one_replica_needs_is_not_divided() -> None:
    placement = plan("1x24GiB+1x4GiB,16cores,160GiB", "70B", "bf16")
    assert [replica.devices for replica in placement.replicas] == [("cuda:0",)]
    assert placement.idle == {"cuda:1": "the others need its share of main memory"}
    twice = plan("3x24GiB,16cores,350GiB", "70B", "bf16")
    assert len(twice.replicas) == 2
    start = time.process_time()
    many = plan("24x24GiB,16cores,9000GiB", "70B", "fp32", OFFLOAD)
    assert len(many.replicas) == 24
    assert time.process_time() - start < 2  # 0.2 s where it was written


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([8, 16, 24]), min_size=1, max_size=3),
    st.sampled_from([2, 16, 64, 400, 1000]),
    st.sampled_from(["4B", "7B", "70B"]),
)
def test_layers_wait_in_main_memory_only_where_nothing_else_fits(
    sizes: list[int], memory: int, name: str
) -> None:
    gpus = "+".join(f"{size}GiB" for size in sizes)
    devices = f"{gpus},16cores,{memory}GiB"
    try:
        expected = plan(gpus, name, "bf16")
    except ModelDoesNotFit:
        pass
    else:
        assert replace(plan(devices, name, "bf16"), proposals=expected.proposals) == expected
        return
    try:
        placement = plan(devices, name, "bf16")
    except ModelDoesNotFit as error:
        more = re.search(r"\(\d\) (\d+) GiB more main memory", str(error))
        if more is None:  # the devices have no room for two layers and a text
            devices = f"{gpus},16cores,4000GiB"
            with pytest.raises(ModelDoesNotFit, match="The closest plan"):
                plan(devices, name, "bf16")
            return
        memory += int(more[1])
        placement = plan(f"{gpus},16cores,{memory}GiB", name, "bf16")
    check_plan(placement, describe_inventory(gpus))
    assert placement.strategy == OFFLOAD
    held = [shard for each in placement.replicas for shard in each.stages[0].shards]
    assert sum(shard.host_bytes for shard in held) < memory << 30
    for replica, shard in zip(placement.replicas, held, strict=True):
        assert shard.weight_bytes < shard.capacity_bytes
        assert shard.host_bytes > 0
        assert replica.num_offloaded % NUM_SLOTS == 0
        seconds = shard.host_bytes / BYTES_PER_SECOND[PCIE]
        assert any(f"at least {seconds:.1f} s over PCIe" in reason for reason in placement.reasons)


@pytest.mark.parametrize("strategy", [REPLICATE, *SHARED])
def test_a_strategy_that_is_asked_for_is_taken(strategy: str) -> None:
    placement = plan("4x24GiB,nvlink", "0.6B", "bf16", strategy)
    assert placement.strategy == strategy
    check_plan(placement, describe_inventory("4x24GiB,nvlink"))


def test_a_model_that_fits_nowhere_says_by_how_much_and_what_would_help() -> None:
    with pytest.raises(ModelDoesNotFit) as refused:
        plan("1x24GiB", "7B", "fp32")
    message = str(refused.value)
    assert "its weights take 26.5 GiB in fp32" in message
    assert "GiB more" in message
    assert message.splitlines()[1:] == [
        "  (1) --precision bf16: the weights take 13.2 GiB, and replicate on 1 device fits",
        "  (2) --precision int8: the weights take 7.0 GiB, and replicate on 1 device fits",
        "  (3) 17 GiB more main memory, from which layers would be copied for every batch",
        "  (4) 1 more device like cuda:0, 2 in total",
        "  (5) one device with at least 31 GiB of memory, for texts of up to 512 tokens",
        "  (6) one device with at least 32 GiB of memory",
    ]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([8, 16, 24]), min_size=1, max_size=3),
    st.sampled_from([0, 16, 64, 160]),
    st.sampled_from(["4B", "7B", "70B"]),
    st.sampled_from(["fp32", "bf16"]),
    st.sampled_from(["auto", REPLICATE, PIPELINE, OFFLOAD]),
)
@example([24], 64, "70B", "bf16", "auto")
@example([16], 160, "7B", "bf16", "auto")
@example([16, 24, 8], 0, "70B", "bf16", "auto")
@example([8, 8, 8], 0, "7B", "bf16", "auto")
def test_what_is_advised_helps_as_printed(
    sizes: list[int], host: int, name: str, precision: str, strategy: str
) -> None:
    def place(sizes: list[int], host: int, precision: str, strategy: str) -> Placement:
        gpus = "+".join(f"{size}GiB" for size in sizes) + (f",16cores,{host}GiB" if host else "")
        asked = PlanSettings(precision, 32_768, strategy=strategy)
        return plan_placement(describe_inventory(gpus), MODELS[name].shape, asked)

    try:
        placement = place(sizes, host, precision, strategy)
        told, longest = "\n".join(placement.proposals), placement.longest_text_tokens
        if longest < 32_768 and strategy == "auto" and (sizes, host, name) == ([16], 160, "7B"):
            assert "--strategy offload: offload on 1 device fits" in told
    except ModelDoesNotFit as error:
        told, longest = str(error), 0
    for way in re.findall(r"\(\d\) (.*)", told):
        numbers = [int(each.replace(",", "")) for each in re.findall(r"\b\d[\d,]*", way)]
        is_flag = way.startswith("--")
        if "more main memory" in way:
            helped = place(sizes, host + numbers[0], precision, strategy)
        elif is_flag:
            flag, value = re.findall(r"--(\w+) (\w+):", way)[0]
            asked = {"precision": precision, "strategy": strategy} | {flag: value}
            helped = place(sizes, host, **asked)
            assert re.search(rf"\b{helped.strategy}\b.* fits", way)
        elif "in total" in way:
            helped = place([*sizes, *[max(sizes)] * numbers[0]], host, precision, strategy)
        else:
            helped = place([numbers[0]], host, precision, strategy)
        assert helped.longest_text_tokens > longest
        assert helped.longest_text_tokens >= (numbers[-1] if way.endswith("tokens") else 32_768), way


def test_no_main_memory_is_advised_where_the_device_has_no_other() -> None:
    inventory = describe_inventory("1x24GiB,16cores,24GiB")
    gpus = tuple(replace(gpu, shares_host_memory=True) for gpu in inventory.accelerators)
    for strategy in ("auto", OFFLOAD):
        with pytest.raises(ModelDoesNotFit) as refused:
            plan_placement(
                replace(inventory, accelerators=gpus),
                MODELS["70B"].shape,
                PlanSettings("bf16", 4096, strategy=strategy),
            )
        assert "more main memory" not in str(refused.value)


def test_devices_are_proposed_that_help_and_that_hold_every_text() -> None:
    def plan_stages(number: int) -> Placement:
        asked = PlanSettings("bf16", 32_768, strategy=PIPELINE)
        return plan_placement(describe_inventory(f"{number}x12GiB"), MODELS["7B"].shape, asked)

    with pytest.raises(ModelDoesNotFit) as refused:
        plan_stages(1)
    lines = str(refused.value).splitlines()
    assert lines[0].startswith("No plan by pipeline is possible: there is only one device.")
    proposed = [line for line in lines if "more device" in line]
    assert [line.endswith(" tokens") for line in proposed] == [True, False]
    for line in proposed:
        longest = plan_stages(int(line.split(", ")[1].split()[0])).longest_text_tokens
        assert line.endswith(f"{longest:,} tokens" if longest < 32_768 else "in total")


def test_a_strategy_that_is_asked_for_is_named_where_it_has_no_room_and_no_other_is_praised() -> None:
    placement = plan("2x16GiB", "7B", "bf16", REPLICATE)
    assert placement.proposals[0].startswith("No plan by replicate has room for the longest text")
    assert not plan("2x24GiB", "7B", "bf16", PIPELINE).proposals  # int8 would not make replicas of it
    shared = plan("2x24GiB", "7B", "bf16", FULLY_SHARDED)
    assert shared.reasons[1].endswith("room for 65,536 tokens, 32,768 on each device.")


def test_the_ways_out_that_a_refusal_names_lead_out() -> None:
    assert plan("1x24GiB", "7B", "bf16").strategy == REPLICATE
    assert plan("2x24GiB", "7B", "fp32").strategy == PIPELINE
    assert plan("1x32GiB", "7B", "fp32").longest_text_tokens == MODELS["7B"].max_tokens
    assert plan("1x31GiB", "7B", "fp32").longest_text_tokens < MODELS["7B"].max_tokens


def test_a_strategy_that_does_not_fit_is_told_of_one_that_does() -> None:
    with pytest.raises(ModelDoesNotFit, match=r"\(1\) --strategy auto: pipeline over 2 fits"):
        plan("2x24GiB", "7B", "fp32", REPLICATE)


def test_heads_that_do_not_divide_are_refused_with_the_divisors() -> None:
    placement = plan("3x24GiB,nvlink", "7B", "fp32", TENSOR)
    assert len(placement.replicas[0].devices) == 2
    assert list(placement.idle) == ["cuda:2"]
    assert placement.idle["cuda:2"].endswith(
        "divided among 3 devices; possible numbers are 1, 2, 4, 8, 16, 32"
    )


@pytest.mark.parametrize(
    ("size", "model", "expected"), [(80, "22M", 96), (80, "7B", 12), (40, "7B", 12), (12, "70B", None)]
)
def test_eight_gpus_with_twelve_workers_each_are_planned_at_once(
    size: int, model: str, expected: int | None
) -> None:
    """Nearly all of these drafts could not be faster than a replica on each part, so they are not made."""
    names, inventory = divide_gpus(
        ",".join(f"cuda:{n}*12" for n in range(8)), describe_inventory(f"8x{size}GiB")
    )
    settings = PlanSettings("bf16", MODELS[model].max_tokens, devices=names)
    start = time.process_time()
    if expected is None:
        with pytest.raises(ModelDoesNotFit):
            plan_placement(inventory, MODELS[model].shape, settings)
    else:
        assert len(plan_placement(inventory, MODELS[model].shape, settings).replicas) == expected
    assert time.process_time() - start < 1  # 0.2 s where it was written


@settings(max_examples=40, deadline=None)
@given(fleets, st.sampled_from(["0.6B", "7B", "70B"]), st.sampled_from(["bf16", "int8"]))
def test_a_plan_is_made_for_the_longest_text_that_any_plan_holds(
    sizes: list[int], name: str, precision: str
) -> None:
    inventory = describe_inventory("+".join(f"{size}GiB" for size in sizes))
    chosen = MODELS[name]

    def find_longest(max_tokens: int) -> int:
        asked = PlanSettings(precision, max_tokens)
        try:
            return plan_placement(inventory, chosen.shape, asked).longest_text_tokens
        except ModelDoesNotFit:
            return 0

    longest = find_longest(chosen.max_tokens)
    assert longest in range(0, chosen.max_tokens + 1, 512)
    assert not longest or find_longest(longest) == longest
    if longest < chosen.max_tokens:
        assert find_longest(longest + 512) <= longest


def test_a_mix_that_is_asked_for_is_made_or_refused() -> None:
    mixed = plan("2x16GiB+2x80GiB", "7B", "bf16", HYBRID)
    assert sorted(len(replica.devices) for replica in mixed.replicas) == [1, 1, 2]
    with pytest.raises(ModelDoesNotFit, match="needs some devices that hold a whole replica and others"):
        plan("2x80GiB", "7B", "bf16", HYBRID)
    whole = plan("2x80GiB", "7B", "bf16")
    assert not any(HYBRID in rejection.alternative for rejection in whole.rejected)


def test_workers_that_share_a_gpu_share_its_rate() -> None:
    names, inventory = divide_gpus("cuda:0*4,cuda:1", describe_inventory("2x80GiB"))
    settings = PlanSettings("bf16", MODELS["22M"].max_tokens, devices=names)
    placement = plan_placement(inventory, MODELS["22M"].shape, settings)
    assert [round(replica.relative_rate, 6) for replica in placement.replicas] == [0.25] * 4 + [1]


@pytest.mark.parametrize(
    ("precision", "num_devices", "refusal"),
    [
        ("int8", 2, None),  # 192 inputs a device are three groups of 64
        ("int8", 4, "splitting 384 inputs of a matrix among 4 devices breaks groups of 64 int8 weights"),
        ("fp32", 4, None),  # nothing is shared by numbers
    ],
)
def test_compressed_weights_are_cut_by_inputs_only_where_that_breaks_no_group_with_one_scale(
    precision: str, num_devices: int, refusal: str | None
) -> None:
    needs = PlanSettings(precision, 256, attention="sdpa")
    rooms = tuple(DeviceCapacity(f"cpu:{number}", CPU, GIB, 1e12) for number in range(num_devices))
    built = ReplicaBuilder(MODELS["22M"].shape, needs, CPU).build(TENSOR, rooms, "memory")
    if refusal is None:
        assert isinstance(built, Replica)
    else:
        assert isinstance(built, DoesNotFit)
        assert refusal in built.reason


@pytest.mark.parametrize(
    "text", ["4x24", "GiB", "0xGiB", "4x24GiB,usb", "100x24GiB", "0x24GiB", "2x0GiB", "2x24GiB*0", "24GiB*"]
)
def test_a_description_that_cannot_be_read_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"4x24GiB,nvlink|1 to 64 devices"):
        describe_inventory(text)


def cut_into_parts(cards: str) -> Inventory:
    """As many devices as letters, on the GPU that the letter names."""
    inventory = describe_inventory(f"{len(cards)}x12GiB")
    parts = zip(inventory.accelerators, cards, strict=True)
    return replace(inventory, accelerators=tuple(replace(device, card=card) for device, card in parts))


@pytest.mark.parametrize("strategy", SHARED)
def test_parts_of_one_gpu_share_no_model_and_the_reason_is_said(strategy: str) -> None:
    with pytest.raises(ModelDoesNotFit, match="cuda:0 and cuda:1 are parts of one GPU"):
        plan_placement(cut_into_parts("aa"), MODELS["7B"].shape, PlanSettings("bf16", 512, strategy=strategy))


def test_parts_of_different_gpus_share_a_model() -> None:
    placement = plan_placement(cut_into_parts("aabb"), MODELS["7B"].shape, PlanSettings("bf16", 512))
    assert [set(replica.devices) for replica in placement.replicas] == [
        {"cuda:0", "cuda:2"},
        {"cuda:1", "cuda:3"},
    ]


def test_parts_of_one_gpu_hold_a_replica_each() -> None:
    placement = plan_placement(cut_into_parts("aa"), MODELS["22M"].shape, PlanSettings("bf16", 256))
    assert placement.strategy == REPLICATE
    assert len(placement.replicas) == 2
