"""The precision that an extraction computes in. Imports no framework."""

from typing import Final

from vectormill.domain.errors import ModelError
from worker.devices.device import Device
from worker.encoder.backends import AUTO
from worker.encoder.choice import BF16, FP32, choose_precision
from worker.encoder.encoder import Choice

PRECISIONS: Final = (FP32, BF16)


def choose_extraction_precision(wanted: str, device: Device) -> Choice:
    """Choose fp32 unless bf16 is asked for. Raises ModelError for others."""
    if wanted == AUTO:
        return Choice(FP32, "the sign of a number decides whether a span is found")
    chosen = choose_precision(wanted, device)
    if chosen.value not in PRECISIONS:
        raise ModelError(f"Extraction computes in {' or '.join(PRECISIONS)}, not in {chosen.value}.")
    return chosen
