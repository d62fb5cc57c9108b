"""Write the sentences that explain a plan and why alternatives were rejected. Decides nothing."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Final

from vectormill.workers.plan_picture import format_gib
from worker.devices.device import BYTES_PER_SECOND, MEMORY, NVLINK, PCIE, SOCKETS, Links
from worker.placement.drafts import (
    Draft,
    draft_longest,
    draft_plans,
    draft_replicas,
)
from worker.placement.footprint import VALUE_BYTES
from worker.placement.placement import AUTO, PlanSettings, Rejection, Replica
from worker.placement.replicas import SHORTEST_USEFUL_TOKENS, DoesNotFit, ReplicaBuilder
from worker.placement.room import GIB, DeviceCapacity, memory_for
from worker.placement.strategies import HYBRID, OFFLOAD, PIPELINE, REPLICATE, SHARED, STRATEGIES

# Makes a builder for another precision, whose replicas have to hold a text of this many tokens.
MakeBuilder = Callable[[str, int], ReplicaBuilder]

MOST_MORE_DEVICES: Final = 64
# A proposed precision has to gain this much to be worth the loss of exactness.
WORTH_IT: Final = 1.05

LINK_WORDS: Final = {
    NVLINK: "NVLink",
    PCIE: "PCIe",
    SOCKETS: "PCIe and across processors",
    MEMORY: "main memory",
}


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The request for a plan: its settings and the devices."""

    rooms: Sequence[DeviceCapacity]
    links: Links
    make_builder: MakeBuilder
    settings: PlanSettings


def explain_plan(chosen: Draft, builder: ReplicaBuilder, asked: PlanRequest) -> tuple[str, ...]:
    """Return one sentence per decision: what has to be held, and how the replicas hold it."""
    offered = " or ".join(format_gib(size) for size in sorted({room.capacity_bytes for room in asked.rooms}))
    used = ", ".join(
        f"{format_gib(room.used_bytes)} of {room.name}" for room in asked.rooms if room.used_bytes
    )
    others = f" and what others use ({used})" if used else ""
    sentences = [
        f"The weights take {format_gib(builder.weights.total_bytes)} in {asked.settings.precision}. Each device offers "
        f"{offered}: {asked.settings.memory_share:.0%} of its memory, minus what a process needs for itself{others}."
    ]
    alone = [replica.devices[0] for replica in chosen.replicas if replica.strategy == REPLICATE]
    if alone:
        tokens = min(each.max_batch_tokens for each in chosen.replicas if each.strategy == REPLICATE)
        one_each = f"{_listed(alone)} holds" if len(alone) == 1 else f"Each of {_listed(alone)} holds"
        sentences.append(f"{one_each} a whole replica, with room for {tokens:,} tokens.")
    if chosen.strategy == OFFLOAD:
        if asked.settings.strategy == AUTO:
            sentences.append("The devices have no room for the model, even together.")
        alike: dict[str, list[str]] = {}
        for replica in chosen.replicas:
            alike.setdefault(_describe_offload(replica), []).extend(replica.devices)
        for how, names in alike.items():
            each = f"{names[0]} keeps" if len(names) == 1 else f"Each of {_listed(names)} keeps"
            sentences.append(f"{each} {how}")
    groups: dict[str, list[str]] = {}
    for replica in chosen.replicas:
        if replica.strategy in SHARED:
            how = _describe_sharing(replica, LINK_WORDS[asked.links.slowest(replica.devices)])
            groups.setdefault(how, []).append(_listed(replica.devices))
    for how, names in groups.items():
        those = (
            f"{names[0]} share a replica"
            if len(names) == 1
            else f"({'), ('.join(names)}) share a replica each"
        )
        sentences.append(f"{those} {how}.")
    return tuple(sentences)


def _describe_sharing(replica: Replica, link: str) -> str:
    how = STRATEGIES[replica.strategy].how_shared.format(stages=len(replica.stages))
    return f"{how}, over {link}. A forward pass has room for {replica.max_batch_tokens:,} tokens"


def _describe_offload(replica: Replica) -> str:
    host_bytes = replica.stages[0].shards[0].host_bytes
    return (
        f"{replica.num_offloaded} layers in main memory ({format_gib(host_bytes)}) and copies them for every batch, "
        f"while others are computed. That takes at least {host_bytes / BYTES_PER_SECOND[PCIE]:.1f} s over PCIe, also "
        f"for a single query. A forward pass has room for {replica.max_batch_tokens:,} tokens."
    )


