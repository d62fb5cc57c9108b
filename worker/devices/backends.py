"""The backends that can run a model, one row each, with everything that other code asks about one. Imports none."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from worker.devices.device import CPU


@dataclass(frozen=True, slots=True)
class Backend:
    """One backend.

    `package` is the package that it needs. `loader`, written "module:function", makes an Encoder from an
    order and the choices. `only_kind` is the kind of device that it runs on; None means any. `attention` is the kernel
    that plans assume; it takes `pair_bytes` for each pair of a sequence's tokens, or if 0 what the architecture takes.
    `memory_errors` are parts of its messages that memory ran out, in lower case. `rank_loader` makes the Encoder of
    one of several devices that share a model, from an order and its rank; empty if devices cannot share one.
    """

    name: str
    package: str
    loader: str
    has_packed_attention: bool
    only_kind: str | None = None
    attention: str = "sdpa"
    pair_bytes: int = 0
    memory_errors: tuple[str, ...] = ()
    rank_loader: str = ""

    def runs_on(self, kind: str) -> bool:
        return self.only_kind in (None, kind)


# In order of preference: the first backend that is installed and runs on the device is used. On a CPU
# openvino needs two thirds of torch's time and less than half of its memory.
BACKENDS: Final[Mapping[str, Backend]] = {
    backend.name: backend
    for backend in (
        Backend(
            "openvino",
            "openvino",
            "worker.openvino.encoder:OpenVINOEncoder",
            has_packed_attention=False,
            only_kind=CPU,
            attention="openvino",
            pair_bytes=16,  # measured
            memory_errors=("can't alloc",),  # of a layer
        ),
        Backend(
            "torch",
            "torch",
            "worker.model.torch_encoder:TorchEncoder",
            has_packed_attention=True,
            # On a CPU it says "DefaultCPUAllocator: can't allocate memory"; cuBLAS and cuDNN have their own status.
            memory_errors=("can't alloc", "not enough memory", "out of memory", "alloc_failed"),
            rank_loader="worker.parallel.shard_encoder:ShardEncoder",
        ),
    )
}
# The backend in which devices share a model.
SHARING: Final = next(backend for backend in BACKENDS.values() if backend.rank_loader)
