"""Choose a backend for a model and a device, and load the model with it.

Which one is faster on a CPU was measured once (docs/decisions/0053) and is not measured again at each start.
A backend is imported only when it is loaded, in the runner's process.
"""

import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from vectormill.domain.errors import ModelError
from vectormill.models.model_card import GLINER, REXUNINLU
from worker.devices.backends import BACKENDS, SHARING, Backend
from worker.devices.device import CPU, Device
from worker.encoder.choice import PACKED, choose_precision
from worker.encoder.encoder import AUTO, Choice, Encoder, EncoderOrder
from worker.encoder.reproducible import ReproducibleEncoder
from worker.encoder.switches import choose_switches, is_installed


class CannotRun(Exception):
    """The backend cannot run this model, but another one might."""


def list_backends(
    wanted: str, device: Device, is_installed: Callable[[Backend], bool], *, must_pack: bool = False
) -> list[tuple[Backend, str]]:
    """Return the backends that may run on the device, preferred first, with reasons.

    `must_pack` means that packed attention was requested. Raises ModelError if the request cannot be met,
    naming what can be.
    """

    def find_flaw(backend: Backend) -> str:
        if not backend.runs_on(device.kind):
            return f"runs only on {backend.only_kind}, not on {device.name}"
        if not is_installed(backend):
            return f"is not installed (`pip install {backend.package}`)"
        if must_pack and not backend.has_packed_attention:
            return "does not support packed attention, which was requested"
        return ""

    if wanted != AUTO:
        if flaw := find_flaw(BACKENDS[wanted]):
            others = " or ".join(["auto", *(name for name in BACKENDS if name != wanted)])
            raise ModelError(f"The backend {wanted} {flaw}; use {others}.")
        return [(BACKENDS[wanted], "requested")]
    found: list[tuple[Backend, str]] = []
    flaws: list[str] = []
    for backend in BACKENDS.values():
        if flaw := find_flaw(backend):
            flaws.append(f"{backend.name} {flaw}")
        else:
            found.append((backend, "; ".join(flaws) or f"measured to be the fastest on {device.kind}"))
    if not found:
        raise ModelError(f"No backend can run a model on {device.name}: {'; '.join(flaws)}.")
    return found


logger = logging.getLogger(__name__)

# The encoders of extractors, whose results are not vectors: they run without any backend of the table. The second is
# that of a rank; devices cannot share a model without one.
EXTRACTORS: Final[Mapping[str, tuple[str, str]]] = {
    REXUNINLU: (
        "worker.tasks.extract.model.encoder:RexEncoder",
        "worker.tasks.extract.model.shard_encoder:RexShardEncoder",
    ),
    GLINER: ("worker.tasks.extract.model.gliner:GlinerEncoder", ""),
}
# The encoder of static embeddings, which need no framework.
STATIC: Final = "worker.encoder.static_encoder:StaticEncoder"


def load_encoder(order: EncoderOrder) -> Encoder:
    """Load the requested encoder, or a rank's part of it. The encoder of a rank is returned when all ranks are ready.

    Raises ModelError if the model, backend or precision is unavailable, or the model cannot be divided in this way.
    """
    if not order.is_reproducible:
        return _load_any(order)
    obstacle = ""
    if order.card.is_extractor:
        obstacle = "extraction is not computed in tiles of one shape"
    elif order.device.kind != CPU:
        obstacle = f"{order.device.name} is not a processor, and its kernels were not compared"
    if obstacle:
        raise ModelError(
            f"The model {order.card.name!r} cannot be reproducible because {obstacle}; "
            "set VECTORMILL_WORKER_REPRODUCIBLE=false, or use other devices."
        )
    return ReproducibleEncoder(_load_any(order), order)


def _load_any(order: EncoderOrder) -> Encoder:
    if order.card.is_extractor:
        alone, of_rank = EXTRACTORS[order.card.extractor]
        return _find(alone)(order) if order.rank is None else _find(of_rank)(order, order.rank)
    if order.rank is not None:
        return _find(SHARING.rank_loader)(order, order.rank)
    if order.card.static is not None:
        return _find(STATIC)(order)
    precision = choose_precision(order.precision, order.device, order.card.model_type)
    notes: tuple[str, ...] = ()
    left, on_backend = dict(order.left), order.on_backend
    order = replace(order, on_backend=None, left=())
    usable = list_backends(
        order.backend,
        order.device,
        lambda backend: is_installed(backend.package),
        must_pack=order.attention == PACKED,
    )
    if order.way is not None:
        way = order.way
        usable = [
            (backend, way.reason or reason) for backend, reason in usable if backend.name == way.backend
        ] + [(backend, reason) for backend, reason in usable if backend.name != way.backend]
    for backend, reason in usable:
        try:
            if backend.name in left:
                raise CannotRun(left[backend.name])
            if on_backend is not None:
                on_backend(backend.name)
            if not backend.has_packed_attention:
                padded_because = f"{backend.name} does not support packed attention"
                choose_switches(order.switches, order.device, padded_because)
            choice = Choice(backend.name, notes[-1] if notes else reason)
            # Imported late, so that openvino with a cached conversion never loads torch.
            return _find(backend.loader)(order, choice, precision, notes)
        except ModelError:
            raise
        except CannotRun as error:
            flaw = str(error)
        except Exception as error:  # a framework may raise anything; another one may work
            logger.exception("%s failed to load %s.", backend.name, order.card.name)
            flaw = f"{type(error).__name__}: {error}"
        notes = (*notes, f"{backend.name} cannot run this model: {flaw}")
        logger.warning("Not using %s for %s: %s", backend.name, order.card.name, flaw)
    raise ModelError(f"Cannot load {order.card.name}: {'; '.join(notes)}.")


def _find(loader: str) -> Callable[..., Encoder]:
    """Import and return the function given as "module:function"."""
    module, _, name = loader.partition(":")
    found: Callable[..., Encoder] = getattr(importlib.import_module(module), name)
    return found
