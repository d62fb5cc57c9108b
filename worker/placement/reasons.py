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
from worker.placement.candidates import (
    Candidate,
    build_alone,
    choose_candidate,
    find_longest_text,
    list_candidates,
)
from worker.placement.capacity import GIB, OVERHEAD_BYTES, DeviceCapacity, memory_for
from worker.placement.footprint import VALUE_BYTES
from worker.placement.placement import AUTO, PlanSettings, Rejection, Replica
from worker.placement.replicas import SHORTEST_USEFUL_TOKENS, DoesNotFit, ReplicaBuilder
from worker.placement.strategies import (
    HYBRID,
    OFFLOAD,
    PIPELINE,
    REPLICATE,
    SHARED,
    STRATEGIES,
)

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
    """The request for a plan: its settings, the devices, and the host with its main memory."""

    devices: Sequence[DeviceCapacity]
    links: Links
    make_builder: MakeBuilder
    settings: PlanSettings
    host: DeviceCapacity

    def find_longest_text(self, precision: str, strategy: str) -> tuple[int, list[Candidate]]:
        """Return the longest text that fits in this precision and by this strategy, and all candidates for it."""
        make_builder = partial(self.make_builder, precision)
        return find_longest_text(self.devices, self.links, make_builder, strategy, self.settings.max_tokens)


def explain_plan(chosen: Candidate, builder: ReplicaBuilder, asked: PlanRequest) -> tuple[str, ...]:
    """Return one sentence per decision: what has to be held, and how the replicas hold it."""
    offered = " or ".join(
        format_gib(size) for size in sorted({device.capacity_bytes for device in asked.devices})
    )
    own = " or ".join(sorted({format_gib(OVERHEAD_BYTES[device.kind]) for device in asked.devices}))
    used = ", ".join(
        f"{format_gib(device.used_bytes)} of {device.name}" for device in asked.devices if device.used_bytes
    )
    others = f" and what others use ({used})" if used else ""
    sentences = [
        f"The weights take {format_gib(builder.weights.total_bytes)} in {asked.settings.precision}. Each device offers "
        f"{offered}: {asked.settings.memory_share:.0%} of its memory, minus {own} for the process itself{others}."
    ]
    if chosen.strategy == OFFLOAD and asked.settings.strategy == AUTO:
        sentences.append("The devices have no room for the model, even together.")
    alike: dict[str, list[Replica]] = {}
    for replica in chosen.replicas:
        alike.setdefault(_describe(replica, asked.links), []).append(replica)
    for how, replicas in alike.items():
        names, shares = [list_names(each.devices) for each in replicas], len(replicas[0].devices) > 1
        each = (
            f"Each of {list_names(names)}" if not shares else f"({'), ('.join(names)}) share a replica each"
        )
        one = f"{names[0]} share a replica" if shares else names[0]
        sentences.append(f"{one if len(names) == 1 else each} {how}")
    return tuple(sentences)


def _describe(replica: Replica, links: Links) -> str:
    """Return how the devices hold a replica, to complete a sentence about them."""
    tokens, strategy = f"{replica.max_batch_tokens:,} tokens", STRATEGIES[replica.strategy]
    if replica.strategy == REPLICATE:
        return f"holds a whole replica, with room for {tokens}."
    if replica.strategy == OFFLOAD:
        host_bytes = replica.stages[0].shards[0].host_bytes
        return (
            f"keeps {replica.num_offloaded} layers in main memory ({format_gib(host_bytes)}) and copies them for every "
            f"batch, while others are computed. That takes at least {host_bytes / BYTES_PER_SECOND[PCIE]:.1f} s over "
            f"PCIe, also for a single query. A forward pass has room for {tokens}."
        )
    how = strategy.how_shared.format(stages=len(replica.stages))
    if strategy.divides_batches:
        tokens += f", {replica.max_batch_tokens // len(replica.devices):,} on each device"
    return f"{how}, over {LINK_WORDS[links.slowest(replica.devices)]}. A forward pass has room for {tokens}."


def explain_idle(
    chosen: Candidate, candidates: Sequence[Candidate], devices: Sequence[DeviceCapacity]
) -> dict[str, str]:
    """Return a reason for each unused device: the obstacle to using all devices, or the candidate's own."""
    busy = {device for replica in chosen.replicas for device in replica.devices}
    over_all = [
        refusal.reason
        for candidate in candidates
        if candidate.strategy == chosen.strategy != REPLICATE and candidate.group_size == len(devices)
        for refusal in candidate.refusals
    ]
    without = over_all[0] if over_all else "the plan is predicted to be as fast without it"
    told = {} if over_all else chosen.idle
    return {device.name: told.get(device.name, without) for device in devices if device.name not in busy}


