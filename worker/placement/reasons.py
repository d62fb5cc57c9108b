"""Reasons: the sentences that a plan says about itself, and about what it is not. Decides nothing."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from worker.devices.links import Links
from worker.placement.drafts import AUTO, Draft, draft_plans, draft_replicas
from worker.placement.placement import FULLY_SHARDED, PIPELINE, REPLICATE, STRATEGIES, Rejection, Replica
from worker.placement.replicas import ReplicaBuilder, TooTight, format_gib
from worker.placement.room import Room

MakeBuilder = Callable[[str], ReplicaBuilder]  # for another precision of the same model

# From the largest weights to the smallest; the way a proposal goes.
PRECISIONS: Final = ("fp32", "bf16", "int8", "int4")
MOST_MORE_DEVICES: Final = 64
MOST_WAYS_OUT: Final = 3
# A proposal has to be worth the loss of exactness.
WORTH_IT: Final = 1.05


def explain_plan(
    chosen: Draft, builder: ReplicaBuilder, rooms: Sequence[Room], precision: str, memory_share: float
) -> tuple[str, ...]:
    """One sentence per decision: what there is to hold, and how each replica holds it."""
    offered = " or ".join(format_gib(size) for size in sorted({room.capacity_bytes for room in rooms}))
    sentences = [
        f"The weights take {format_gib(builder.weight_bytes)} in {precision}. A device offers {offered}: "
        f"{memory_share:.0%} of its memory, without what a process needs for itself."
    ]
    alone = [replica.devices[0] for replica in chosen.replicas if replica.strategy == REPLICATE]
    if alone:
        tokens = min(each.max_batch_tokens for each in chosen.replicas if each.strategy == REPLICATE)
        sentences.append(
            f"{_listed(alone)} hold{'s' if len(alone) == 1 else ''} a whole replica, with room for {tokens:,} tokens."
        )
    sentences += [
        f"{_listed(replica.devices)} share one by {replica.strategy.replace('_', ' ')}: {replica.max_batch_tokens:,} "
        f"tokens a forward pass"
        + (f" in {replica.micro_batches} micro-batches." if replica.micro_batches > 1 else ".")
        for replica in chosen.replicas
        if replica.strategy != REPLICATE
    ]
    return tuple(sentences)


def explain_idle(chosen: Draft, drafts: Sequence[Draft], rooms: Sequence[Room]) -> dict[str, str]:
    """Why a device holds nothing: what stands against the same strategy over all, or what its own draft says."""
    busy = {device for replica in chosen.replicas for device in replica.devices}
    over_all = [
        refusal.reason
        for draft in drafts
        if draft.strategy == chosen.strategy != REPLICATE and draft.group_size == len(rooms)
        for refusal in draft.refusals
    ]
    without = over_all[0] if over_all else "the plan is predicted to be as fast without it"
    if over_all:
        return {room.name: without for room in rooms if room.name not in busy}
    return {room.name: chosen.idle.get(room.name, without) for room in rooms if room.name not in busy}


def explain_rejections(chosen: Draft, drafts: Sequence[Draft], unit: float) -> tuple[Rejection, ...]:
    """The best draft of every other strategy, and why it was not taken. `unit` is the rate of one device."""
    rejected: list[Rejection] = []
    for strategy in STRATEGIES:
        others = [draft for draft in drafts if draft.strategy == strategy]
        if strategy == chosen.strategy or not others:
            continue
        best = max(others, key=lambda draft: draft.rate)
        if not best.replicas:
            refusals = [refusal for draft in others for refusal in draft.refusals]
            nearest = min(refusals, key=lambda refusal: refusal.missing_bytes, default=None)
            mixed = "only where some devices hold a whole replica and others do not"
            rejected.append(Rejection(strategy, nearest.reason if nearest else mixed))
            continue
        theirs, ours = f"{best.rate / unit:.2f}", f"{chosen.rate / unit:.2f}"
        if best.rate <= chosen.rate:
            reason = f"predicted {theirs} times one device, against {ours}"
        else:
            reason = f"hardly faster, {theirs} against {ours} times one device, and less simple"
        rejected.append(Rejection(best.name, reason))
    return tuple(rejected)


def propose_precision(
    chosen: Draft, rooms: Sequence[Room], make_builder: MakeBuilder, precision: str
) -> tuple[str, ...]:
    """The first smaller precision that turns a model in pieces into whole replicas."""
    if chosen.strategy == REPLICATE and not chosen.idle:
        return ()
    for smaller in smaller_precisions(precision):
        builder = make_builder(smaller)
        whole = draft_replicas(rooms, builder)
        if len(whole.replicas) == len(rooms) and whole.rate >= WORTH_IT * chosen.rate:
            return (
                f"With {smaller} weights ({format_gib(builder.weight_bytes)}) every device holds a whole replica: "
                f"predicted {whole.rate / chosen.rate:.1f} times this plan. Compare the vectors before you switch.",
            )
    return ()


def explain_failure(
    drafts: Sequence[Draft],
    rooms: Sequence[Room],
    links: Links,
    make_builder: MakeBuilder,
    precision: str,
    strategy: str,
) -> str:
    """By how much the nearest plan fails, and the cheapest ways out that would succeed."""
    refusals = [refusal for draft in drafts for refusal in draft.refusals] or [
        TooTight("there is one device only")
    ]
    short = [refusal for refusal in refusals if refusal.missing_bytes > 0]
    nearest = min(short or refusals, key=lambda refusal: refusal.missing_bytes)
    ways = islice(_ways_out(rooms, links, make_builder, precision, strategy), MOST_WAYS_OUT)
    listed = "; ".join(f"({number}) {way}" for number, way in enumerate(ways, start=1))
    where = _listed([room.name for room in rooms])
    return f"The model does not fit on {where}: {nearest.reason}. What would help: {listed}."


def _ways_out(
    rooms: Sequence[Room], links: Links, make_builder: MakeBuilder, precision: str, strategy: str
) -> Iterator[str]:
    """From the cheapest to the dearest; each was tried with the planner's own arithmetic."""
    builder = make_builder(precision)
    if strategy != AUTO:
        others = {draft.strategy for draft in draft_plans(rooms, links, builder, AUTO) if draft.replicas}
        if others:
            yield f"the strategy {' or '.join(name for name in STRATEGIES if name in others)}"
    for smaller in smaller_precisions(precision):
        lighter = make_builder(smaller)
        if any(draft.replicas for draft in draft_plans(rooms, links, lighter, strategy)):
            yield f"{smaller} weights, {format_gib(lighter.weight_bytes)}"
            break
    largest = max(rooms, key=lambda room: room.capacity_bytes)
    for more in range(1, MOST_MORE_DEVICES):
        fleet = [*rooms, *(replace(largest, name=f"{largest.name}+{number}") for number in range(more))]
        built = [builder.build(shared, fleet, links.default) for shared in (PIPELINE, FULLY_SHARDED)]
        if any(isinstance(replica, Replica) for replica in built):
            yield f"{more} more device{'s' if more > 1 else ''} like {largest.name}"
            break
    missing = builder.build(REPLICATE, [largest], "")
    if isinstance(missing, TooTight):
        yield f"a device with {format_gib(missing.missing_bytes)} more than {largest.name} has"


def smaller_precisions(precision: str) -> tuple[str, ...]:
    known = "bf16" if precision == "fp16" else precision
    return PRECISIONS[PRECISIONS.index(known) + 1 :]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
