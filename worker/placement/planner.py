"""Decide which devices hold which part of a model, with reasons. Imports no framework.

Every allowed strategy is drafted for every number of devices per replica; the plans that fit are ranked by
predicted rate, and of plans that are about as fast the simplest is chosen. So one mechanism covers "fits",
"does not fit" and "fits, but leaves too little memory for batches". A full batch is not required: a plan with
memory for less is rated for what it can hold. If no plan holds the longest text that the model reads, the
plan is made for the longest text that one does hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from vectormill.domain.errors import ConfigurationError, ModelDoesNotFit
from vectormill.models.model_shape import ModelShape
from worker.devices.device import CPU, CUDA, MPS, Inventory, parse_devices
from worker.placement.drafts import Draft, draft_plans, find_longest_text
from worker.placement.placement import AUTO, Placement, PlanSettings
from worker.placement.reasons import (
    PlanRequest,
    explain_failure,
    explain_idle,
    explain_limit,
    explain_plan,
    explain_rejections,
    propose_precision,
)
from worker.placement.replicas import MinimumNeeds, ReplicaBuilder
from worker.placement.room import DeviceCapacity, measure_room
from worker.placement.strategies import STRATEGIES

# The number of tokens at once beyond which a device gets no faster (docs/LOG.md for CPUs).
FULL_BATCH_TOKENS: Final[Mapping[str, int]] = {CPU: 2048, CUDA: 32768, MPS: 8192}
# The default arithmetic of encoders, used when weights are compressed.
ARITHMETIC: Final[Mapping[str, str]] = {CPU: "fp32", CUDA: "bf16", MPS: "fp16"}
# The attention assumed if none is given. It is padded on CUDA too: a shard pads unless packing is requested,
# and so does a whole replica whose model cannot be packed; otherwise less memory is needed.
ATTENTION: Final[Mapping[str, str]] = {CPU: "openvino", CUDA: "sdpa", MPS: "sdpa"}
# Predictions are no more exact than this, so a simpler plan that is nearly as fast is preferred.
ABOUT_AS_FAST: Final = 0.95


def plan_placement(inventory: Inventory, shape: ModelShape, settings: PlanSettings) -> Placement:
    """Return the placement of one model on the devices of one machine. Takes milliseconds; reads no weights.

    Raises ModelDoesNotFit, with what is missing and the cheapest remedies, if not even short texts fit, and
    ConfigurationError for devices and strategies that do not exist.
    """
    if settings.strategy not in (AUTO, *STRATEGIES):
        raise ConfigurationError(
            f"Unknown strategy {settings.strategy!r}; expected one of: {', '.join((AUTO, *STRATEGIES))}."
        )
    devices = parse_devices(settings.devices, inventory)
    rooms = [measure_room(device, settings.memory_share) for device in devices]
    links = inventory.links

    def make_builder(precision: str, max_tokens: int) -> ReplicaBuilder:
        asked = replace(settings, precision=precision, max_tokens=max_tokens)
        return ReplicaBuilder(shape, make_needs(rooms, asked))

    asked = PlanRequest(rooms, links, make_builder, settings)
    longest = find_longest_text(
        rooms, links, partial(make_builder, settings.precision), settings.strategy, settings.max_tokens
    )
    if not longest:
        raise ModelDoesNotFit(explain_failure(asked))
    builder = make_builder(settings.precision, longest)
    drafts = list(draft_plans(rooms, links, builder, settings.strategy))
    chosen = _choose([draft for draft in drafts if draft.replicas])
    unit = max(builder.full_rate(room) for room in rooms)
    return Placement(
        strategy=chosen.strategy,
        precision=settings.precision,
        replicas=tuple(replace(each, relative_rate=each.relative_rate / unit) for each in chosen.replicas),
        idle=explain_idle(chosen, drafts, rooms),
        reasons=explain_plan(chosen, builder, asked),
        rejected=explain_rejections(chosen, drafts, unit),
        proposals=(*explain_limit(longest, asked), *propose_precision(chosen, builder, asked)),
        longest_text_tokens=longest,
    )


def make_needs(rooms: Sequence[DeviceCapacity], settings: PlanSettings) -> MinimumNeeds:
    kind = rooms[0].kind
    is_whole = settings.precision in ("fp32", "bf16", "fp16")
    return MinimumNeeds(
        precision=settings.precision,
        arithmetic=settings.precision if is_whole else ARITHMETIC[kind],
        attention=settings.attention or ATTENTION[kind],
        max_tokens=settings.max_tokens,
        full_batch_tokens=max(FULL_BATCH_TOKENS[kind], settings.max_tokens),
        sharing_obstacle=settings.sharing_obstacle,
        tensor_obstacle=settings.tensor_obstacle,
    )


def _choose(drafts: Sequence[Draft]) -> Draft:
    """Return the simplest of the plans that are about as fast as the fastest."""
    fastest = max(draft.rate for draft in drafts)
    near = [draft for draft in drafts if draft.rate >= ABOUT_AS_FAST * fastest]
    return min(
        near, key=lambda draft: (list(STRATEGIES).index(draft.strategy), draft.group_size, -draft.rate)
    )
