"""The strategies by which devices hold a model, one row each, with their descriptions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

REPLICATE: Final = "replicate"
HYBRID: Final = "hybrid"
PIPELINE: Final = "pipeline"
TENSOR: Final = "tensor"
FULLY_SHARDED: Final = "fully_sharded"
OFFLOAD: Final = "offload"

# A GPU whose model has layers in main memory holds so many of these at a time: one to compute and one that arrives.
NUM_SLOTS: Final = 2


@dataclass(frozen=True, slots=True)
class Strategy:
    """One strategy.

    `how_shared` describes how devices share a replica, with {stages} to fill in;
    empty if they do not. `why_slower` explains why such a plan was not chosen. If
    `has_stages`, each rank holds separate whole layers, otherwise a part of every layer. If it `divides_batches`, each
    rank encodes other texts of a batch, otherwise all of them.
    """

    name: str
    why_slower: str
    how_shared: str = ""
    has_stages: bool = False
    divides_batches: bool = False


# From the simplest to the most demanding: of two that are equally fast, the earlier one is chosen.
STRATEGIES: Final[Mapping[str, Strategy]] = {
    strategy.name: strategy
    for strategy in (
        Strategy(REPLICATE, "the other devices cannot hold a whole replica"),
        Strategy(HYBRID, "devices that share a replica do less than they would in the chosen plan"),
        Strategy(
            PIPELINE,
            "the slowest stage sets the pace, and every batch is handed from stage to stage",
            "as a pipeline of {stages} stages, each at work on another batch",
            has_stages=True,
        ),
        Strategy(TENSOR, "every layer waits for two all-reduces", "by splitting every layer"),
        Strategy(
            FULLY_SHARDED,
            "every layer's weights are gathered for every batch",
            "fully sharded: each encodes different texts and gathers the weights layer by layer",
            divides_batches=True,
        ),
        Strategy(
            OFFLOAD,
            "every batch waits for layers that are copied from main memory",
            has_stages=True,
        ),
    )
}
# The strategies by which several devices share one replica.
SHARED: Final = tuple(name for name, strategy in STRATEGIES.items() if strategy.how_shared)
