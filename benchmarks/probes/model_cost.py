"""ModelCost: how many floating-point operations a model needs for texts of given lengths. Loads no weights."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from vectormill.models.model_card import ModelCard
from vectormill.models.weight_files import find_weights

# Looked up, or not used for the vector: neither is multiplied with.
NOT_MULTIPLIED = ("embeddings", "embed_tokens", "pooler")


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What the arithmetic of a transformer depends on."""

    num_layers: int
    hidden_size: int
    num_multiplied_parameters: int

    @classmethod
    def of(cls, card: ModelCard) -> Self:
        """Read from config.json and the headers of the weights."""
        config = json.loads((card.path / "config.json").read_text(encoding="utf-8"))
        shapes = [shape for path in find_weights(card.path, card.name) for shape in read_shapes(path).items()]
        return cls(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_multiplied_parameters=sum(
                math.prod(shape) for name, shape in shapes if not any(part in name for part in NOT_MULTIPLIED)
            ),
        )

    def count_flop(self, lengths: NDArray[np.int64]) -> float:
        """Operations for texts of so many tokens, padding not counted.

        Per token 2 for every multiplied parameter, and in attention 4 · layers · length · hidden: scores and their
        weighted sum, each a product of two operations. Source: Kaplan et al., Scaling Laws, section 2.1.
        """
        lengths = lengths.astype(np.float64)
        dense = 2.0 * self.num_multiplied_parameters * lengths.sum()
        attention = 4.0 * self.num_layers * self.hidden_size * np.square(lengths).sum()
        return float(dense + attention)


def read_shapes(path: Path) -> dict[str, list[int]]:
    """Tensor name -> shape, from the header of a safetensors file: its size in eight bytes, then JSON."""
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
