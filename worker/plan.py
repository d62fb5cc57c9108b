"""The placement of models as a worker with these settings would plan it, and the rate that it may reach.

Nothing is started, and the hardware is not queried: its inventory is given.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Final, TypeVar

from vectormill.domain.errors import ConfigurationError, ModelError
from vectormill.models.model_card import ModelCard
from vectormill.models.model_shape import ModelShape
from worker.devices.device import CPU, CUDA, Device, Inventory, divide_gpus, parse_devices
from worker.encoder.choice import (
    BF16,
    EXTRACTION_PRECISIONS,
    FP16,
    FP32,
    PACKED,
    PRECISIONS,
    AttentionShape,
    choose_extraction_precision,
    choose_precision,
    choose_static_precision,
    find_packing_obstacle,
)
from worker.encoder.encoder import AUTO
from worker.placement.capacity import GIB, OVERHEAD_BYTES, guess_flops
from worker.placement.footprint import count_results
from worker.placement.obstacles import find_obstacle
from worker.placement.placement import Assignment, Placement, PlanSettings
from worker.placement.strategies import REPLICATE
from worker.placement.tenants import Planned, Tenant, plan_tenants
from worker.settings import WorkerSettings

# Tokens per second that a worker with two cores feeds, in texts of 100 tokens: measured with eight of them on
# an H200 with 16 cores (docs/LOG.md, 2026-11-27). Texts of 16 tokens are fed at half the rate.
FED_TOKENS_PER_SECOND: Final = 500_000
CORES_PER_WORKER: Final = 2
# The memory that a part of a GPU has at least: for the batches of a worker, and for its weights in fp32.
LEAST_PART_BYTES: Final = 4 * GIB
BYTES_PER_VALUE: Final = 16

Owner = TypeVar("Owner", Inventory, Device)


def choose_num_workers(device: Device, shape: ModelShape) -> tuple[int, str]:
    """Return how many workers should feed the device with texts for this model, and the reason.

    A worker claims, tokenizes and commits under one interpreter lock, so more cores do not make it faster beyond
    the first two, but more workers do. Each has a model of its own on the GPU.
    """
    if device.kind != CUDA:
        return 1, ""
    rate = guess_flops(device) / shape.flop_per_token
    num_values = sum(tensor.num_values for tensor in shape.tensors)
    limits = {
        f"it may compute some {rate:,.0f} tokens/s": ceil(rate / FED_TOKENS_PER_SECOND),
        f"it has {device.num_tokenizer_threads} cores of the host": device.num_tokenizer_threads
        // CORES_PER_WORKER,
        f"it has {device.memory_bytes // GIB} GiB of memory": device.memory_bytes
        // (LEAST_PART_BYTES + BYTES_PER_VALUE * num_values),
    }
    reason, count = min(limits.items(), key=lambda limit: limit[1])
    if count <= 1:
        return 1, ""
    return count, (
        f"{count} workers feed {device.name}: one feeds some {FED_TOKENS_PER_SECOND:,} tokens/s, and {reason}."
    )


WHY_CPU: Final = (
    "Static embeddings are added up by the processor, where reading the text takes nearly all of the time."
)


def plan_worker(card: ModelCard, inventory: Inventory, settings: WorkerSettings) -> Placement:
    """Plan the placement of one model that has the machine to itself.

    Raises ModelError, ModelDoesNotFit or ConfigurationError.
    """
    return plan_machine([card], inventory, settings)[0].placement


def plan_machine(
    cards: Sequence[ModelCard], inventory: Inventory, settings: WorkerSettings
) -> tuple[Planned, ...]:
    """Plan the placement of all models that the machine serves, in their order.

    Static embeddings are placed on the processor, whichever devices are chosen. Raises the same errors as
    `plan_worker`.
    """
    static = [card for card in cards if card.static is not None]
    if static and any(
        device.kind != CPU for device in parse_devices(*divide_gpus(settings.devices, inventory))
    ):
        if not inventory.memory_bytes:
            raise ConfigurationError(
                f"The model {static[0].name!r} runs on the processor, which the description leaves out; add it, as in "
                "2x24GiB,16cores,64GiB."
            )
        others = [card for card in cards if card.static is None]
        on_cpu = plan_machine(static, inventory, settings.model_copy(update={"devices": CPU}))
        planned = {each.name: _add_reasons(each, [WHY_CPU]) for each in on_cpu}
        replicas = [replica for each in on_cpu for replica in each.placement.replicas]
        shards = [shard for replica in replicas for stage in replica.stages for shard in stage.shards]
        taken = sum(OVERHEAD_BYTES[CPU] + shard.weight_bytes + shard.activation_bytes for shard in shards)
        inventory = _change_host_memory(inventory, taken_bytes=taken)
        if others:
            planned |= {each.name: each for each in plan_machine(others, inventory, settings)}
        return tuple(planned[card.name] for card in cards)
    # This takes a second each if there are no weights yet.
    cards = [replace(card, shape=find_shape(card)) for card in cards]
    wanted, reasons = _choose_devices(cards, inventory, settings)
    names, inventory = divide_gpus(wanted, inventory)
    # Main memory is divided among the processor and the GPUs that have no other, as far as they are used.
    devices = parse_devices(names, inventory)
    owners = {device.card or device.name for device in devices if device.shares_host_memory}
    number = len(owners) + any(device.kind == CPU for device in devices)
    if number > 1:
        inventory = _change_host_memory(inventory, number=number)
    settings = settings.model_copy(update={"devices": names})
    plans = plan_tenants(inventory, [_make_tenant(card, inventory, settings) for card in cards])
    return tuple(_add_reasons(planned, reasons) for planned in plans)


def _choose_devices(
    cards: Sequence[ModelCard], inventory: Inventory, settings: WorkerSettings
) -> tuple[str, list[str]]:
    """Return the devices with a number of workers for each GPU if it is left to us, and the reasons.

    Several models share a GPU already, each with a worker of its own.
    """
    if settings.devices != AUTO or len(cards) > 1 or settings.strategy not in (AUTO, REPLICATE):
        return settings.devices, []
    shape = find_shape(cards[0])
    chosen = {device.name: choose_num_workers(device, shape) for device in inventory.accelerators}
    reasons = [reason for _, reason in chosen.values() if reason]
    if not reasons:
        return settings.devices, []
    return ",".join(f"{name}*{count}" if count > 1 else name for name, (count, _) in chosen.items()), reasons


def _change_host_memory(inventory: Inventory, taken_bytes: int = 0, number: int = 1) -> Inventory:
    def change(owner: Owner) -> Owner:
        free = owner.memory_bytes if owner.free_bytes is None else owner.free_bytes
        free = max(0, free - taken_bytes) // number
        return replace(owner, memory_bytes=owner.memory_bytes // number, free_bytes=free)

    gpus = tuple(change(each) if each.shares_host_memory else each for each in inventory.accelerators)
    return replace(change(inventory), accelerators=gpus)


def _add_reasons(planned: Planned, reasons: Sequence[str]) -> Planned:
    placement = planned.placement
    return replace(planned, placement=replace(placement, reasons=(*placement.reasons, *reasons)))


def _make_tenant(card: ModelCard, inventory: Inventory, settings: WorkerSettings) -> Tenant:
    shape = find_shape(card)
    devices = parse_devices(settings.devices, inventory)
    precision = choose_common_precision(card, devices, settings.precision)
    # All ranks will pack sequences, unless a kernel later proves faulty on some device.
    attention = AttentionShape(shape.model_type, shape.head_size, padding_id=0)
    is_packed = settings.attention == PACKED or (
        settings.attention == AUTO and all(device.kind == CUDA for device in devices)
    )
    is_packed &= not any(find_packing_obstacle(attention, device, precision) for device in devices)
    return Tenant(
        card.name,
        shape,
        PlanSettings(
            precision=precision,
            max_tokens=card.max_tokens,
            devices=settings.devices,
            strategy=settings.strategy,
            memory_share=settings.memory_high_watermark,
            find_obstacle=partial(
                find_obstacle,
                card,
                backend=settings.backend,
                is_reproducible=settings.reproducible,
            ),
            attention=PACKED if is_packed else "",
            precisions=_list_precisions(card, devices),
            results=count_results(card),
        ),
    )


def choose_common_precision(card: ModelCard, devices: Sequence[Device], wanted: str) -> str:
    """Return the precision of the model on all of these devices, of 16 bits if each supports the same.

    Raises ModelError for one that a device does not support.
    """
    choices = {_choose_precision(card, device, wanted) for device in devices}
    common = [each for each in _list_precisions(card, devices) if each in choices]
    return choices.pop() if len(choices) == 1 else common[-1] if common else FP32


def follow_plan(settings: WorkerSettings, card: ModelCard, assignment: Assignment) -> WorkerSettings:
    """Return the settings with the plan's precision, if the devices of a replica would choose another by themselves."""
    planned = assignment.part["plan"]["precision"]
    choices = {_choose_precision(card, device, settings.precision) for device in assignment.devices}
    return settings if choices == {planned} else settings.model_copy(update={"precision": planned})


