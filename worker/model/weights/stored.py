"""Stored weights: a file's tensors, whole or in parts. Of a pickle tensors alone are read; nothing in it is run."""

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from vectormill.domain.errors import ModelError
from vectormill.models.weight_headers import SAFETENSORS


class PickledWeights:
    """Has the methods of what `safe_open` opens. The file is mapped: of a tensor only what is used is read, unless it
    is older than torch 1.6."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError when there is more in it than tensors."""
        options = {"mmap": True} if zipfile.is_zipfile(path) else {}
        try:
            self._tensors: dict[str, Tensor] = torch.load(
                path, map_location="cpu", weights_only=True, **options
            )
        except Exception as error:  # whatever a pickle that holds more than tensors makes torch raise
            raise ModelError(f"The tensors of {path} cannot be read: {error}") from error

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name].detach()

    def get_slice(self, name: str) -> Tensor:
        """Of which parts are taken as of an array."""
        return self.get_tensor(name)


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """As safetensors' `safe_open`, which gives tensors by name and slices of them."""
    if path.suffix == SAFETENSORS:
        with safe_open(path, framework="pt") as file:
            yield file
    else:
        yield PickledWeights(path)
