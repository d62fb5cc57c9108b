"""What a measured child and its parent say to each other. Imports the standard library alone, as peers need."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

# Commands, each a line on the child's standard input; the first two are followed by a space and the name of a mix.
WARM_UP: Final = "warm_up"
ENCODE: Final = "encode"
SAVE: Final = "save"
REPORT: Final = "report"
# An option of children: the file in which our engine leaves the batches of its last pass, and a bare loop finds them.
BATCHES: Final = "batches"
# Another one: that of the weights, instead of what is chosen for the device.
PRECISION: Final = "precision"


@dataclass(frozen=True, slots=True)
class ChildOrder:
    """What a child is told when it starts.

    `model` is a directory. `texts` is a file of JSON: name of a mix -> its texts. `vectors` is where those of the last
    pass are saved, `cache_dir` where whatever else may be kept. `options` belong to the kind of child alone.
    """

    model: str
    texts: str
    vectors: str
    cache_dir: str
    device: str = "cpu"
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pass:
    """All texts encoded once. Tokens are real ones; computed tokens have the padding with them."""

    seconds: float
    num_tokens: int
    num_computed_tokens: int

    @property
    def padding_waste(self) -> float:
        """Share of the computed tokens that were padding."""
        return 1 - self.num_tokens / self.num_computed_tokens if self.num_computed_tokens else 0.0
