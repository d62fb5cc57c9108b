"""Speed: predicts tokens per second of a replica from arithmetic, memory and links. A model, not a measurement.

It has to rank plans, so it knows what differs between them: that small batches use a device badly, that stages of
unequal work wait for the slowest, that collectives cost bytes and latency. It knows nothing of devices' names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from worker.devices.links import BYTES_PER_SECOND, LATENCY_SECONDS

# Half of a device's rate is reached at so many tokens at once. Measured on two CPU cores: 256 tokens reach 70 % of what
# 2,048 do (docs/LOG.md); for GPUs the roofline's ridge is near 300 to 600 tokens, and kernels want several waves.
HALF_RATE_TOKENS: Final = {"cpu": 128, "cuda": 1024, "mps": 512}
# A collective in the middle of a layer also ends the overlap of kernels on both sides.
COLLECTIVES_PER_LAYER: Final = 2
WEIGHT_GATHERS_AHEAD: Final = 1
# Gathers run beside the layers and take bandwidth and multiprocessors from them: a guess until it is measured on GPUs.
OVERLAP_EFFICIENCY: Final = 0.85


@dataclass(frozen=True, slots=True)
class TokenCost:
    """The cost of a token: arithmetic of all layers, and the bytes that a layer passes on."""

    flop_per_token: float
    num_layers: int
    hidden_bytes_per_token: int
    layer_weight_bytes: int


def device_rate(flops: float, kind: str, batch_tokens: float, cost: TokenCost) -> float:
    """Return tokens a second of one device that holds all layers, at so many tokens at once."""
    saturation = batch_tokens / (batch_tokens + HALF_RATE_TOKENS[kind])
    return flops / cost.flop_per_token * saturation


def pipeline_rate(
    stage_rates: Sequence[float], micro_batches: int, micro_batch_tokens: float, link: str, cost: TokenCost
) -> float:
    """Return tokens a second of stages in a row. `stage_rates` are each stage's own, for its share of the layers.

    With m micro-batches in flight through p stages, the slowest stage stands still (p-1)/(m+p-1) of the time at the
    ends of a batch. Source: Huang et al., GPipe (2019), section 2.3.
    """
    stages = len(stage_rates)
    handover = (
        LATENCY_SECONDS[link] + micro_batch_tokens * cost.hidden_bytes_per_token / BYTES_PER_SECOND[link]
    )
    seconds = [micro_batch_tokens / rate for rate in stage_rates]
    if micro_batches == 1:  # one stage after another: layers on several devices, one of them busy
        return micro_batch_tokens / (sum(seconds) + handover * (stages - 1))
    slowest = max(seconds)
    whole = sum(seconds) + (micro_batches - 1) * slowest + handover * (stages - 1)
    return micro_batches * micro_batch_tokens / whole


def tensor_rate(flops: Sequence[float], kind: str, batch_tokens: float, link: str, cost: TokenCost) -> float:
    """Return tokens a second of devices that split every layer: the slowest of them, and two all-reduces a layer.

    A ring all-reduce of b bytes over n devices moves 2·(n-1)/n·b through each link. Source: Shoeybi et al.,
    Megatron-LM (2019), section 3.
    """
    ranks = len(flops)
    compute = batch_tokens / (ranks * device_rate(min(flops), kind, batch_tokens, cost))
    moved = 2 * (ranks - 1) / ranks * batch_tokens * cost.hidden_bytes_per_token
    collective = 2 * LATENCY_SECONDS[link] + moved / BYTES_PER_SECOND[link]
    return batch_tokens / (compute + COLLECTIVES_PER_LAYER * cost.num_layers * collective)


def fully_sharded_rate(
    flops: Sequence[float], kind: str, batch_tokens: float, link: str, cost: TokenCost
) -> float:
    """Return tokens a second of devices that each encode a batch of their own and gather the weights layer by layer.

    The next layer is gathered while one computes, so that the slower of both counts. Source: Zhao et al., PyTorch FSDP
    (2023), section 3.3.
    """
    ranks = len(flops)
    rank_tokens = batch_tokens / ranks
    alone = rank_tokens / device_rate(min(flops), kind, rank_tokens, cost) / cost.num_layers
    compute = alone / OVERLAP_EFFICIENCY
    gathered = (ranks - 1) / ranks * cost.layer_weight_bytes
    gather = LATENCY_SECONDS[link] + gathered / BYTES_PER_SECOND[link]
    seconds = cost.num_layers * max(compute, gather) + WEIGHT_GATHERS_AHEAD * gather
    return batch_tokens / seconds
