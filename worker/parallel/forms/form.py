"""Form: the contract between a strategy, which decides what a rank computes, and the kernels that take it."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worker.batching.batch import Batch

# Arrays of a part on the device, by name.
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """Some sequences of a batch as one forward pass takes them, still on the host.

    `shape` is that of the token ids, and, with the hidden size behind it, of the hidden states that stages pass on:
    every rank knows it without being told.
    """

    arrays: Mapping[str, NDArray[np.int64]]
    shape: tuple[int, ...]
    max_seqlen: int


class Form(Protocol):
    """Knows the rank's transformer, whole or a part of it; one that is cut is called by all ranks at once."""

    @property
    @abstractmethod
    def attention(self) -> str:
        """Return the kernel as an EncoderReport names it."""

    @property
    @abstractmethod
    def kernel(self) -> str:
        """Return the name that transformers know the kernel by."""

    @abstractmethod
    def lay_out(self, batch: Batch) -> Part:
        """Return the sequences as arrays. Asks no device and no other rank."""

    @abstractmethod
    def run(self, part: Part, tensors: Tensors, received: Tensor | None) -> Tensor:
        """Return hidden states [*part.shape, hidden size] of this rank's layers, given those of the stage before."""

    @abstractmethod
    def pool(self, states: Tensor, tensors: Tensors) -> Tensor:
        """Return pooled vectors [n, hidden size * number of modes] in fp32."""

    @abstractmethod
    def of_tokens(self, states: Tensor, tensors: Tensors) -> Tensor:
        """Return [tokens, hidden size]: without padding, one sequence behind the other."""
