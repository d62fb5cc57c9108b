"""Predict the memory that a model needs on a device for weights and activations, without loading weights.

Activations are those of a forward pass without gradients at its peak: a layer's output replaces that of the
layer before, so the number of layers does not matter and recomputing activations would save nothing.
"""

from dataclasses import dataclass
from typing import Final

from vectormill.models.model_shape import ModelShape, TensorSize
from vectormill.models.rounding import SMALLEST_TABLE_ROWS, find_group_size
from worker.devices.device import CUDA

VALUE_BYTES: Final = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0}
# Each group of compressed values has a scale.
GROUP_BYTES: Final = {"int8": 4}
COMPRESSED: Final = frozenset(GROUP_BYTES)

# A token's id, and the same in a message.
TOKEN_BYTES: Final = 8

# Bytes per sequence and squared length. A fused kernel stores no scores, but a padded batch has a mask [n, 1,
# L, L]: as bool, and as numbers that are added to the scores (sdpa); with openvino 16 bytes were measured.
OPENVINO_MASK_BYTES: Final = 16

# Memory that kernels keep from the first batch on: packed matrices, thread stacks, code. Measured 13 to 16 MB
# on a CPU; cuBLAS' workspace on CUDA has that size.
SCRATCH_BYTES: Final = 16_000_000

# DeBERTa's matrices of scores [heads, L, L] that are alive together: content, both position terms, and their
# sum; and mask and positions as int64, and the mask as bool. Measured on a CPU at 64 to 512 tokens
# (docs/LOG.md).
RELATIVE_SCORES: Final = 4
RELATIVE_MASK_BYTES: Final = 8 + 8 + 1
# The embeddings of relative positions, projected as queries and as keys, exist once per sequence.
RELATIVE_PROJECTIONS: Final = 2

