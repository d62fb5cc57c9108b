"""Plan all models of one machine together, so that no device, core or byte is planned twice.

On GPUs two ways are compared: all models on every device, with its memory divided, or separate devices for
each model. The way whose worst-off model keeps the larger share of its rate is chosen. CPU cores are divided.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from vectormill.domain.errors import ModelDoesNotFit
from vectormill.models.model_shape import ModelShape
from vectormill.workers.plan_picture import format_gib
from worker.devices.device import CPU, Device, Inventory, parse_devices
from worker.placement.placement import Placement, PlanSettings
from worker.placement.planner import ABOUT_AS_FAST, make_needs, plan_placement
from worker.placement.replicas import ReplicaBuilder
from worker.placement.room import OVERHEAD_BYTES, guess_flops, measure_room


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


def plan_together(inventory: Inventory, tenants: Sequence[Tenant]) -> tuple[Planned, ...]:
    """Return one plan per model, in order.

    Raises as `plan_placement` does for the first that does not fit.
    """
    if len(tenants) == 1:
        return (_plan(inventory, tenants[0]),)
    devices = parse_devices(tenants[0].settings.devices, inventory)
    if all(device.kind == CPU for device in devices):
        return _divide_cores(inventory, tenants)
    shared = _attempt(lambda: _share_devices(inventory, tenants))
    apart = _attempt(lambda: _divide_devices(inventory, devices, tenants))
    if isinstance(shared, ModelDoesNotFit) or isinstance(apart, ModelDoesNotFit):
        found = apart if isinstance(shared, ModelDoesNotFit) else shared
        if isinstance(found, ModelDoesNotFit):
            raise ModelDoesNotFit(
                f"{found} These devices must serve {len(tenants)} models; `vectormill worker --model NAME` serves one."
            )
        return found
    alone = [_plan(inventory, tenant).rate for tenant in tenants]

    def worth(plans: Sequence[Planned], num_on_device: int) -> tuple[bool, float]:
        holds_all = all(
            plan.placement.longest_text_tokens == tenant.settings.max_tokens
            for plan, tenant in zip(plans, tenants, strict=True)
        )
        kept = min(plan.rate / num_on_device / rate for plan, rate in zip(plans, alone, strict=True))
        return holds_all, kept

    # A model without work leaves a shared device to the others, so sharing is preferred if both ways are
    # about equal.
    (shared_holds, shared_rate), (apart_holds, apart_rate) = worth(shared, len(tenants)), worth(apart, 1)
    if shared_holds != apart_holds:
        return shared if shared_holds else apart
    return shared if shared_rate >= ABOUT_AS_FAST * apart_rate else apart


def _attempt(make: Callable[[], tuple[Planned, ...]]) -> tuple[Planned, ...] | ModelDoesNotFit:
    try:
        return make()
    except ModelDoesNotFit as error:
        return error


def _plan(inventory: Inventory, tenant: Tenant, note: str = "") -> Planned:
    placement = plan_placement(inventory, tenant.shape, tenant.settings)
    if note:
        placement = replace(placement, reasons=(note, *placement.reasons))
    return Planned(tenant.name, placement, tuple(parse_devices(tenant.settings.devices, inventory)))


def _share_devices(inventory: Inventory, tenants: Sequence[Tenant]) -> tuple[Planned, ...]:
    """Plan every model on every device, with a part of the memory each."""
    parts = {
        device.name: _divide_memory(device, tenants)
        for device in parse_devices(tenants[0].settings.devices, inventory)
    }
    names = _join([tenant.name for tenant in tenants])
    return tuple(
        _plan(
            replace(
                inventory,
                accelerators=tuple(
                    leave_part(device, parts[device.name][place], tenant.settings.memory_share)
                    if device.name in parts
                    else device
                    for device in inventory.accelerators
                ),
            ),
            tenant,
            f"{names} share these devices, their memory and their time; memory of the other models counts as used.",
        )
        for place, tenant in enumerate(tenants)
    )


def leave_part(device: Device, part: int, memory_share: float) -> Device:
    """Return the device as seen by a model that gets `part` bytes: the rest counts as used."""
    free = device.memory_bytes if device.free_bytes is None else device.free_bytes
    return replace(device, free_bytes=free - (measure_room(device, memory_share).capacity_bytes - part))


def _divide_memory(
    device: Device, tenants: Sequence[Tenant], num_replicas: Sequence[int] | None = None
) -> list[int]:
    """Return the bytes of the device for each model.

    Each model gets what its replicas need, but at most an even share of what is left, smallest need first;
    the model with the largest need gets the rest.
    """
    overhead = OVERHEAD_BYTES[device.kind]
    left = (
        measure_room(device, tenants[0].settings.memory_share).capacity_bytes
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
    """Return the memory of an unshared replica with a full batch."""
    room = measure_room(device, tenant.settings.memory_share)
    return ReplicaBuilder(tenant.shape, make_needs([room], tenant.settings)).full_bytes


def _divide_devices(
    inventory: Inventory, devices: Sequence[Device], tenants: Sequence[Tenant]
) -> tuple[Planned, ...]:
    """Give each model the fewest devices that hold it, then each further one to the model worst off."""
    if len(devices) < len(tenants):
        raise ModelDoesNotFit(
            f"{len(tenants)} models cannot have a device each, because there are only {len(devices)}."
        )
    wanted = [_wanted_bytes(devices[0], tenant) for tenant in tenants]
    heaviest_first = sorted(range(len(tenants)), key=lambda place: -wanted[place])
    left = sorted(devices, key=lambda device: -device.memory_bytes)
    owned: dict[int, list[Device]] = {}
    for num_before, place in enumerate(heaviest_first):
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
        f"{tenant.name} has {_join([device.name for device in owned[place]])}"
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
    whole = Device("cpu", CPU, 0, (), 1, inventory.memory_bytes, free_bytes=inventory.free_bytes)
    plans = []
    for tenant, part, num_bytes in zip(tenants, own, _divide_memory(whole, tenants, counts), strict=True):
        free = leave_part(whole, num_bytes, tenant.settings.memory_share).free_bytes
        cores = len(part.physical_cores)
        has = f"{cores} of {num_cores} cores" if is_divided else "all cores, as the others do,"
        memory = format_gib(num_bytes)
        note = (
            f"{num_models} models share the processor: {tenant.name} uses {has} and up to {memory} of memory."
        )
        plans.append(_plan(replace(part, free_bytes=free), tenant, note))
    return tuple(plans)


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
