"""Plan the models that one machine serves, so that no device, core or byte is planned twice.

Of several models on GPUs two ways are compared: all models on every device, with its memory divided, or separate
devices for each model. The way whose worst-off model keeps the larger share of its rate is chosen. CPU cores are
divided. Imports no framework.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from vectormill.domain.errors import ModelDoesNotFit
from vectormill.models.model_shape import ModelShape
from vectormill.workers.plan_picture import format_gib
from worker.devices.device import CPU, Device, Inventory, parse_devices
from worker.placement.candidates import ABOUT_AS_FAST
from worker.placement.capacity import OVERHEAD_BYTES, guess_flops, measure_capacity
from worker.placement.placement import Placement, PlanSettings
from worker.placement.planner import plan_placement
from worker.placement.reasons import list_names
from worker.placement.replicas import ReplicaBuilder


@dataclass(frozen=True, slots=True)
class Tenant:
    """One of the models that a machine serves. All of them have the same `settings.devices`."""

    name: str
    shape: ModelShape
    settings: PlanSettings


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan for one model: its placement, and its devices reduced to the cores and memory that it may use."""

    name: str
    placement: Placement
    devices: tuple[Device, ...]

    @property
    def rate(self) -> float:
        """Return a rate for comparing plans of one model on different devices of a machine."""
        return self.placement.relative_rate * max(guess_flops(device) for device in self.devices)


def plan_tenants(inventory: Inventory, tenants: Sequence[Tenant]) -> tuple[Planned, ...]:
    """Return one plan per model, in order, with main memory for the layers of as few models as possible.

    Raises as `plan_placement` does for the first that does not fit.
    """
    if len(tenants) == 1:
        return (_plan(inventory, tenants[0]),)
    devices = parse_devices(tenants[0].settings.devices, inventory)
    kinds = {device.kind for device in devices}
    if kinds == {CPU}:
        return _divide_cores(inventory, tenants)
    most, wanted = len(tenants), [_wanted_bytes(devices[0], tenant) for tenant in tenants]
    order = sorted(range(most), key=lambda place: -wanted[place])
    refused = ModelDoesNotFit()
    # A processor that is used itself has the main memory; the last refusal tells how much would help.
    for number in [0] if CPU in kinds else range(0 if inventory.memory_bytes else most, most + 1):
        shares = dict.fromkeys(order[:number], 1 / max(1, number))
        given = [
            replace(tenant, settings=replace(tenant.settings, host_share=shares.get(place, 0)))
            for place, tenant in enumerate(tenants)
        ]
        try:
            return _plan_gpus(inventory, devices, given, order)
        except ModelDoesNotFit as error:
            refused = error
    raise refused


def _plan_gpus(
    inventory: Inventory, devices: Sequence[Device], tenants: Sequence[Tenant], order: Sequence[int]
) -> tuple[Planned, ...]:
    """Return the plans of the better way: on shared devices, or on separate ones, which are given out in this order."""
    shared: tuple[Planned, ...] = ()
    with suppress(ModelDoesNotFit):
        shared = _share_devices(inventory, tenants)
    try:
        apart = _divide_devices(inventory, devices, tenants, order)
    except ModelDoesNotFit as error:
        if shared:
            return shared
        raise ModelDoesNotFit(
            f"{error} These devices must serve {len(tenants)} models; `vectormill worker --model NAME` serves one."
        ) from error
    if not shared:
        return apart
    alone = [_plan(inventory, tenant).rate for tenant in tenants]

    def worth(plans: Sequence[Planned]) -> tuple[bool, float]:
        holds_all = all(
            plan.placement.longest_text_tokens == tenant.settings.max_tokens
            for plan, tenant in zip(plans, tenants, strict=True)
        )
        kept = min(plan.rate / rate for plan, rate in zip(plans, alone, strict=True))
        return holds_all, kept

    # A model without work leaves a shared device to the others, so sharing is preferred if both ways are
    # about equal.
    (shared_holds, shared_rate), (apart_holds, apart_rate) = worth(shared), worth(apart)
    if shared_holds != apart_holds:
        return shared if shared_holds else apart
    return shared if shared_rate >= ABOUT_AS_FAST * apart_rate else apart


