"""RunnerStarter: starts the processes of one replica, as often as its executor asks. Knows no batches.

A replica on one device is one runner; one that several devices share is a group of them, each pinned to its own.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from vectormill.settings import drop_secrets
from worker.devices.device import CUDA, Device, device_environment
from worker.encoder.encoder import EncoderOrder
from worker.placement.placement import Replica, make_ranks
from worker.runner.messages import Load
from worker.runner.runner import Runner
from worker.runner.runner_group import RunnerGroup

SHARD_FACTORY: Final = "worker.parallel.shard_encoder:load_shard"
# The model process asks no hub for anything: files were fetched before.
OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
# Nor does it draw bars of its own or give advice, where the worker's bar and log are; processes that it starts neither.
SILENT: Final = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
# Batches of many shapes leave holes in fixed segments: a GPU would be out of memory with gigabytes free.
ALLOCATOR: Final = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
ALLOCATOR_NAMES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
COMPILED_DIR: Final = "TORCHINDUCTOR_CACHE_DIR"
# Ranks talk over the loopback: gloo would else resolve the host's name, which in containers often leads nowhere.
LOOPBACK: Final = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


@dataclass(frozen=True, slots=True)
class Sharing:
    """A replica that several devices share, with these devices in the replica's order."""

    replica: Replica
    devices: tuple[Device, ...]


class RunnerStarter:
    """Starts the processes of a replica. `order` is for the first device, the others' differ in device and rank."""

    def __init__(
        self,
        factory: str,
        order: EncoderOrder,
        environment: Mapping[str, str],
        *,
        sharing: Sharing | None = None,
        shard_factory: str = SHARD_FACTORY,
        collective_timeout_seconds: float,
    ) -> None:
        self.order = order
        self._factory = factory
        # The output of torch.compile is kept with other files made of models, unless a user has said where.
        compiled = {COMPILED_DIR: str(order.cache_dir / "compiled")}
        self._environment = {**compiled, **drop_secrets(environment), **OFFLINE, **SILENT}
        self._sharing = sharing
        self._shard_factory = shard_factory
        self._timeout_seconds = collective_timeout_seconds

    def leave(self, backend: str, reason: str) -> None:
        """Have processes that are started from now on pass this backend over."""
        self.order = replace(self.order, left=(*self.order.left, (backend, reason)))

    def start(self) -> Runner | RunnerGroup:
        if self._sharing is None:
            return Runner(Load(self._factory, self.order), self._pin(self.order.device))
        # A new place each time: ranks of an earlier start would be met in the old one.
        meeting_place = TemporaryDirectory(prefix="vectormill-ranks-")
        ranks = make_ranks(self._sharing.replica, Path(meeting_place.name) / "store", self._timeout_seconds)
        orders = [
            replace(self.order, device=device, rank=rank, num_threads=device.num_threads)
            for device, rank in zip(self._sharing.devices, ranks, strict=True)
        ]
        return RunnerGroup(
            [Load(self._shard_factory, order) for order in orders],
            [{**self._pin(order.device), **LOOPBACK} for order in orders],
            meeting_place,
        )

    def _pin(self, device: Device) -> dict[str, str]:
        """Return an environment in which the process sees its own device only."""
        num_threads = self.order.num_threads if self._sharing is None else device.num_threads
        return {**self._environment, **self._allocate(device), **device_environment(device, num_threads)}

    def _allocate(self, device: Device) -> Mapping[str, str]:
        """Return settings of the allocator, unless the user has set it up."""
        is_free = device.kind == CUDA and not any(name in self._environment for name in ALLOCATOR_NAMES)
        return ALLOCATOR if is_free else {}
