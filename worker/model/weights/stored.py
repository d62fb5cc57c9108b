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
    """A file of weights with the methods of `safe_open`. It is mapped, so only what is used is read."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ModelError if it holds anything but tensors."""
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
        """Return a tensor of which parts are taken by indexing."""
        return self.get_tensor(name)


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """Open the weights like safetensors' `safe_open`, which gives tensors and slices by name."""
    if path.suffix == SAFETENSORS:
        with safe_open(path, framework="pt") as file:
            yield file
    else:
        yield PickledWeights(path)
