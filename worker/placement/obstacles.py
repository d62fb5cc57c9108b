"""Explain why a model cannot be placed in some way. The plan and the load ask the same function.

Imports no framework.
"""

from collections.abc import Sequence

from vectormill.models.families import find_family
from vectormill.models.model_card import GLINER, ModelCard
from vectormill.models.model_shape import ModelShape
from vectormill.models.rounding import find_group_size
from worker.devices.backends import SHARING
from worker.devices.device import CUDA, Device
from worker.placement.capacity import DeviceCapacity
from worker.placement.footprint import COMPRESSED
from worker.placement.placement import AUTO
from worker.placement.strategies import FULLY_SHARDED, OFFLOAD, PIPELINE, REPLICATE, TENSOR


def find_obstacle(
    card: ModelCard,
    strategy: str,
    devices: Sequence[Device | DeviceCapacity],
    *,
    precision: str,
    backend: str = AUTO,
    is_reproducible: bool = False,
) -> str:
    """Return why these devices cannot hold the model by this strategy; empty if they can, memory aside.

    `precision` is that of the weights; `backend` and `is_reproducible` are as in an EncoderOrder.
    """
    if strategy == REPLICATE:
        return ""
    if card.extractor == GLINER or card.static is not None:
        return f"models of the architecture {card.extractor or card.model_type!r} cannot be shared between devices"
    if backend not in (AUTO, SHARING.name):
        return f"only {SHARING.name} runs parts of a model, and the backend {backend} was requested"
    if is_reproducible and (strategy == FULLY_SHARDED or card.is_extractor):
        return "a reproducible model is computed in tiles, which only pipelines and tensor parallelism share"
    if strategy == OFFLOAD and card.is_extractor:
        return "an extractor reads its layers' weights when it is loaded, and keeps them on the device"
    if precision in COMPRESSED and len({device.has_bf16 for device in devices}) > 1:
        return f"{precision} weights are computed in bf16 on some of these devices, and the others do not support it"
    return find_division_obstacle(card.shape, strategy, devices, precision)


def find_division_obstacle(
    shape: ModelShape, strategy: str, devices: Sequence[Device | DeviceCapacity], precision: str
) -> str:
    """Return why a model of this shape cannot be divided among the devices; empty if it can."""
    if strategy == REPLICATE:
        return ""
    num_ranks, layout = len(devices), find_family(shape.model_type).layout
    if layout is None:
        return f"models of the architecture {shape.model_type!r} cannot be shared between devices"
    if strategy == OFFLOAD and (devices[0].kind != CUDA or devices[0].shares_host_memory):
        return f"layers are kept in main memory for CUDA devices with memory of their own, not for {devices[0].name}"
    if parts := find_parts_of_one_card(devices):
        return f"{' and '.join(parts)} are parts of one GPU, which NCCL cannot connect"
    if strategy == PIPELINE and num_ranks > shape.num_layers:
        return f"{num_ranks} stages need at least as many layers, and the model has {shape.num_layers}"
    if strategy != TENSOR:
        return ""
    if layout.tensor_obstacle:
        return layout.tensor_obstacle
    sizes = list_tensor_sizes(shape)
    if num_ranks not in sizes:
        return (
            f"{shape.num_heads} attention heads, {shape.num_key_value_heads} key heads and {shape.intermediate_size:,} "
            f"intermediate values cannot be divided among {num_ranks} devices; possible numbers are "
            f"{', '.join(str(size) for size in sizes)}"
        )
    if precision not in COMPRESSED:
        return ""
    for inputs in (shape.num_heads * shape.head_size, shape.intermediate_size):
        size = find_group_size(inputs)
        if (inputs // num_ranks) % size:
            return (
                f"splitting {inputs:,} inputs of a matrix among {num_ranks} devices breaks groups of {size} "
                f"{precision} weights that share a scale"
            )
    return ""


def list_tensor_sizes(shape: ModelShape) -> list[int]:
    """Return the numbers of ranks that divide the heads, which stay whole, and the intermediate size.

    Ranks that outnumber the key heads are a multiple of them, and as many of them have the same one.
    """
    key_heads = shape.num_key_value_heads
    return [
        ranks
        for ranks in range(1, shape.num_heads + 1)
        if shape.num_heads % ranks == shape.intermediate_size % ranks == 0
        and 0 in (key_heads % ranks, ranks % key_heads)
    ]


def find_parts_of_one_card(devices: Sequence[Device | DeviceCapacity]) -> list[str]:
    """Return the names of devices that are parts of one GPU; empty if no two of them are."""
    cards: dict[str, list[str]] = {}
    for device in devices:
        if device.card:
            cards.setdefault(device.card, []).append(device.name)
    return next((names for names in cards.values() if len(names) > 1), [])
