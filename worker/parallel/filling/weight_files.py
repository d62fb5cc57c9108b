"""WeightFiles: parts of a model's tensors, read from its files. Knows no strategy and no device.

A rank reads the bytes of its own part and no others, so that k ranks together read the model once.
"""

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from vectormill.domain.errors import ModelError
from vectormill.models.model_card import ModelCard
from vectormill.models.weight_files import find_weights
from vectormill.models.weight_headers import TensorHeader, read_header
from worker.model.classifiers.published import list_published_names
from worker.model.weights.stored import open_weights


class WeightFiles:
    """Open for reading while it is a context. Tensors are called as transformers calls those of the bare transformer,
    before whose names some files put a `prefix`, and published ones another."""

    def __init__(self, card: ModelCard, prefix: str) -> None:
        self._card = card
        self._prefix = prefix
        self._open = ExitStack()
        self._places: dict[
            str, tuple[Any, str, TensorHeader]
        ] = {}  # the file, the name there and what it says
        self.num_bytes = 0

    def __enter__(self) -> Self:
        published = list_published_names(self._card)
        for path in find_weights(self._card.path, self._card.name):
            file = self._open.enter_context(open_weights(path))
            self._places |= {
                published(stored): (file, stored, header) for stored, header in read_header(path).items()
            }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def read(self, name: str, dim: int, ranges: list[tuple[int, int]], dtype: torch.dtype) -> Tensor:
        """Return ranges of the tensor's dimension, one behind the other. Raises ModelError if it is missing."""
        file, stored, _ = self._find(name)
        view = file.get_slice(stored)
        before = (slice(None),) * dim
        parts = [view[(*before, slice(start, end))] for start, end in ranges]
        tensor: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
        self.num_bytes += tensor.nbytes
        return tensor.to(dtype)

    def count_bytes(self, name: str, num_values: int) -> int:
        """Return how many bytes so many values of the tensor take in its file."""
        return num_values * self._find(name)[2].value_bytes

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises ModelError if it is missing."""
        return self._find(name)[2].shape

    def _find(self, name: str) -> tuple[Any, str, TensorHeader]:
        for known in (name, f"{self._prefix}.{name}"):
            if known in self._places:
                return self._places[known]
        raise ModelError(
            f"The weights in {self._card.path} do not fill the model {self._card.name!r}: {name} is missing."
        )
