"""RunnerStarter starts the processes of one replica whenever its executor asks.

It knows nothing about batches. A replica on one device is one runner. A replica that several devices share is
a group of runners, each pinned to its own device.
"""

import sys
from collections.abc import Mapping
from copy import copy
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

# The model process must not use the network: its files were downloaded before.
OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
# The model process shows neither progress bars nor advice, and neither do processes that it starts: the
# worker shows progress and logs.
SILENT: Final = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
# Python would import from the current folder, which is the user's.
ISOLATED: Final = {"PYTHONSAFEPATH": "1"}
# Batches of many shapes leave holes in fixed segments, so a GPU would run out of memory with gigabytes free.
ALLOCATOR: Final = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
ALLOCATOR_NAMES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
COMPILED_DIR: Final = "TORCHINDUCTOR_CACHE_DIR"
# Ranks communicate over the loopback: otherwise gloo resolves the host's name, which often fails in
# containers.
LOOPBACK: Final = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


@dataclass(frozen=True, slots=True)
class Sharing:
    """The plan of a replica that several devices share, and these devices in the replica's order."""

    replica: Replica
    devices: tuple[Device, ...]


class RunnerStarter:
    """Starts the processes of a replica.

    `order` is for the first device; the orders of other devices differ only in device and rank.
    """

    def __init__(
        self,
        factory: str,
        order: EncoderOrder,
        environment: Mapping[str, str],
        *,
        sharing: Sharing | None = None,
        shard_factory: str = "",
        collective_timeout_seconds: float,
    ) -> None:
        self.order = order
        self._factory = factory
        # The output of torch.compile is kept with other files made from models, unless the user has set a
        # directory.
        compiled = {COMPILED_DIR: str(order.cache_dir / "compiled")}
        self._environment = {**compiled, **drop_secrets(environment), **OFFLINE, **SILENT, **ISOLATED}
        self._sharing = sharing
        self._shard_factory = shard_factory or factory
        self._timeout_seconds = collective_timeout_seconds

    def with_order(self, order: EncoderOrder) -> "RunnerStarter":
        """Return a starter of processes that differ only in their order."""
        other = copy(self)
        other.order = order
        return other

    def leave(self, backend: str, reason: str) -> None:
        """Make processes that are started from now on skip this backend, for this reason."""
        self.order = replace(self.order, left=(*self.order.left, (backend, reason)))

    def start(self) -> Runner | RunnerGroup:
        if self._sharing is None:
            return Runner(Load(self._factory, self.order), self._pin(self.order.device))
        # Use a new directory each time: in the old one, ranks of an earlier start would be found.
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
        is_configured = any(name in self._environment for name in ALLOCATOR_NAMES)
        allocator = ALLOCATOR if device.kind == CUDA and not is_configured else {}
        return {**self._environment, **allocator, **device_environment(device, num_threads)}
