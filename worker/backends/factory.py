"""Loads the encoder that an order asks for, and falls back with a reason where it may. Runs in the runner's process."""

import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from vectormill.domain.errors import ModelError
from worker.encoder.backends import Backend, CannotRun, list_backends
from worker.encoder.choice import choose_precision
from worker.encoder.encoder import Choice, Encoder, EncoderOrder
from worker.encoder.switches import SwitchFacts, choose_switches, is_package_installed
from worker.model.architectures import PACKED

logger = logging.getLogger(__name__)

# What a model runs with whose answers are no vectors and that no backend of the table knows.
EXTRACTOR: Final = "worker.tasks.extract.model.encoder:RexEncoder"


def load_encoder(order: EncoderOrder) -> Encoder:
    """Load the encoder that is asked for. Raises ModelError when the model, backend or precision cannot be had."""
    if order.card.is_extractor:
        return _find(EXTRACTOR)(order)
    precision = choose_precision(order.precision, order.device)
    notes: tuple[str, ...] = ()
    left, tell = dict(order.left), order.on_backend
    order = replace(order, on_backend=None, left=())
    for backend, reason in list_backends(
        order.backend, order.device, _is_installed, must_pack=order.attention == PACKED
    ):
        try:
            if backend.name in left:
                raise CannotRun(left[backend.name])
            if tell is not None:
                tell(backend.name)
            return _load(
                backend, order, Choice(backend.name, notes[-1] if notes else reason), precision, notes
            )
        except ModelError:
            raise
        except CannotRun as error:
            flaw = str(error)
        except Exception as error:  # whatever a framework raises, another one may run the model
            logger.exception("%s cannot load %s.", backend.name, order.card.name)
            flaw = f"{type(error).__name__}: {error}"
        notes = (*notes, f"{backend.name} cannot run this model: {flaw}")
        logger.warning("%s is left for %s: %s", backend.name, order.card.name, flaw)
    raise ModelError(f"{order.card.name} cannot be loaded, because {'; '.join(notes)}.")


def _is_installed(backend: Backend) -> bool:
    return importlib.util.find_spec(backend.package) is not None


def _load(
    backend: Backend, order: EncoderOrder, choice: Choice, precision: Choice, notes: tuple[str, ...]
) -> Encoder:
    """Import and load one backend. Imported late, so that openvino run from its cache never loads torch."""
    if not backend.has_packed_attention:
        padded_because = f"{backend.name} has no packed attention"
        choose_switches(order.switches, SwitchFacts(order.device, 0, padded_because), is_package_installed)
    return _find(backend.loader)(order, choice, precision, notes)


def _find(loader: str) -> Callable[..., Encoder]:
    """Return the function that is written as "module:function"."""
    module, _, name = loader.partition(":")
    found: Callable[..., Encoder] = getattr(importlib.import_module(module), name)
    return found
