"""Picture: a placement as text for people, with a bar for every device. Knows nothing of terminals or colours."""

from collections.abc import Iterator, Sequence
from itertools import chain, groupby, repeat
from typing import Any, Final

from worker.placement.placement import Placement, Replica, Shard, Stage
from worker.placement.replicas import format_gib
from worker.placement.strategies import REPLICATE

BAR_WIDTH: Final = 32
WEIGHTS: Final = "█"
ACTIVATIONS: Final = "▒"
HEADROOM: Final = "·"


def draw_placement(placement: Placement) -> str:
    """The plan, device by device, then its reasons. Bars: █ weights, ▒ activations of a full batch, · headroom."""
    return "\n".join(_lines(placement))


def _lines(placement: Placement) -> Iterator[str]:
    replicas = placement.replicas
    yield (
        f"{placement.strategy}: {len(replicas)} replica{'s' if len(replicas) > 1 else ''} in {placement.precision}, "
        f"predicted {placement.relative_rate:.2f} times one device with room for a full batch"
    )
    for first, alike in _group_alike(replicas):
        yield ""
        last = first + len(alike) - 1
        through = "and" if len(alike) == 2 else "to"
        numbers = f"replica {first}" if len(alike) == 1 else f"replicas {first} {through} {last}, each"
        yield f"{numbers}: {_describe(alike[0])}"
        for number, replica in enumerate(alike, start=first):
            labels = chain([str(number)], repeat(""))
            for stage in replica.stages:
                yield from (f"{next(labels):>3}  {_draw(shard, stage)}" for shard in stage.shards)
    yield ""
    yield f"  {WEIGHTS} weights   {ACTIVATIONS} activations   {HEADROOM} headroom"
    if placement.idle:
        yield ""
        yield from (f"{device} is idle: {reason}." for device, reason in placement.idle.items())
    yield ""
    yield from placement.reasons
    yield from (f"Not {each.alternative}: {each.reason}." for each in placement.rejected)
    yield from placement.proposals


def _group_alike(replicas: Sequence[Replica]) -> Iterator[tuple[int, list[Replica]]]:
    """Replicas in a row that are shared in one way, with the number of the first."""
    number = 0
    for _, group in groupby(replicas, key=_describe):
        alike = list(group)
        yield number, alike
        number += len(alike)


def _describe(replica: Replica) -> str:
    parts = [f"{replica.max_batch_tokens:,} tokens a forward pass"]
    if replica.strategy != REPLICATE:
        parts.insert(0, f"{replica.strategy} over {len(replica.devices)} devices")
    if replica.micro_batches > 1:
        parts.append(f"{replica.micro_batches} micro-batches")
    return ", ".join(parts)


def _draw(shard: Shard, stage: Stage) -> str:
    per_byte = BAR_WIDTH / max(1, shard.capacity_bytes)
    weights = min(BAR_WIDTH, round(shard.weight_bytes * per_byte))
    activations = min(BAR_WIDTH - weights, round(shard.activation_bytes * per_byte))
    bar = WEIGHTS * weights + ACTIVATIONS * activations + HEADROOM * (BAR_WIDTH - weights - activations)
    layers = f"layers {stage.first_layer}-{stage.first_layer + stage.num_layers - 1}"
    return (
        f"{shard.device:<8} {bar} {layers:<13} {format_gib(shard.weight_bytes)} + "
        f"{format_gib(shard.activation_bytes)} of {format_gib(shard.capacity_bytes)}"
    )


def placement_json(placement: Placement) -> dict[str, Any]:
    """The plan as a JSON object, bytes as integers."""
    return {
        "strategy": placement.strategy,
        "precision": placement.precision,
        "relative_rate": round(placement.relative_rate, 4),
        "longest_text_tokens": placement.longest_text_tokens,
        "replicas": [replica_json(replica) for replica in placement.replicas],
        "idle": dict(placement.idle),
        "reasons": list(placement.reasons),
        "rejected": [{"alternative": each.alternative, "reason": each.reason} for each in placement.rejected],
        "proposals": list(placement.proposals),
    }


def part_json(placement: Placement, replica: Replica) -> dict[str, Any]:
    """One replica's part of a plan, for the worker that runs it, with the plan's own sentences under `plan`."""
    plan = placement_json(placement)
    num_replicas = len(plan.pop("replicas"))
    return replica_json(replica) | {"plan": {"num_replicas": num_replicas, **plan}}


def replica_json(replica: Replica) -> dict[str, Any]:
    """One replica as a JSON object: how it is shared, and what each device holds."""
    return {
        "strategy": replica.strategy,
        "micro_batches": replica.micro_batches,
        "max_batch_tokens": replica.max_batch_tokens,
        "relative_rate": round(replica.relative_rate, 4),
        "stages": [
            {
                "first_layer": stage.first_layer,
                "num_layers": stage.num_layers,
                "shards": [
                    {
                        "device": shard.device,
                        "capacity_bytes": shard.capacity_bytes,
                        "weight_bytes": shard.weight_bytes,
                        "activation_bytes": shard.activation_bytes,
                        "headroom_bytes": shard.headroom_bytes,
                    }
                    for shard in stage.shards
                ],
            }
            for stage in replica.stages
        ],
    }
