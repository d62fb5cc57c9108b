"""Plan one model on the devices of one machine, with reasons.

Every allowed strategy is tried for every number of devices per replica; the plans that fit are ranked by predicted
rate, and of plans that are about as fast the simplest is chosen. So one mechanism covers "fits", "does not fit" and
"fits, but leaves too little memory for batches". A full batch is not required: a plan with memory for less is rated for
what it can hold. If no plan holds the longest text that the model reads, the plan is made for the longest text that one
does hold. Imports no framework.
"""

from dataclasses import replace

from vectormill.domain.errors import ModelDoesNotFit
from vectormill.models.model_shape import ModelShape
from worker.devices.device import Inventory, parse_devices
from worker.placement.candidates import choose_candidate
from worker.placement.capacity import measure_capacity
from worker.placement.placement import Placement, PlanSettings
from worker.placement.reasons import (
    PlanRequest,
    explain_failure,
    explain_idle,
    explain_limit,
    explain_plan,
    explain_rejections,
    propose_precision,
)
from worker.placement.replicas import ReplicaBuilder


def plan_placement(inventory: Inventory, shape: ModelShape, settings: PlanSettings) -> Placement:
    """Return the placement of one model on the devices of one machine. Takes milliseconds; reads no weights.

    Raises ModelDoesNotFit, with what is missing and the cheapest remedies, if not even short texts fit, and
    ConfigurationError for devices that do not exist.
    """
    host = measure_capacity(inventory.host, settings.memory_share)
    host_bytes = int(settings.host_share * host.capacity_bytes)
    devices = [
        measure_capacity(device, settings.memory_share, host_bytes)
        for device in parse_devices(settings.devices, inventory)
    ]

    def make_builder(precision: str, max_tokens: int) -> ReplicaBuilder:
        asked = replace(settings, precision=precision, max_tokens=max_tokens)
        return ReplicaBuilder(shape, asked, devices[0].kind)

    asked = PlanRequest(devices, inventory.links, make_builder, settings, host)
    longest, candidates = asked.find_longest_text(settings.precision, settings.strategy)
    if not longest:
        raise ModelDoesNotFit(explain_failure(asked))
    builder = make_builder(settings.precision, longest)
    chosen = choose_candidate(candidates)
    unit = max(builder.full_rate(device) * device.num_parts for device in devices)
    return Placement(
        strategy=chosen.strategy,
        precision=settings.precision,
        replicas=tuple(
            replace(each, relative_rate=each.relative_rate / unit, longest_text_tokens=longest)
            for each in chosen.replicas
        ),
        idle=explain_idle(chosen, candidates, devices),
        reasons=explain_plan(chosen, builder, asked),
        rejected=explain_rejections(chosen, candidates, unit),
        proposals=(*explain_limit(longest, asked), *propose_precision(chosen, builder, asked)),
        longest_text_tokens=longest,
    )