def explain_idle(chosen: Draft, drafts: Sequence[Draft], rooms: Sequence[DeviceCapacity]) -> dict[str, str]:
    """Return a reason for each unused device: the obstacle to using all devices, or the draft's own."""
    busy = {device for replica in chosen.replicas for device in replica.devices}
    over_all = [
        refusal.reason
        for draft in drafts
        if draft.strategy == chosen.strategy != REPLICATE and draft.group_size == len(rooms)
        for refusal in draft.refusals
    ]
    without = over_all[0] if over_all else "the plan is predicted to be as fast without it"
    told = {} if over_all else chosen.idle
    return {room.name: told.get(room.name, without) for room in rooms if room.name not in busy}


def explain_rejections(chosen: Draft, drafts: Sequence[Draft], unit: float) -> tuple[Rejection, ...]:
    """Return the best draft of every other strategy, and why it was rejected. `unit` is one device's rate."""
    rejected: list[Rejection] = []
    for strategy in STRATEGIES:
        others = [draft for draft in drafts if draft.strategy == strategy]
        if strategy == chosen.strategy or not others:
            continue
        best = max(others, key=lambda draft: draft.rate)
        if not best.replicas:
            refusals = [refusal for draft in others for refusal in draft.refusals]
            nearest = min(refusals, key=lambda refusal: refusal.missing_bytes, default=None)
            rejected += [Rejection(strategy, nearest.reason)] if nearest else []
            continue
        theirs, ours = f"{best.rate / unit:.2f}", f"{chosen.rate / unit:.2f}"
        reason = f"predicted {theirs} times one device, compared with {ours}: "
        reason += (
            STRATEGIES[strategy].why_slower
            if best.rate <= chosen.rate
            else "the gain is too small for a more complex plan"
        )
        rejected.append(Rejection(best.name, reason))
    return tuple(rejected)


def explain_limit(longest: int, asked: PlanRequest) -> tuple[str, ...]:
    """Return a sentence on texts that do not fit, and what would help; empty if all texts fit."""
    if longest == asked.settings.max_tokens:
        return ()
    return (
        f"No plan has room for the longest text that the model reads, {asked.settings.max_tokens:,} tokens: texts of "
        f"more than {longest:,} fail with the item error out_of_memory. What would help, cheapest first:"
        + _numbered(_ways_out(asked, longest)),
    )


def propose_precision(chosen: Draft, chosen_builder: ReplicaBuilder, asked: PlanRequest) -> tuple[str, ...]:
    """Return the first smaller precision with which every device holds a whole replica; empty if none."""
    if chosen.strategy == REPLICATE and not chosen.idle:
        return ()
    rooms = asked.rooms
    for smaller in smaller_precisions(asked):
        builder = asked.make_builder(smaller, chosen_builder.max_tokens)
        whole = draft_replicas(rooms, builder)
        if len(whole.replicas) < len(rooms):
            continue
        gain = whole.rate / chosen.rate
        advice = (
            "compare vectors and speed before switching"
            if gain >= WORTH_IT
            else "hardly worth the loss of accuracy"
        )
        each = "every device holds" if len(rooms) > 1 else f"{rooms[0].name} holds"
        return (
            f"With --precision {smaller} ({format_gib(builder.weights.total_bytes)} of weights) {each} a whole "
            f"replica: predicted {gain:.2f} times the rate of this plan; {advice}.",
        )
    return ()


def explain_failure(asked: PlanRequest) -> str:
    """Return by how much the nearest plan misses, and which changes would help."""
    shortest = min(SHORTEST_USEFUL_TOKENS, asked.settings.max_tokens)
    builder = asked.make_builder(asked.settings.precision, shortest)
    drafts = list(draft_plans(asked.rooms, asked.links, builder, asked.settings.strategy))
    none = "there is only one device"
    if asked.settings.strategy == HYBRID:
        none = "it needs some devices that hold a whole replica and others that do not"
    refusals = [(draft.name, refusal) for draft in drafts for refusal in draft.refusals] or [
        (asked.settings.strategy, DoesNotFit(none))
    ]
    short = [(name, refusal) for name, refusal in refusals if refusal.missing_bytes > 0]
    name, nearest = min(short or refusals, key=lambda each: each[1].missing_bytes)
    where = _listed([room.name for room in asked.rooms])
    offered = format_gib(sum(room.capacity_bytes for room in asked.rooms))
    together = f"{where} offer {offered} together" if len(asked.rooms) > 1 else f"{where} offers {offered}"
    used = sum(room.used_bytes for room in asked.rooms)
    others = f" (others use {format_gib(used)})" if used else ""
    sentences = [
        f"The model does not fit: its weights take {format_gib(builder.weights.total_bytes)} in "
        f"{asked.settings.precision}, a text of {shortest:,} tokens needs more on top, but {together}{others}.",
        f"The closest plan is {name}, but {nearest.reason}.",
    ]
    obstacle = builder.find_obstacle(PIPELINE, asked.rooms[:1])
    if obstacle and len(asked.rooms) > 1:
        sentences.append(f"More devices would not help: {obstacle}.")
    return f"{' '.join(sentences)} What would help, cheapest first:{_numbered(_ways_out(asked, 0))}"


