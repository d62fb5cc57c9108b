"""Backends: what can run a model, a row each, and which of them a device gets. Loads none of them.

Which one is faster on a processor was measured once (docs/decisions/0053) and is not measured again at each start.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from vectormill.domain.errors import ModelError
from worker.devices.device import CPU, Device

AUTO: Final = "auto"


@dataclass(frozen=True, slots=True)
class Backend:
    """`package` is what it imports. `loader`, written "module:function", makes an Encoder of an order and the choices.

    `only_kind` is the kind of device that it runs on, None where it runs on all of them.
    """

    name: str
    package: str
    loader: str
    has_packed_attention: bool
    only_kind: str | None = None

    def runs_on(self, device: Device) -> bool:
        return self.only_kind in (None, device.kind)


# In order of preference: the first that is installed and runs on the device. openvino needs two thirds of torch's time
# on a processor, and less than half of its memory.
BACKENDS: Final[Mapping[str, Backend]] = {
    backend.name: backend
    for backend in (
        Backend("openvino", "openvino", "worker.openvino.encoder:OpenVINOEncoder", False, only_kind=CPU),
        Backend("torch", "torch", "worker.model.torch_encoder:TorchEncoder", True),
    )
}


class CannotRun(Exception):
    """A backend cannot run this very model; another one may."""


def list_backends(
    wanted: str, device: Device, is_installed: Callable[[Backend], bool], *, must_pack: bool = False
) -> list[tuple[Backend, str]]:
    """Return the backends that may run on the device, preferred first, with reasons. `must_pack` means that packed
    attention was asked for.

    Raises ModelError for a wish that cannot be met, with what can be.
    """
    if wanted != AUTO:
        if flaw := _find_flaw(BACKENDS[wanted], device, is_installed, must_pack=must_pack):
            others = " or ".join(["auto", *(name for name in BACKENDS if name != wanted)])
            raise ModelError(f"The backend {wanted} {flaw}; use {others}.")
        return [(BACKENDS[wanted], "asked for")]
    found: list[tuple[Backend, str]] = []
    flaws: list[str] = []
    for backend in BACKENDS.values():
        flaw = _find_flaw(backend, device, is_installed, must_pack=must_pack)
        if flaw is not None:
            flaws.append(f"{backend.name} {flaw}")
        else:
            found.append(
                (backend, "; ".join(flaws) or f"the fastest on a {device.kind} where it was measured")
            )
    if not found:
        raise ModelError(f"No backend can run a model on {device.name}: {'; '.join(flaws)}.")
    return found


def _find_flaw(
    backend: Backend, device: Device, is_installed: Callable[[Backend], bool], *, must_pack: bool
) -> str | None:
    if not backend.runs_on(device):
        return f"runs on a {backend.only_kind} only, and not on {device.name}"
    if not is_installed(backend):
        return f"is not installed (`pip install {backend.package}`)"
    if must_pack and not backend.has_packed_attention:
        return "has no packed attention, which was asked for"
    return None
