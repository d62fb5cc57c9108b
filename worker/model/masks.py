"""Attention masks made from the host's knowledge of padding, so that no forward pass reads from the device.

transformers reads a padding mask to omit it if it hides nothing, and on a GPU such a read waits for all
queued work. The host padded the batch and knows the answer: here a mask is omitted if nothing is hidden, and
a mask that is passed in is not read.
"""

import inspect
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vectormill.models.families import find_family
from worker.encoder.choice import looks_back_alone
from worker.encoder.padding import PaddedBatch
from worker.model.runtime import transformers

masking = transformers.masking_utils

_PADDED_BEHIND: Final = "_vectormill_is_padded_behind"
_SKIP_NOTHING: Final = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}


def find_attention_mask(padded: PaddedBatch, config: Any) -> NDArray[np.int64] | None:
    """Return the mask [n, length]; None for a batch without padding, if the architecture accepts that."""
    if find_family(config.model_type).needs_mask or not padded.attention_mask.all():
        return padded.attention_mask
    return None


def tell_masks(transformer: nn.Module) -> None:
    """Mark in the transformer's configuration that padding follows the texts, so no mask has to be read."""
    transformers.AttentionMaskInterface.register("sdpa", make_sdpa_mask)
    transformers.AttentionMaskInterface.register("eager", make_eager_mask)
    config: Any = transformer.config
    setattr(config, _PADDED_BEHIND, True)
    if config.model_type == "deberta-v2":
        code: Any = inspect.getmodule(type(transformer))
        code.make_log_bucket_position = make_log_bucket_position


def make_log_bucket_position(relative_pos: Tensor, bucket_size: int, max_position: int) -> Tensor:
    """Return transformers' make_log_bucket_position, which makes a number on the host and copies it.

    A GPU's queued work would have to end before that copy.
    """
    middle = bucket_size // 2
    is_near = (relative_pos < middle) & (relative_pos > -middle)
    distance = torch.where(is_near, middle - 1, torch.abs(relative_pos))
    # torch divides by the logarithm in fp32, as it does where the divisor is a tensor.
    last = torch.log(torch.tensor((max_position - 1) / middle))
    bucket = torch.ceil(torch.log(distance / middle) / last * (middle - 1)) + middle
    return torch.where(distance <= middle, relative_pos.type_as(bucket), bucket * torch.sign(relative_pos))


def make_sdpa_mask(
    *, attention_mask: Tensor | None = None, config: Any = None, **options: Any
) -> Tensor | None:
    """Return transformers' sdpa_mask, [n or 1, 1, length or 1, length], without reading the given mask.

    It is as small as possible, because torch converts every value of a bool mask to a number.
    """
    options = _looking_both_ways(config, options)
    if _is_recorded(attention_mask):
        recorded: Tensor | None = masking.sdpa_mask(attention_mask=attention_mask, config=config, **options)
        if recorded is None or options.get("local_size") is None:
            return recorded
        # Each token attends to itself: a padding token further behind its text than the window would see nothing.
        # openvino makes NaN of that, and a product of NaN and 0 in the next layer makes NaN of the whole text.
        positions = torch.arange(recorded.shape[-1], device=recorded.device)
        return recorded | (positions == positions.unsqueeze(1))
    # No token attends to the padding after it if the model is causal and pads on the right.
    if getattr(config, _PADDED_BEHIND, False) and looks_back_alone(config):
        attention_mask = None
    if attention_mask is not None and options.get("mask_function") is masking.bidirectional_mask_function:
        return attention_mask.bool()[:, None, None, :]
    told = {} if attention_mask is None else _SKIP_NOTHING
    mask: Tensor | None = masking.sdpa_mask(
        attention_mask=attention_mask, config=config, **{**options, **told}
    )
    if mask is None:
        return None
    return mask[:1] if attention_mask is None else mask


def make_eager_mask(
    *, attention_mask: Tensor | None = None, config: Any = None, **options: Any
) -> Tensor | None:
    """Return transformers' eager_mask, without reading the given mask."""
    options = _looking_both_ways(config, options) | {"config": config}
    told = {} if attention_mask is None or _is_recorded(attention_mask) else _SKIP_NOTHING
    mask: Tensor | None = masking.eager_mask(attention_mask=attention_mask, **{**options, **told})
    return mask


def _looking_both_ways(config: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with a mask function that takes no number from the host, which a GPU would wait for.

    EmbeddingGemma's own is a causal one, or `torch.tensor(True)` (`Gemma3TextModel.forward`).
    """
    if not (
        find_family(getattr(config, "model_type", "")).counts_itself and config.use_bidirectional_attention
    ):
        return options
    window = options.get("local_size")

    def is_near(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return abs(query - key) < window

    sees = masking.bidirectional_mask_function if window is None else is_near
    return {**options, "mask_function": sees, "use_vmap": False}


def _is_recorded(mask: Tensor | None) -> bool:
    """Return True if the pass is traced for export; the graph must then serve batches with padding too."""
    asked = transformers.utils.import_utils
    return (
        asked.is_torchdynamo_exporting()
        or torch.jit.is_tracing()
        or (mask is not None and asked.is_tracing(mask))
    )