def _numbered(ways: Iterator[str]) -> str:
    return "".join(f"\n  ({number}) {way}" for number, way in enumerate(ways, start=1))


def _ways_out(asked: PlanRequest, longest: int) -> Iterator[str]:
    """Yield changes that make texts longer than `longest` fit, cheapest first, each verified by planning."""
    rooms = asked.rooms
    builder = asked.make_builder(asked.settings.precision, asked.settings.max_tokens)
    if asked.settings.strategy != AUTO and (fitting := _fit(asked, asked.settings.precision, AUTO, longest)):
        yield f"--strategy auto: {fitting}"
    for smaller in smaller_precisions(asked):
        if fitting := _fit(asked, smaller, asked.settings.strategy, longest):
            weights = format_gib(asked.make_builder(smaller, asked.settings.max_tokens).weights.total_bytes)
            yield f"--precision {smaller}: the weights take {weights}, and {fitting}"
    largest = max(rooms, key=lambda room: room.capacity_bytes)
    held = builder.build(OFFLOAD, (replace(largest, host_bytes=sys.maxsize),), "")
    if isinstance(held, Replica) and not longest and asked.settings.strategy in (AUTO, OFFLOAD):
        lacking = len(rooms) * (held.stages[0].shards[0].host_bytes - largest.host_bytes)
        yield f"{format_gib(lacking)} more main memory, from which layers would be copied for every batch"
    asks_all = asked.settings.strategy in (AUTO, HYBRID)
    allowed = (REPLICATE, *SHARED) if asks_all else (asked.settings.strategy,)
    for more in range(1, MOST_MORE_DEVICES):
        added = (replace(largest, name=f"{largest.name}+{number}", card="") for number in range(more))
        fleet = (*rooms, *added)
        built = [builder.build(shared, fleet, asked.links.default) for shared in allowed if shared in SHARED]
        if any(isinstance(replica, Replica) for replica in built):
            yield f"{more} more device{'s' if more > 1 else ''} like {largest.name}, {len(fleet)} in total"
            break
    alone = builder.build(REPLICATE, (largest,), "")
    if isinstance(alone, DoesNotFit) and REPLICATE in allowed:
        needed = memory_for(
            largest.kind, largest.capacity_bytes + alone.missing_bytes, asked.settings.memory_share
        )
        yield f"one device with at least {ceil(needed / GIB)} GiB of memory"


def _fit(asked: PlanRequest, precision: str, strategy: str, longest: int) -> str:
    """Return in words the best plan that holds texts longer than `longest`; empty if there is none."""
    tokens, drafts = draft_longest(
        asked.rooms, asked.links, partial(asked.make_builder, precision), strategy, asked.settings.max_tokens
    )
    if tokens <= longest:
        return ""
    limit = "" if tokens == asked.settings.max_tokens else f", for texts of up to {tokens:,} tokens"
    return f"{max(drafts, key=lambda draft: draft.rate).name} fits{limit}"


def smaller_precisions(asked: PlanRequest) -> list[str]:
    held = VALUE_BYTES[asked.settings.precision]
    return [each for each in asked.settings.precisions if VALUE_BYTES[each] < held]


def _listed(names: Sequence[str]) -> str:
    """Return device names in words: cuda:0 and cuda:1; cuda:0 to cuda:7; cuda:0, cuda:2 and cuda:5."""
    numbered = [re.fullmatch(r"(.*\D)(\d+)", name) for name in names]
    if len(names) > 2 and all(numbered):
        numbers = [int(match[2]) for match in numbered if match]
        is_run = numbers == list(range(numbers[0], numbers[0] + len(names)))
        if is_run and len({match[1] for match in numbered if match}) == 1:
            return f"{names[0]} to {names[-1]}"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
