"""Choose a model's precision and attention on a device, with a reason. Imports no framework."""

from dataclasses import dataclass
from typing import Any, Final

from vectormill.domain.errors import ModelError
from vectormill.models.families import find_family
from worker.devices.device import CPU, CUDA, Device
from worker.encoder.encoder import AUTO, Choice
from worker.placement.footprint import COMPRESSED

FP32: Final = "fp32"
FP16: Final = "fp16"
BF16: Final = "bf16"
INT8: Final = "int8"
PRECISIONS: Final = (FP32, BF16, FP16, INT8)


def choose_precision(wanted: str, device: Device, model_type: str = "") -> Choice:
    """Choose fp32, bf16, fp16 or int8 for a model of this type.

    Raises ModelError for one that is known to be slow, or to overflow, naming a better choice.
    """
    overflows = find_family(model_type).overflows_fp16
    if overflows and (wanted == FP16 or (wanted in COMPRESSED and find_arithmetic(wanted, device) == FP16)):
        better = BF16 if device.has_bf16 else FP32
        raise ModelError(
            f"The hidden states of a {model_type} are too large for fp16, in which {wanted} computes; use {better}."
        )
    if wanted == AUTO:
        if device.kind == CUDA and device.has_bf16:
            return Choice(BF16, "the device computes bf16 natively")
        if device.kind == CUDA and overflows:
            return Choice(
                FP32, f"the device has no bf16, and the hidden states of a {model_type} overflow fp16"
            )
        if device.kind == CUDA:
            return Choice(FP16, "the device computes fp16 natively, but not bf16")
        if device.kind == CPU and device.has_bf16:
            return Choice(BF16, "the processor has bf16 matrix instructions")
        return Choice(FP32, "the device has no bf16 matrix instructions")
    if wanted == BF16 and device.kind == CPU and not device.has_bf16:
        raise ModelError(
            "This processor has neither AVX512-BF16 nor AMX and would emulate bf16, many times slower. Use fp32."
        )
    if wanted == BF16 and device.kind == CUDA and not device.has_bf16:
        better = FP32 if overflows else FP16
        raise ModelError(f"{device.description or device.name} would emulate bf16; use {better}.")
    if wanted == FP16 and device.kind == CPU:
        better = BF16 if device.has_bf16 else FP32
        raise ModelError(f"fp16 is not supported on CPUs, most of which would emulate it; use {better}.")
    if wanted in COMPRESSED:
        return Choice(wanted, f"requested; the arithmetic is {find_arithmetic(wanted, device)}")
    return Choice(wanted, "requested")


def find_arithmetic(precision: str, device: Device) -> str:
    """Return the number type of the products for a precision; compressed weights are restored to it."""
    if precision not in COMPRESSED:
        return precision
    if device.has_bf16:
        return BF16
    return FP16 if device.kind == CUDA else FP32


EXTRACTION_PRECISIONS: Final = (FP32, BF16)


def choose_extraction_precision(wanted: str, device: Device) -> Choice:
    """Choose the precision of an extractor's encoder, whose head is always fp32. Raises ModelError for others."""
    if wanted == AUTO:
        if device.kind == CUDA and device.has_bf16:
            return Choice(
                BF16, "the device computes bf16 natively, and the head, whose signs decide, is fp32"
            )
        return Choice(FP32, "the sign of a number decides whether a span is found")
    chosen = choose_precision(wanted, device)
    if chosen.value not in EXTRACTION_PRECISIONS:
        raise ModelError(
            f"Extraction supports only {' and '.join(EXTRACTION_PRECISIONS)}, not {chosen.value}."
        )
    return chosen


NUMPY: Final = "numpy"  # which adds up static embeddings, and is no backend for other models


def choose_static_precision(wanted: str) -> Choice:
    """Choose fp32. Raises ModelError if another precision is requested."""
    if wanted not in (AUTO, FP32):
        raise ModelError(f"Static embeddings are added up only in {FP32}, not {wanted}; use auto.")
    return Choice(FP32, "the rows are added up in fp32, in whatever type they are stored")


PACKED: Final = "packed"
PADDED: Final = "padded"
LARGEST_HEAD_DIM: Final = 256
HEAD_DIM_STEP: Final = 8
SMALLEST_CAPABILITY: Final = 80  # Ampere, which FlashAttention needs


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes in a transformer's configuration that matter to attention kernels.

    `has_unattended` means that some tokens are computed to which no token attends, and `is_causal` that no token
    attends to later ones.
    """

    model_type: str
    head_dim: int
    padding_id: int
    hidden_size: int = 0
    has_unattended: bool = False
    is_causal: bool = False

    @property
    def positions(self) -> str:
        return find_family(self.model_type).positions


def read_attention_shape(config: Any) -> AttentionShape:
    """Read the sizes from a transformers configuration, whose attribute names all architectures share."""
    num_heads = getattr(config, "num_attention_heads", None) or 1
    head_dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // num_heads
    padding_id = getattr(config, "pad_token_id", None)
    hidden_size = int(getattr(config, "hidden_size", 0))
    return AttentionShape(
        config.model_type,
        head_dim,
        0 if padding_id is None else padding_id,
        hidden_size,
        is_causal=looks_back_alone(config),
    )


def looks_back_alone(config: Any) -> bool:
    """Return True if no token attends to later ones with this transformers configuration."""
    looks_both_ways = getattr(config, "use_bidirectional_attention", False)
    is_told = getattr(config, "is_causal", True) and not looks_both_ways
    return bool(is_told and find_family(config.model_type).is_causal)


def choose_attention(wanted: str, shape: AttentionShape, device: Device, precision: str) -> Choice:
    """Choose packed or padded attention.

    Raises ModelError if packed is requested and is not exact or cannot run.
    """
    if wanted == PADDED:
        return Choice(PADDED, "requested")
    obstacle = find_packing_obstacle(shape, device, precision)
    if wanted == PACKED:
        if obstacle:
            raise ModelError(f"Packed attention cannot be used because {obstacle}; use padded or auto.")
        return Choice(PACKED, "requested")
    assert wanted == AUTO
    if device.kind == CPU:
        return Choice(
            PADDED, "CPUs have no packed kernel, and batches of similar lengths need little padding"
        )
    if obstacle:
        return Choice(PADDED, obstacle)
    return Choice(PACKED, "no padding is computed")


def find_packing_obstacle(shape: AttentionShape, device: Device, precision: str) -> str:
    """Return why a model cannot be packed on the device, to complete a "because"; empty if it can."""
    family = find_family(shape.model_type)
    if shape.has_unattended:
        return "its queries have tokens that no token attends to, which the packed kernel cannot do"
    if family.packing_obstacle:
        return family.packing_obstacle
    if not family.positions:
        return f"packing was not verified for the architecture {shape.model_type!r}"
    if device.kind == CPU:
        return ""  # computed sequence by sequence, in any precision and head size
    if device.kind != CUDA:
        return f"{device.kind} has no packed kernel"
    if precision == FP32:
        return "the packed kernel supports only 16-bit precisions, and the precision is fp32"
    if shape.head_dim % HEAD_DIM_STEP or shape.head_dim > LARGEST_HEAD_DIM:
        return f"the packed kernel supports heads of 8, 16, … 256 dimensions, and the model's have {shape.head_dim}"
    capability = device.compute_capability
    if capability is not None and capability < SMALLEST_CAPABILITY:
        has = f"{device.description} has {capability / 10}"
        return f"the packed kernel needs compute capability 8.0 or higher, and {has}"
    return ""