def _plan(inventory: Inventory, tenant: Tenant, note: str = "") -> Planned:
    placement = plan_placement(inventory, tenant.shape, tenant.settings)
    if note:
        placement = replace(placement, reasons=(note, *placement.reasons))
    return Planned(tenant.name, placement, tuple(parse_devices(tenant.settings.devices, inventory)))


def _share_devices(inventory: Inventory, tenants: Sequence[Tenant]) -> tuple[Planned, ...]:
    """Plan every model on every device, with a part of the memory and time each, and as much of the main memory."""
    number = len(tenants)
    parts = {
        device.name: _take_parts(device, tenants)
        for device in parse_devices(tenants[0].settings.devices, inventory)
    }
    note = (
        f"{list_names([tenant.name for tenant in tenants])} share these devices, their memory and their time."
    )
    plans = []
    for place, tenant in enumerate(tenants):
        own = tuple(
            parts[each.name][place] if each.name in parts else each for each in inventory.accelerators
        )
        free = None if inventory.free_bytes is None else inventory.free_bytes // number
        whole = replace(
            inventory, accelerators=own, memory_bytes=inventory.memory_bytes // number, free_bytes=free
        )
        asked = replace(tenant.settings, host_share=tenant.settings.host_share * number)
        plans.append(_plan(whole, replace(tenant, settings=asked), note))
    return tuple(plans)


def _take_parts(
    device: Device, tenants: Sequence[Tenant], num_replicas: Sequence[int] | None = None
) -> list[Device]:
    """Return the device as each model has it: with a part of the memory, whoever uses it, and of the time."""
    overhead = OVERHEAD_BYTES[device.kind]
    whole = measure_capacity(device, tenants[0].settings.memory_share).capacity_bytes + overhead
    free = device.memory_bytes if device.free_bytes is None else device.free_bytes
    parts = []
    for num_bytes in _divide_memory(device, tenants, num_replicas):
        memory_bytes = device.memory_bytes * (num_bytes + overhead) // whole
        parts.append(
            replace(
                device,
                memory_bytes=memory_bytes,
                free_bytes=memory_bytes * free // max(1, device.memory_bytes),
                card=device.card or device.uuid or device.name,
                num_parts=device.num_parts * len(tenants),
            )
        )
    return parts


