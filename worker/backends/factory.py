"""Loads the encoder that an order asks for, and falls back with a reason where it may. Runs in the runner's process."""

import importlib.util
import logging
from dataclasses import replace

from vectormill.domain.errors import ModelError
from worker.encoder.choice import AUTO, OPENVINO, TORCH, choose_backend, choose_precision
from worker.encoder.encoder import Choice, Encoder, EncoderOrder
from worker.model.architectures import PACKED

logger = logging.getLogger(__name__)


def load_encoder(order: EncoderOrder) -> Encoder:
    """Raises ModelError when the model, backend or precision cannot be had."""
    precision = choose_precision(order.precision, order.device)
    on_read, order = (
        order.on_read,
        replace(order, on_read=None),
    )  # for a contest and a conversion go to other processes
    has_openvino = importlib.util.find_spec("openvino") is not None
    backend = choose_backend(order.backend, precision.value, order.device, has_openvino)
    notes: tuple[str, ...] = ()
    if order.attention == PACKED and (backend is None or backend.value == OPENVINO):
        if order.backend == OPENVINO:
            raise ModelError("The backend openvino has no packed attention; use padded or auto, or torch.")
        backend = Choice(TORCH, "packed attention was asked for, and openvino has none")
    if backend is None:
        from worker.backends.contest.choice import choose_by_contest

        backend, notes = choose_by_contest(replace(order, precision=precision.value))
    if backend.value == OPENVINO:
        from worker.openvino.conversion import ConversionFailed
        from worker.openvino.encoder import OpenVINOEncoder

        try:
            return OpenVINOEncoder(order, backend, precision)
        except ConversionFailed as error:
            if order.backend != AUTO:
                raise
            reason = f"openvino cannot run this model: {error}"
            logger.warning("Falling back to torch for %s: %s", order.card.name, reason)
            backend, notes = Choice(TORCH, reason), (reason,)
    # Imported here, so that a process that runs openvino from its cache never loads torch.
    from worker.model.torch_encoder import TorchEncoder

    return TorchEncoder(replace(order, on_read=on_read), backend, precision, notes)
