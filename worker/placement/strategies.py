"""The strategies by which devices hold a model, a row each, with what is said of them. Builds no plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

REPLICATE: Final = "replicate"
HYBRID: Final = "hybrid"
PIPELINE: Final = "pipeline"
TENSOR: Final = "tensor"
FULLY_SHARDED: Final = "fully_sharded"


@dataclass(frozen=True, slots=True)
class Strategy:
    """One strategy.

    `title` is what people call it. `how_shared` is said of the devices that share a replica, with {stages} and
    {micro_batches}; empty where none do.

    `why_slower` is said of a plan that was not taken. Where `has_stages`, each rank holds whole layers of its own, and
    else a part of every layer.
    """

    name: str
    title: str
    why_slower: str
    how_shared: str = ""
    has_stages: bool = False


# From the simplest to the most demanding: of two that are as fast, the one that comes first is taken.
STRATEGIES: Final[Mapping[str, Strategy]] = {
    strategy.name: strategy
    for strategy in (
        Strategy(REPLICATE, "replicas", "the other devices cannot hold a whole replica"),
        Strategy(HYBRID, "a mix", "devices that share a replica get less done than all of them otherwise"),
        Strategy(
            PIPELINE,
            "pipeline",
            "stages stand still at both ends of every batch",
            "as a pipeline of {stages} stages, {micro_batches} micro-batches in flight",
            has_stages=True,
        ),
        Strategy(
            TENSOR, "tensor parallel", "every layer waits for two all-reduces", "by splitting every layer"
        ),
        Strategy(
            FULLY_SHARDED,
            "fully sharded",
            "every layer's weights are gathered for every batch",
            "fully sharded: each encodes texts of its own and gathers the weights layer by layer",
        ),
    )
}
# Those by which the devices of one replica share it.
SHARED: Final = tuple(name for name, strategy in STRATEGIES.items() if strategy.how_shared)
