"""PlanPicture: draw a placement plan as text, with a bar for each device.

The input is a plan as JSON, as `vectormill plan --json` prints it and as each worker reports its part of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby, repeat
from typing import Any, Final

BAR_WIDTH: Final = 32
WEIGHTS: Final = "█"
ACTIVATIONS: Final = "▒"
HEADROOM: Final = "·"
GIB: Final = 1 << 30
# The strategy of a replica on one device.
REPLICATE: Final = "replicate"

Body = Mapping[str, Any]


def draw_plan(plan: Body) -> str:
    """Draw a plan device by device, then its reasons.

    Bars: █ weights, ▒ activations of a full batch, · headroom.
    """
    return "\n".join(_lines(plan))


def join_parts(parts: Sequence[Body]) -> dict[str, Any]:
    """Join the parts of a plan that workers report; parts of workers that have not started are missing."""
    plan = dict(parts[0].get("plan") or {})
    return {**plan, "replicas": [{name: part[name] for name in part if name != "plan"} for part in parts]}


def format_gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / (1 << 20):.0f} MiB"


def describe_layers(stage: Body) -> str:
    return f"layers {stage['first_layer']}-{stage['first_layer'] + stage['num_layers'] - 1}"


def describe_replica(replica: Body) -> str:
    """Describe how the devices share a replica, and the size of one forward pass."""
    parts = [f"{replica['max_batch_tokens']:,} tokens per forward pass"]
    if replica["strategy"] != REPLICATE:
        num_devices = sum(len(stage["shards"]) for stage in replica["stages"])
        host_bytes = sum(
            shard.get("host_bytes", 0) for stage in replica["stages"] for shard in stage["shards"]
        )
        offloaded = f"{replica.get('num_offloaded')} layers ({format_gib(host_bytes)}) in main memory"
        parts.insert(0, f"{replica['strategy']} over {num_devices} devices" if num_devices > 1 else offloaded)
    return ", ".join(parts)


def _lines(plan: Body) -> Iterator[str]:
    replicas = plan["replicas"]
    yield (
        f"{plan['strategy']}: {len(replicas)} replica{'s' if len(replicas) > 1 else ''} in {plan['precision']}, "
        f"predicted {plan['relative_rate']:.2f} times one device with room for a full batch"
    )
    for first, alike in _group_alike(replicas):
        yield ""
        last = first + len(alike) - 1
        through = "and" if len(alike) == 2 else "to"
        numbers = f"replica {first}" if len(alike) == 1 else f"replicas {first} {through} {last}, each"
        yield f"{numbers}: {describe_replica(alike[0])}"
        for number, replica in enumerate(alike, start=first):
            labels = chain([str(number)], repeat(""))
            for stage in replica["stages"]:
                yield from (f"{next(labels):>3}  {_draw(shard, stage)}" for shard in stage["shards"])
    yield ""
    yield f"  {WEIGHTS} weights   {ACTIVATIONS} activations and buffers   {HEADROOM} headroom"
    idle = plan.get("idle") or {}
    if idle:
        yield ""
        yield from (f"{device} is idle: {reason}." for device, reason in idle.items())
    yield ""
    yield from plan.get("reasons") or ()
    yield from (f"Not {each['alternative']}: {each['reason']}." for each in plan.get("rejected") or ())
    yield from plan.get("proposals") or ()


def _group_alike(replicas: Sequence[Body]) -> Iterator[tuple[int, list[Body]]]:
    """Group consecutive replicas with the same layout.

    Yield the number of the first replica with each group.
    """
    number = 0
    for _, group in groupby(replicas, key=describe_replica):
        alike = list(group)
        yield number, alike
        number += len(alike)


def _draw(shard: Body, stage: Body) -> str:
    cells_per_byte = BAR_WIDTH / max(1, shard["capacity_bytes"])
    weights = min(BAR_WIDTH, round(shard["weight_bytes"] * cells_per_byte))
    activations = min(BAR_WIDTH - weights, round(shard["activation_bytes"] * cells_per_byte))
    bar = WEIGHTS * weights + ACTIVATIONS * activations + HEADROOM * (BAR_WIDTH - weights - activations)
    return (
        f"{shard['device']:<8} {bar} {describe_layers(stage):<13} {format_gib(shard['weight_bytes'])} + "
        f"{format_gib(shard['activation_bytes'])} of {format_gib(shard['capacity_bytes'])}"
    )
