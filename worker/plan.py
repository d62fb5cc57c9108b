"""The placement of models as a worker with these settings would plan it, without starting anything.

The hardware is not queried: its inventory is given.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from vectormill.domain.errors import ConfigurationError
from vectormill.models.families import find_family
from vectormill.models.model_card import GLINER, ModelCard
from vectormill.models.model_shape import ModelShape
from worker.devices.device import CPU, CUDA, Device, Inventory, divide_gpus, parse_devices
from worker.encoder.choice import (
    EXTRACTION_PRECISIONS,
    FP32,
    PACKED,
    AttentionShape,
    choose_extraction_precision,
    choose_precision,
    choose_static_precision,
    find_obstacle,
)
from worker.encoder.encoder import AUTO
from worker.encoder.switches import PACKED_RANKS, describe_switches, list_wanted
from worker.placement.feeding import choose_num_workers
from worker.placement.placement import PRECISIONS, Placement, PlanSettings
from worker.placement.strategies import REPLICATE
from worker.placement.together import Planned, Tenant, plan_together
from worker.settings import WorkerSettings

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
        if others:
            planned |= {each.name: each for each in plan_machine(others, inventory, settings)}
        return tuple(planned[card.name] for card in cards)
    wanted, reasons = _choose_devices(cards, inventory, settings)
    names, inventory = divide_gpus(wanted, inventory)
    settings = settings.model_copy(update={"devices": names})
    plans = plan_together(inventory, [_make_tenant(card, inventory, settings) for card in cards])
    switches = describe_switches(settings.switches, parse_devices(settings.devices, inventory)[0])
    reasons += [switches] if switches else []
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


def _add_reasons(planned: Planned, reasons: Sequence[str]) -> Planned:
    placement = planned.placement
    return replace(planned, placement=replace(placement, reasons=(*placement.reasons, *reasons)))


def _make_tenant(card: ModelCard, inventory: Inventory, settings: WorkerSettings) -> Tenant:
    shape = find_shape(card)
    devices = parse_devices(settings.devices, inventory)
    precision, precisions = _choose_precision(card, devices[0], settings)
    layout = find_family(shape.model_type).layout if card.extractor != GLINER else None
    what = card.extractor or shape.model_type
    obstacle = (
        "" if layout is not None else f"models of the architecture {what!r} cannot be shared between devices"
    )
    return Tenant(
        card.name,
        shape,
        PlanSettings(
            precision=precision,
            max_tokens=card.max_tokens,
            devices=settings.devices,
            strategy=settings.strategy,
            memory_share=settings.memory_high_watermark,
            sharing_obstacle=obstacle,
            tensor_obstacle=layout.tensor_obstacle if layout is not None else "",
            attention=PACKED if _is_packed(shape, devices, precision, settings) else "",
            precisions=precisions,
        ),
    )


def _choose_precision(
    card: ModelCard, device: Device, settings: WorkerSettings
) -> tuple[str, tuple[str, ...]]:
    """Return the precision of the model on the device, and all that it could have."""
    if card.static is not None:
        return choose_static_precision(settings.precision).value, (FP32,)
    if card.is_extractor:
        return choose_extraction_precision(settings.precision, device).value, EXTRACTION_PRECISIONS
    return choose_precision(settings.precision, device, card.model_type).value, PRECISIONS


def _is_packed(
    shape: ModelShape, devices: Sequence[Device], precision: str, settings: WorkerSettings
) -> bool:
    """Return True if all ranks will pack sequences, unless a kernel later proves faulty on some device."""
    is_wanted = settings.attention == PACKED or (
        settings.attention == AUTO
        and all(
            device.kind == CUDA and PACKED_RANKS in list_wanted(settings.switches, device)
            for device in devices
        )
    )
    attention = AttentionShape(shape.model_type, shape.head_size, padding_id=0)
    return is_wanted and not any(find_obstacle(attention, device, precision) for device in devices)


def find_shape(card: ModelCard) -> ModelShape:
    """Return the model's shape from its weights' headers, or from its configuration without weights."""
    if card.shape.tensors:
        return card.find_shape()
    from worker.parallel.filling import list_shapes  # imports torch, which takes seconds

    return card.find_shape(list_shapes(card))