def _choose_precision(card: ModelCard, device: Device, wanted: str) -> str:
    """Return the precision of the model on the device."""
    if card.static is not None:
        return choose_static_precision(wanted).value
    if card.is_extractor:
        return choose_extraction_precision(wanted, device).value
    return choose_precision(wanted, device, card.model_type).value


def _list_precisions(card: ModelCard, devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the precisions that all devices support, the largest values first, and fp16 only where bf16 is none."""
    known = (FP32,) if card.static is not None else EXTRACTION_PRECISIONS if card.is_extractor else PRECISIONS
    supported = []
    for precision in known:
        with suppress(ModelError):
            for device in devices:
                _choose_precision(card, device, precision)
            supported.append(precision)
    return tuple(each for each in supported if each != FP16 or BF16 not in supported)


def find_shape(card: ModelCard) -> ModelShape:
    """Return the model's shape from its weights' headers, or from its configuration without weights."""
    if card.shape.tensors:
        return card.find_shape()
    from worker.parallel.filling import list_shapes  # imports torch, which takes seconds

    return card.find_shape(list_shapes(card))


# The share of a device's estimated arithmetic that committed jobs reached: 0.4 with MiniLM on two cores with AVX2 or
# AMX, 0.85 with the shape of BERT-base on an H200 (docs/SIZING.md). Texts of a few tokens may be below.
LEAST_SHARE: Final = 0.3
MOST_SHARE: Final = 1.0
# Short texts are fed at half the rate; eight workers on one card reached a fifth more than it says.
LEAST_FED: Final = 0.5
MOST_FED: Final = 1.25


def estimate_rate(
    card: ModelCard, inventory: Inventory, settings: WorkerSettings
) -> tuple[float, float, Mapping[str, str]]:
    """Return the least and the most tokens per second of the planned replicas, and how they are placed.

    What the host's cores can feed limits GPUs. Raises the errors of `plan_worker`.
    """
    devices = {device.name: device for device in parse_devices(settings.devices, inventory)}
    # A GPU that is named has one worker, so replicas are counted by GPUs and not by what feeds them.
    placement = plan_worker(card, inventory, settings.model_copy(update={"devices": ",".join(devices)}))
    first = devices[placement.replicas[0].devices[0]]
    planned = sum(replica.relative_rate for replica in placement.replicas)
    planned *= guess_flops(first) / find_shape(card).flop_per_token
    told = {"placement": f"{placement.strategy}, {len(placement.replicas)} × {placement.precision}"}
    num_cores = len(inventory.physical_cores) if inventory.memory_bytes else 0  # 0: no host was described
    fed = FED_TOKENS_PER_SECOND * max(1, num_cores // CORES_PER_WORKER)
    if first.kind != CUDA or not num_cores or fed > planned:
        return LEAST_SHARE * planned, MOST_SHARE * planned, told
    told["limited by"] = f"the host, of which {num_cores} cores feed some {fed:,} tokens/s"
    return min(LEAST_SHARE * planned, LEAST_FED * fed), MOST_FED * fed, told