def explain_rejections(
    chosen: Candidate, candidates: Sequence[Candidate], unit: float
) -> tuple[Rejection, ...]:
    """Return the best candidate of every other strategy, and why it was rejected. `unit` is one device's rate."""
    rejected: list[Rejection] = []
    for strategy in STRATEGIES:
        others = [candidate for candidate in candidates if candidate.strategy == strategy != chosen.strategy]
        best = max(others, key=lambda candidate: candidate.rate, default=chosen)
        refusals = [refusal for candidate in others for refusal in candidate.refusals]
        if best.rate:
            why = "the gain is too small for a more complex plan"
            if best.rate <= chosen.rate:
                why = STRATEGIES[strategy].why_slower
            rates = (
                f"predicted {best.rate / unit:.2f} times one device, compared with {chosen.rate / unit:.2f}"
            )
            rejected += [Rejection(best.name, f"{rates}: {why}")] if others else []
        elif refusals:
            # A plan that only lacks memory is told before one that no memory would make possible.
            nearest = min(refusals, key=lambda refusal: refusal.missing_bytes or sys.maxsize)
            rejected.append(Rejection(strategy, nearest.reason))
    return tuple(rejected)


def explain_limit(longest: int, asked: PlanRequest) -> tuple[str, ...]:
    """Return a sentence on texts that do not fit, and what would help; empty if all texts fit."""
    if longest == asked.settings.max_tokens:
        return ()
    return (
        f"No {_kind(asked)} has room for the longest text that the model reads, {asked.settings.max_tokens:,} tokens: "
        f"texts of more than {longest:,} fail with the item error out_of_memory.{_say_ways_out(asked, longest)}",
    )


def propose_precision(
    chosen: Candidate, chosen_builder: ReplicaBuilder, asked: PlanRequest
) -> tuple[str, ...]:
    """Return the first smaller precision that is faster because every device then holds a replica; empty if none is."""
    devices = asked.devices
    is_asked = asked.settings.strategy in (AUTO, REPLICATE)
    if not is_asked or len(build_alone(devices, chosen_builder).replicas) == len(devices):
        return ()
    for smaller in smaller_precisions(asked):
        builder = asked.make_builder(smaller, chosen_builder.max_tokens)
        whole = build_alone(devices, builder)
        if len(whole.replicas) == len(devices) and whole.rate >= WORTH_IT * chosen.rate:
            weights, gain = format_gib(builder.weights.total_bytes), whole.rate / chosen.rate
            return (
                f"With --precision {smaller} ({weights} of weights) every device holds a whole replica: predicted "
                f"{gain:.2f} times the rate of this plan; compare vectors and speed before switching.",
            )
    return ()


def explain_failure(asked: PlanRequest) -> str:
    """Return by how much the nearest plan misses, and which changes would help."""
    shortest = min(SHORTEST_USEFUL_TOKENS, asked.settings.max_tokens)
    builder = asked.make_builder(asked.settings.precision, shortest)
    candidates = list_candidates(asked.devices, asked.links, builder, asked.settings.strategy)
    refusals = [(candidate.name, refusal) for candidate in candidates for refusal in candidate.refusals]
    short = [(name, refusal) for name, refusal in refusals if refusal.missing_bytes > 0]
    if not short:
        none = "there is only one device"
        if asked.settings.strategy == HYBRID:
            none = "it needs some devices that hold a whole replica and others that do not"
        why = refusals[0][1].reason if refusals else none
        return f"No {_kind(asked)} is possible: {why}.{_say_ways_out(asked, 0)}"
    name, nearest = min(short, key=lambda each: each[1].missing_bytes)
    where = list_names([device.name for device in asked.devices])
    offered = format_gib(sum(device.capacity_bytes for device in asked.devices))
    together = f"{where} offer {offered} together" if len(asked.devices) > 1 else f"{where} offers {offered}"
    used = sum(device.used_bytes for device in asked.devices)
    others = f" (others use {format_gib(used)})" if used else ""
    sentences = [
        f"The model does not fit: its weights take {format_gib(builder.weights.total_bytes)} in "
        f"{asked.settings.precision}, a text of {shortest:,} tokens needs more on top, but {together}{others}.",
        f"The closest plan is {name}, but {nearest.reason}.",
    ]
    obstacle = builder.find_obstacle(PIPELINE, asked.devices[:1])
    if obstacle and len(asked.devices) > 1:
        sentences.append(f"More devices would not help: {obstacle}.")
    return " ".join(sentences) + _say_ways_out(asked, 0)


def _kind(asked: PlanRequest) -> str:
    return "plan" if asked.settings.strategy == AUTO else f"plan by {asked.settings.strategy}"


def _say_ways_out(asked: PlanRequest, longest: int) -> str:
    ways = "".join(f"\n  ({number}) {way}" for number, way in enumerate(_ways_out(asked, longest), start=1))
    return f" What would help, cheapest first:{ways}" if ways else ""