# An extractor projects them once, when it is loaded, and computes as many heads at a time as fit into this
# many bytes, or on a GPU into this share of its memory, at least one. Matrices per head: the bias, what is added to
# it, and what both are gathered from, twice as wide (worker.tasks.extract.model.network).
BIAS_BYTES: Final = 64 << 20
BIAS_SHARE: Final = 1 / 64
BIAS_MATRICES: Final = 4
# For all heads together: the number of a relative position, as int64 on a CPU, and whether the pair is hidden.
EXTRACTOR_MASK_BYTES: Final = 8 + 1


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory needs of one model.

    `layer_bytes` are the weights of each layer in order, for dividing layers among devices; they include
    `made_bytes`, which are created per layer at load and do not shrink when a layer is split. `bias_bytes` is
    the most that attention takes beyond a batch's tokens, and `bias_bytes_per_token_squared` what it takes
    for a small batch; `spare_bytes_per_token` of these are allocated anyway, for the feed-forward block.
    """

    num_layers: int
    embedding_bytes: int
    layer_bytes: tuple[int, ...]
    other_bytes: int
    activation_bytes_per_token: int
    attention_bytes_per_token_squared: int
    bytes_per_sequence: int = 0
    made_bytes: int = 0
    bias_bytes: int = 0
    bias_bytes_per_token_squared: int = 0
    spare_bytes_per_token: int = 0

    @property
    def weight_bytes(self) -> int:
        return self.embedding_bytes + sum(self.layer_bytes) + self.other_bytes

    def predict_batch_bytes(self, num_sequences: int, length: int) -> int:
        """Return the bytes of one forward pass besides the weights, for sequences padded to `length`."""
        per_token = self.activation_bytes_per_token + self.attention_bytes_per_token_squared * length
        tokens = num_sequences * length
        bias = min(self.bias_bytes, tokens * length * self.bias_bytes_per_token_squared)
        beside = max(0, bias - tokens * self.spare_bytes_per_token)
        return SCRATCH_BYTES + beside + tokens * per_token + num_sequences * self.bytes_per_sequence

    def largest_batch_tokens(self, free_bytes: int, length: int) -> int:
        """Return the tokens, padding included, of the largest batch that fits; 0 if none does.

        The batch's sequences have `length` tokens. `free_bytes` is the memory left once the weights are
        loaded.
        """
        per_token = self.activation_bytes_per_token + self.attention_bytes_per_token_squared * length
        per_sequence = per_token * length + self.bytes_per_sequence
        return max(0, free_bytes - SCRATCH_BYTES - self.bias_bytes) // per_sequence * length


def find_bias_bytes(kind: str, memory_bytes: int) -> int:
    """Return the bytes of the bias that an extractor computes at a time on a device with so much memory."""
    return max(BIAS_BYTES, int(memory_bytes * BIAS_SHARE)) if kind == CUDA else BIAS_BYTES


def make_footprint(
    shape: ModelShape,
    precision: str,
    attention: str,
    *,
    arithmetic: str | None = None,
    bias_bytes: int = BIAS_BYTES,
) -> Footprint:
    """Return the memory needs of a model with weights in `precision` and this attention kernel.

    `attention` is named as in an EncoderReport. `arithmetic` is the precision of activations and of
    uncompressed tensors; None means that of the weights, or fp32 if these are compressed. `bias_bytes` is that of
    `find_bias_bytes`.
    """
    if not shape.num_layers:  # a table of static embeddings: a token is its id, and a text its vector
        num_bytes = int(VALUE_BYTES["fp32"]) * shape.tensors[0].num_values
        vector_bytes = int(VALUE_BYTES["fp32"]) * shape.hidden_size
        return Footprint(0, num_bytes, (), 0, TOKEN_BYTES, 0, bytes_per_sequence=vector_bytes)
    arithmetic = arithmetic or ("fp32" if precision in COMPRESSED else precision)
    value_bytes = int(VALUE_BYTES[arithmetic])
    layers: dict[int, int] = {}
    embedding_bytes = other_bytes = 0
    for tensor in shape.tensors:
        num_bytes = _tensor_bytes(tensor, precision, value_bytes)
        if tensor.layer is not None:
            layers[tensor.layer] = layers.get(tensor.layer, 0) + num_bytes
        elif tensor.is_embedding:
            embedding_bytes += num_bytes
        else:
            other_bytes += num_bytes
    positions = RELATIVE_PROJECTIONS * shape.num_relative_positions * shape.hidden_size * value_bytes
    made_bytes = positions if shape.is_extractor else 0
    return Footprint(
        num_layers=shape.num_layers,
        embedding_bytes=embedding_bytes,
        layer_bytes=tuple(layers[number] + made_bytes for number in sorted(layers)),
        other_bytes=other_bytes + shape.dense_values * int(VALUE_BYTES["fp32"]),
        activation_bytes_per_token=value_bytes * count_activations(shape),
        attention_bytes_per_token_squared=_attention_bytes(shape, attention, value_bytes),
        bytes_per_sequence=0 if shape.is_extractor else positions,
        made_bytes=made_bytes,
        **(_count_bias(shape, value_bytes, bias_bytes) if shape.is_extractor else {}),
    )


def count_activations(shape: ModelShape) -> int:
    """Return the number of values per token that are alive at the peak of a layer.

    Two hidden states always are: the layer's input, which its caller holds, and the residual. The
    feed-forward block adds the intermediate values before and after the activation function (with a gate:
    both halves and their product); attention adds queries, keys, values and its output.
    """
    if shape.is_gated:
        wide = (4 if shape.has_joined_gate else 3) * shape.intermediate_size
    else:
        wide = 2 * shape.intermediate_size
    attention = (2 * shape.num_heads + 2 * shape.num_key_value_heads) * shape.head_size
    if shape.is_extractor:  # it also keeps the embeddings, for its convolution
        return 3 * shape.hidden_size + max(wide, attention)
    if shape.num_relative_positions:
        # The scores of all relative positions, from which each pair of tokens then picks one. transformers
        # also keeps the output of every layer.
        relative = shape.num_heads * shape.num_relative_positions + 2 * shape.hidden_size
        return shape.num_layers * shape.hidden_size + max(wide, relative)
    return 2 * shape.hidden_size + max(wide, attention)


def _count_bias(shape: ModelShape, value_bytes: int, bias_bytes: int) -> dict[str, int]:
    """Return the bytes of an extractor's attention bias. No intermediate values are alive at that moment."""
    spare = count_activations(shape) - 3 * shape.hidden_size - 3 * shape.num_heads * shape.head_size
    return {
        "bias_bytes": bias_bytes,
        "bias_bytes_per_token_squared": BIAS_MATRICES * shape.num_heads * value_bytes,
        "spare_bytes_per_token": spare * value_bytes,
    }


def _tensor_bytes(tensor: TensorSize, precision: str, value_bytes: int) -> int:
    if precision in COMPRESSED and tensor.is_matrix:
        num_groups = tensor.num_values // find_group_size(tensor.shape[1])
        return int(tensor.num_values * VALUE_BYTES[precision]) + num_groups * GROUP_BYTES[precision]
    if precision in COMPRESSED and tensor.is_embedding and tensor.shape[0] >= SMALLEST_TABLE_ROWS:
        return tensor.num_values + tensor.shape[0] * GROUP_BYTES["int8"]  # a vocabulary is int8 in every case
    return tensor.num_values * value_bytes


def _attention_bytes(shape: ModelShape, attention: str, value_bytes: int) -> int:
    if shape.is_extractor:
        return EXTRACTOR_MASK_BYTES
    if shape.num_relative_positions:  # no fused kernel supports such scores
        return RELATIVE_SCORES * shape.num_heads * value_bytes + RELATIVE_MASK_BYTES
    if attention.startswith("packed"):
        return 0
    if attention.startswith("openvino"):
        return OPENVINO_MASK_BYTES
    mask_bytes = 1 + value_bytes
    if "eager" in attention:
        return mask_bytes + 2 * shape.num_heads * value_bytes  # the scores before and after the softmax
    return mask_bytes
