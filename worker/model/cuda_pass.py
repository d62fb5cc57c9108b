"""Run one batch on a GPU: copy it there, compute it and copy the results back, without waiting in between.

Pinned memory comes from torch's allocator, which keeps freed blocks and reuses them once the copies that used
them have ended: so only the first batches of a size pay for pinning.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vectormill.ragged import Ragged
from worker.encoder.encoder import DeviceLost
from worker.encoder.memory import is_out_of_memory

# From inputs on the device to results on the device, such as vectors [n, dim].
Compute = Callable[..., Tensor]
# From the results on the host to a row for each sequence.
LayOut = Callable[[NDArray[Any]], Ragged]


class CudaPass:
    """A batch that is copied to the GPU when it is created and computed when it is started.

    Implements ForwardPass.
    """

    def __init__(
        self,
        inputs: Sequence[NDArray[np.int64]],
        compute: Compute,
        device: torch.device,
        stream: torch.cuda.Stream,
        without_gradients: Callable[[], AbstractContextManager[object]] = torch.inference_mode,
        lay_out: LayOut = Ragged.from_matrix,
    ) -> None:
        """Copy the inputs to the device.

        `stream` is the CUDA stream for this copy; `without_gradients` may replace inference mode.
        """
        self._compute = compute
        self._lay_out = lay_out
        self._without_gradients = without_gradients
        self._vectors: Tensor | None = None
        with losing_device(), without_gradients(), torch.cuda.stream(stream):
            host = join_inputs(inputs, pin_memory=True)
            self._inputs = host.to(device, non_blocking=True)  # a single copy for all inputs
            self._arrived = stream.record_event()
        self._shapes = [array.shape for array in inputs]

    def start(self) -> None:
        stream = torch.cuda.current_stream()
        with losing_device(), self._without_gradients():
            stream.wait_event(self._arrived)
            # Keeps the memory from being reused before this stream has read it.
            self._inputs.record_stream(stream)
            vectors = self._compute(*split_inputs(self._inputs, self._shapes))
            self._vectors = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
            self._vectors.copy_(vectors, non_blocking=True)
            # A thread that waits for this event sleeps; by default CUDA would busy-wait on a core that the
            # tokenizer needs.
            self._done = torch.cuda.Event(blocking=True)
            self._done.record(stream)

    def results(self) -> Ragged:
        assert self._vectors is not None
        with losing_device():
            self._done.synchronize()
        # Keeps the pinned block allocated as long as it is referenced.
        return self._lay_out(self._vectors.numpy())


@contextmanager
def losing_device() -> Iterator[None]:
    """Raise DeviceLost in place of an error after which CUDA fails every call. Out-of-memory is not one."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error) or not is_device_lost():
            raise
        raise DeviceLost(str(error).strip().splitlines()[0]) from error


def is_device_lost() -> bool:
    """Return True if CUDA fails every call from now on."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def join_inputs(inputs: Sequence[NDArray[np.int64]], *, pin_memory: bool) -> Tensor:
    """Return all arrays concatenated in one tensor."""
    host = torch.empty(sum(array.size for array in inputs), dtype=torch.int64, pin_memory=pin_memory)
    np.concatenate([array.ravel() for array in inputs], out=host.numpy())
    return host


def copy_inputs(inputs: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Copy all arrays to the device at once, without waiting. Work launched later sees them there."""
    host = join_inputs(inputs, pin_memory=device.type == "cuda")
    return split_inputs(host.to(device, non_blocking=True), [array.shape for array in inputs])


def split_inputs(joined: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the joined arrays as views with these shapes."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    return [part.view(shape) for part, shape in zip(joined.split(sizes), shapes, strict=True)]