def _ways_out(asked: PlanRequest, longest: int) -> Iterator[str]:
    """Yield changes that make texts longer than `longest` fit, cheapest first, each verified by planning."""
    devices = asked.devices
    builder = asked.make_builder(asked.settings.precision, asked.settings.max_tokens)
    if asked.settings.strategy != AUTO and (fitting := _fit(asked, asked.settings.precision, AUTO, longest)):
        yield f"--strategy auto: {fitting}"
    for smaller in smaller_precisions(asked):
        if fitting := _fit(asked, smaller, asked.settings.strategy, longest):
            weights = format_gib(asked.make_builder(smaller, asked.settings.max_tokens).weights.total_bytes)
            yield f"--precision {smaller}: the weights take {weights}, and {fitting}"
    largest = max(devices, key=lambda device: device.capacity_bytes)
    held = builder.build(OFFLOAD, (replace(largest, host_bytes=sys.maxsize),), "")
    host, share, asks_all = asked.host, asked.settings.host_share, asked.settings.strategy == AUTO
    if longest and asks_all and (fitting := _fit(asked, asked.settings.precision, OFFLOAD, longest)):
        yield f"--strategy {OFFLOAD}: {fitting}"
    if isinstance(held, Replica) and share and not longest and asked.settings.strategy in (AUTO, OFFLOAD):
        used = host.used_bytes + int(held.stages[0].shards[0].host_bytes / share)
        lacking = memory_for(host.kind, used, asked.settings.memory_share) - host.memory_bytes
        yield f"{ceil(lacking / GIB)} GiB more main memory, from which layers would be copied for every batch"
    shared = SHARED if asks_all else tuple({asked.settings.strategy} & set(SHARED))
    told = longest
    for more in range(1, MOST_MORE_DEVICES if shared else 0):
        added = [replace(largest, name=f"{largest.name}+{each}", card="") for each in range(more)]
        fleet = tuple(
            sorted((*devices, *added), key=lambda device: -device.capacity_bytes)
        )  # as devices are grouped
        built = [builder.build(strategy, fleet, asked.links.default) for strategy in shared]
        tokens = max(
            builder.max_tokens if isinstance(each, Replica) else each.longest_text_tokens for each in built
        )
        # The fewest that help at all, and the fewest that hold every text.
        if tokens == builder.max_tokens or tokens > told == longest:
            told = tokens
            number = f"{more} more device{'s' if more > 1 else ''} like {largest.name}"
            yield f"{number}, {len(fleet)} in total{_limit(asked, tokens)}"
        if tokens == builder.max_tokens:
            break
    sizes: dict[int, int] = {}
    least = builder.max_tokens if longest else min(SHORTEST_USEFUL_TOKENS, builder.max_tokens)
    for tokens in sorted({builder.max_tokens, least}):
        alone = asked.make_builder(asked.settings.precision, tokens).build(REPLICATE, (largest,), "")
        if isinstance(alone, DoesNotFit) and (asks_all or asked.settings.strategy == REPLICATE):
            capacity = largest.capacity_bytes + alone.missing_bytes
            needed = memory_for(largest.kind, capacity, asked.settings.memory_share)
            sizes[ceil(needed / GIB)] = tokens
    for size, tokens in sizes.items():
        yield f"one device with at least {size} GiB of memory{_limit(asked, tokens)}"


def _fit(asked: PlanRequest, precision: str, strategy: str, longest: int) -> str:
    """Return in words the best plan that holds texts longer than `longest`; empty if there is none."""
    tokens, candidates = asked.find_longest_text(precision, strategy)
    if tokens <= longest:
        return ""
    return f"{choose_candidate(candidates).name} fits{_limit(asked, tokens)}"


def _limit(asked: PlanRequest, tokens: int) -> str:
    return "" if tokens == asked.settings.max_tokens else f", for texts of up to {tokens:,} tokens"


def smaller_precisions(asked: PlanRequest) -> list[str]:
    held = VALUE_BYTES[asked.settings.precision]
    return [each for each in asked.settings.precisions if VALUE_BYTES[each] < held]


def list_names(names: Sequence[str]) -> str:
    """Return names in words: cuda:0 and cuda:1; cuda:0 to cuda:7; cuda:0, cuda:2 and cuda:5."""
    numbered = [re.fullmatch(r"(.*\D)(\d+)", name) for name in names]
    if len(names) > 2 and all(numbered):
        numbers = [int(match[2]) for match in numbered if match]
        is_run = numbers == list(range(numbers[0], numbers[0] + len(names)))
        if is_run and len({match[1] for match in numbered if match}) == 1:
            return f"{names[0]} to {names[-1]}"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
