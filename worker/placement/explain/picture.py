"""Picture: a placement as text for people, and as JSON. How it is drawn: vectormill/workers/plan_picture.py."""

from typing import Any

from vectormill.workers.plan_picture import draw_plan
from worker.placement.placement import Placement, Replica


def draw_placement(placement: Placement) -> str:
    """Draw the plan by device, then its reasons: █ weights, ▒ activations of a full batch, · headroom."""
    return draw_plan(placement_json(placement))


def placement_json(placement: Placement) -> dict[str, Any]:
    """Return the plan as a JSON object, bytes as integers."""
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
    """Return one replica's part of a plan, for the worker that runs it, with the plan's own sentences under `plan`."""
    plan = placement_json(placement)
    num_replicas = len(plan.pop("replicas"))
    return replica_json(replica) | {"plan": {"num_replicas": num_replicas, **plan}}


def replica_json(replica: Replica) -> dict[str, Any]:
    """Return one replica as a JSON object: how it is shared, and what each device holds."""
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
