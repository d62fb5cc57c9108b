"""WeightFiles: parts of a model's tensors, read from its safetensors files. Knows no strategy and no device.

A rank reads the bytes of its own part and no others, so that k ranks together read the model once.
"""

import re
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from vectormill.domain.errors import ModelError
from vectormill.models.model_card import ModelCard, find_weights


class WeightFiles:
    """Open for reading while it is a context. `prefix` is what some files put before the bare transformer's names."""

    def __init__(self, card: ModelCard, prefix: str) -> None:
        self._card = card
        self._prefix = prefix
        self._files: list[Any] = []
        self._file_of: dict[str, Any] = {}
        self.num_bytes = 0

    def __enter__(self) -> Self:
        for path in find_weights(self._card.path, self._card.name):
            file: Any = safe_open(path, framework="pt")
            self._files.append(file.__enter__())
            self._file_of |= dict.fromkeys(file.keys(), file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.__exit__(kind, error, trace)

    def read(self, name: str, dim: int, ranges: list[tuple[int, int]], dtype: torch.dtype) -> Tensor:
        """The given ranges of the tensor's dimension, one behind the other. Raises ModelError when it is missing."""
        stored = name if name in self._file_of else f"{self._prefix}.{name}"
        if stored not in self._file_of:
            raise ModelError(f"The weights in {self._card.path} have no tensor {name!r}.")
        view = self._file_of[stored].get_slice(stored)
        before = (slice(None),) * dim
        parts = [view[(*before, slice(start, end))] for start, end in ranges]
        tensor: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
        self.num_bytes += tensor.nbytes
        return tensor.to(dtype)

    def count_bytes(self, name: str, num_values: int) -> int:
        """How many bytes so many values of the tensor take in its file, whose type is such as F32 or BF16."""
        stored = name if name in self._file_of else f"{self._prefix}.{name}"
        digits = re.search(r"\d+", self._file_of[stored].get_slice(stored).get_dtype())
        return num_values * int(digits[0]) // 8 if digits else num_values

    def shape(self, name: str) -> tuple[int, ...]:
        stored = name if name in self._file_of else f"{self._prefix}.{name}"
        return tuple(self._file_of[stored].get_slice(stored).get_shape())
