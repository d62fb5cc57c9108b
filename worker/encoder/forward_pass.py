"""ForwardPass: one batch on its way through an encoder. Knows no framework and no device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from vectormill.ragged import Ragged


class DeviceLost(Exception):
    """The device can compute nothing more in this process, which has to end; the batch may be to blame or not."""


class ForwardPass(Protocol):
    """One batch on its way: prepared, then started, then computed. Each step raises whatever the framework raises."""

    def start(self) -> None:
        """Queue the batch on a device that computes by itself, without waiting. Elsewhere do nothing."""
        ...

    def results(self) -> Ragged:
        """Return the results as Encoder.encode does. Waits for the device, or computes them here."""
        ...


@dataclass(frozen=True, slots=True)
class Deferred:
    """A forward pass of a processor: whoever asks for the results computes them."""

    compute: Callable[[], Ragged]

    def start(self) -> None:
        pass

    def results(self) -> Ragged:
        return self.compute()
