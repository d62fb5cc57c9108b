"""The devices that are made up: how fast an H100 and an H200 are taken to be. Assumptions, until they are measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.models.shapes import Shape
from benchmarks.probes.model_cost import ModelCost
from benchmarks.systems.host.made_up import MadeUpDevice
from worker.placement.sizes.speed import HALF_RATE_TOKENS

# As the worker's batches on an accelerator.
BATCH_TOKENS: Final = 32_768
# Of the products and biases of a layer as BERT has it, in squares and multiples of the hidden size; its norms too.
SQUARES_PER_LAYER: Final = 12
VECTORS_PER_LAYER: Final = 13


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """`peak_flop_per_second` in dense bf16 by the data sheet, the share of it that a full batch reaches, and what each
    batch costs beside its arithmetic.
    """

    name: str
    peak_flop_per_second: float
    efficiency: float
    launch_seconds: float

    def make_device(self, cost: ModelCost, clock: Path) -> MadeUpDevice:
        """As worker.placement.sizes.speed predicts it: half of the rate at so many tokens at once."""
        return MadeUpDevice(
            self.name,
            str(clock),
            self.peak_flop_per_second * self.efficiency,
            self.launch_seconds,
            HALF_RATE_TOKENS["cuda"],
            2.0 * cost.num_multiplied_parameters,
            4.0 * cost.num_layers * cost.hidden_size,
        )

    def describe(self) -> str:
        return (
            f"{self.name}: {self.peak_flop_per_second / 1e12:.0f} TFLOP/s, {self.efficiency:.0%} of it in a full "
            f"batch, {self.launch_seconds * 1e3:g} ms a batch beside that"
        )


# At 47 % of the data sheet an H100 computes some 26,000 texts of 100 tokens a second with BERT-base. An H200 has
# the same arithmetic and 1.4 times the bandwidth, which is for what lies between the products.
KINDS: Final[Mapping[str, DeviceKind]] = {
    kind.name: kind
    for kind in (DeviceKind("H100", 989e12, 0.47, 3e-4), DeviceKind("H200", 989e12, 0.52, 3e-4))
}


# What two cores are to the sixteen or more that a GPU's host has, this is to the GPU.
EIGHTH: Final = DeviceKind("an eighth of an H100", 989e12 / 8, 0.47, 3e-4)


def find_shape_cost(shape: Shape) -> ModelCost:
    """Of an encoder as BERT is, without its weights."""
    layers, hidden = int(shape.config["num_hidden_layers"]), int(shape.config["hidden_size"])
    per_layer = SQUARES_PER_LAYER * hidden * hidden + VECTORS_PER_LAYER * hidden
    return ModelCost(layers, hidden, layers * per_layer)


def find_text_rate(device: MadeUpDevice, num_tokens: int) -> float:
    """Texts of that length a second, in full batches one after the other."""
    num_texts = max(1, BATCH_TOKENS // num_tokens)
    return num_texts / device.count_seconds(np.full(num_texts, num_tokens, dtype=np.int64))