def _divide_memory(
    device: Device, tenants: Sequence[Tenant], num_replicas: Sequence[int] | None = None
) -> list[int]:
    """Return the bytes of the device for each model.

    Each model gets what its replicas need, but at most an even share of what is left, smallest need first;
    the model with the largest need gets the rest.
    """
    overhead = OVERHEAD_BYTES[device.kind]
    left = (
        measure_capacity(device, tenants[0].settings.memory_share).capacity_bytes
        + overhead
        - len(tenants) * overhead
    )
    wanted = [
        number * (_wanted_bytes(device, tenant) + overhead) - overhead
        for tenant, number in zip(tenants, num_replicas or [1] * len(tenants), strict=True)
    ]
    parts = [0] * len(tenants)
    places = sorted(range(len(tenants)), key=lambda place: wanted[place])
    for num_left, place in zip(range(len(places), 0, -1), places, strict=True):
        parts[place] = max(0, left if num_left == 1 else min(wanted[place], left // num_left))
        left -= parts[place]
    return parts


def _wanted_bytes(device: Device, tenant: Tenant) -> int:
    """Return the memory of an unshared replica with a full batch, and what is lost as parts are rounded down."""
    capacity = measure_capacity(device, tenant.settings.memory_share)
    return ReplicaBuilder(tenant.shape, tenant.settings, device.kind).count_full_bytes(capacity) + 2


def _divide_devices(
    inventory: Inventory, devices: Sequence[Device], tenants: Sequence[Tenant], order: Sequence[int]
) -> tuple[Planned, ...]:
    """Give each model the fewest devices that hold it, in this order, then each further one to the model worst off."""
    if len(devices) < len(tenants):
        raise ModelDoesNotFit(
            f"{len(tenants)} models cannot have a device each, because there are only {len(devices)}."
        )
    left = sorted(devices, key=lambda device: -device.memory_bytes)
    owned: dict[int, list[Device]] = {}
    for num_before, place in enumerate(order):
        most = len(left) - (len(tenants) - num_before - 1)
        owned[place] = left[: _count_needed(inventory, left[:most], tenants[place])]
        left = left[len(owned[place]) :]
    alone = [_plan(inventory, tenant).rate for tenant in tenants]

    def rate(place: int, more: Sequence[Device] = ()) -> float:
        return _plan_on(inventory, [*owned[place], *more], tenants[place]).rate / alone[place]

    while left:
        rates = {place: rate(place) for place in owned}
        gaining = [place for place in owned if rate(place, left[:1]) > rates[place]]
        if not gaining:
            break
        owned[min(gaining, key=rates.__getitem__)].append(left.pop(0))
    division = "; ".join(
        f"{tenant.name} has {list_names([device.name for device in owned[place]])}"
        for place, tenant in enumerate(tenants)
    )
    note = f"The devices are divided among {len(tenants)} models: {division}."
    return tuple(_plan_on(inventory, owned[place], tenant, note) for place, tenant in enumerate(tenants))


def _count_needed(inventory: Inventory, devices: Sequence[Device], tenant: Tenant) -> int:
    """Return how many of the devices, from the first, hold the model, with its longest text if possible."""
    fallback = 0
    for number in range(1, len(devices) + 1):
        try:
            planned = _plan_on(inventory, devices[:number], tenant)
        except ModelDoesNotFit:
            if number == len(devices) and not fallback:
                raise
            continue
        if planned.placement.longest_text_tokens == tenant.settings.max_tokens:
            return number
        fallback = fallback or number
    return fallback


def _plan_on(inventory: Inventory, devices: Sequence[Device], tenant: Tenant, note: str = "") -> Planned:
    names = ",".join(device.name for device in devices)
    return _plan(inventory, replace(tenant, settings=replace(tenant.settings, devices=names)), note)


def _divide_cores(inventory: Inventory, tenants: Sequence[Tenant]) -> tuple[Planned, ...]:
    """Plan each model on its own adjacent cores with a part of the memory; too few cores are shared."""
    num_devices = len(parse_devices(tenants[0].settings.devices, inventory))
    num_cores, num_models = len(inventory.physical_cores), len(tenants)
    is_divided = num_cores >= num_models * num_devices
    bounds = [num_cores * place // num_models for place in range(num_models + 1)]
    own = [inventory.with_cores(*ends) if is_divided else inventory for ends in pairwise(bounds)]
    counts = [
        len(parse_devices(tenant.settings.devices, part)) for tenant, part in zip(tenants, own, strict=True)
    ]
    plans = []
    for tenant, part, own_part in zip(
        tenants, own, _take_parts(inventory.host, tenants, counts), strict=True
    ):
        cores = len(part.physical_cores)
        has = f"{cores} of {num_cores} cores" if is_divided else "all cores, as the others do,"
        memory = format_gib(measure_capacity(own_part, tenant.settings.memory_share).capacity_bytes)
        note = (
            f"{num_models} models share the processor: {tenant.name} uses {has} and up to {memory} of memory."
        )
        part = replace(part, memory_bytes=own_part.memory_bytes, free_bytes=own_part.free_bytes)
        plans.append(_plan(part, tenant, note))
    return tuple(plans)
