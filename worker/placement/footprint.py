"""Predict the memory that a share of a model needs on a device, without loading weights. Imports no torch.

One function, `make_footprint`, tells what a plan counts, how large a batch may be, how long a text, and what
`vectormill plan` prints. Activations are those of a forward pass without gradients: a layer's output replaces
that of the layer before, so only the widest moment of a layer matters, and recomputing activations would save
nothing. tests/contract/test_footprint_agrees.py compares the prediction with what torch's allocator counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from vectormill.models.families import find_family
from vectormill.models.model_card import ModelCard
from vectormill.models.model_shape import ModelShape, TensorSize
from vectormill.models.rounding import SMALLEST_TABLE_ROWS, find_group_size
from worker.devices.device import CUDA
from worker.placement.strategies import FULLY_SHARDED, NUM_SLOTS, OFFLOAD, PIPELINE, REPLICATE, TENSOR

VALUE_BYTES: Final = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0}
FLOAT_BYTES: Final = 4
# Each group of compressed values has a scale.
GROUP_BYTES: Final = {"int8": 4}
COMPRESSED: Final = frozenset(GROUP_BYTES)

# A batch holds of each token, besides its hidden states, the id, the position and a value of a mask, as int64.
TOKEN_BYTES: Final = 8 + 8 + 8
# With openvino, 16 bytes were measured for each pair of tokens of a sequence.
OPENVINO_MASK_BYTES: Final = 16

# Memory that kernels keep from the first batch on: packed matrices, thread stacks, code. Measured 13 to 16 MB
# on a CPU; cuBLAS' workspace on CUDA has that size.
SCRATCH_BYTES: Final = 16_000_000
# The buffers of a communicator of NCCL. A guess, not yet measured on GPUs: its default is a buffer of 4 MiB
# (NCCL_BUFFSIZE) for each protocol, peer and channel. Gloo takes main memory, which counts as the process's own.
COMMUNICATOR_BYTES: Final = 256 << 20

# The results that an activation function has alive at its end, if it is several operations; measured.
ACTIVATION_RESULTS: Final = {
    **dict.fromkeys(("gelu_10", "quick_gelu", "relu2", "sqrtsoftplus"), 2),
    **dict.fromkeys(("gelu_new", "gelu_python", "gelu_python_tanh", "gelu_accurate", "laplace"), 3),
    "gelu_fast": 4,
}
# The states in fp32 while a norm in a model of 16 bits computes: the states, their square, and the result.
NORM_STATES: Final = 3

# DeBERTa's matrices of scores [heads, L, L] that are alive together: content, both position terms; and the place of
# each relative position as int64; and masks. Measured on a CPU.
RELATIVE_SCORES: Final = 3
RELATIVE_PLACE_BYTES: Final = 8
RELATIVE_MASK_BYTES: Final = 8
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

HALF_BYTES: Final = 2  # of a vector of a token
# The logits of words that a sparse head computes at a time (worker.model.heads), and weighs in fp32.
WORD_LOGITS: Final = 1 << 24

# The layers that full sharding has whole at a time: the one that is computed, the gathered parts that it was copied
# from, and those of the next one. Of the embeddings it has the copy and the parts, before any layer. Source:
# FSDPParamGroup.wait_for_unshard of torch.
GATHERED_LAYERS: Final = 3
GATHERED_EMBEDDINGS: Final = 2


@dataclass(frozen=True, slots=True)
class Portion:
    """The part of a model on one device: `num_layers` of `num_ranks` that share it by `strategy`.

    With layers in main memory, `num_layers` counts those that the device has at a time.

    Only the first stage of a pipeline has the embeddings, and only the last what follows the layers.
    """

    strategy: str = REPLICATE
    num_ranks: int = 1
    num_layers: int | None = None  # None for all layers
    is_first: bool = True
    is_last: bool = True


WHOLE: Final = Portion()


def list_shares(
    strategy: str, stage_layers: Sequence[int], num_ranks: int, num_offloaded: int = 0
) -> list[Portion]:
    """Return the share of each device of a replica, whose stages have so many layers.

    `num_offloaded` of them are in main memory, and pass through slots of the device.
    """
    if strategy == OFFLOAD:
        return [Portion(strategy, num_layers=stage_layers[0] - num_offloaded + NUM_SLOTS)]
    if strategy != PIPELINE:
        return [Portion(strategy, num_ranks)] * num_ranks
    last = num_ranks - 1
    return [
        Portion(strategy, num_ranks, count, is_first=number == 0, is_last=number == last)
        for number, count in enumerate(stage_layers)
    ]


@dataclass(frozen=True, slots=True)
class Moment:
    """The bytes that are alive at one moment of a layer.

    They grow with the tokens of a batch, with the pairs of tokens of each of its sequences, with the pairs of the
    longest sequence, and with the number of sequences; `fixed` is what any batch takes.
    """

    per_token: int
    per_pair: int = 0
    per_longest_pair: int = 0
    per_sequence: int = 0
    fixed: int = 0


NOTHING: Final = Moment(0)


def count_results(card: ModelCard) -> Moment:
    """Return what results take beyond a dense vector. They are copied once, into one array of bytes."""
    words = card.sparse_dimensions if card.sparse_head is not None and not card.sparse_head.file else 0
    return Moment(
        2 * HALF_BYTES * card.token_dimensions,
        per_sequence=2 * FLOAT_BYTES * words,
        fixed=WORD_LOGITS * 2 * FLOAT_BYTES if words else 0,
    )


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory needs of a share of a model: its weights, and the activations of a batch.

    `weight_bytes` are held from loading on, `fixed_bytes` during every pass, whatever its batch: among them are
    weights that are gathered from other devices or restored. `bias_bytes` is the most that an extractor's attention
    takes beyond a batch's tokens, and `bias_bytes_per_pair` what it takes for a small batch;
    `spare_bytes_per_token` of these are allocated anyway, for the feed-forward block.
    """

    weight_bytes: int
    moments: tuple[Moment, ...]
    bytes_per_sequence: int = 0
    fixed_bytes: int = SCRATCH_BYTES
    bias_bytes: int = 0
    bias_bytes_per_pair: int = 0
    spare_bytes_per_token: int = 0

    def predict_batch_bytes(self, num_sequences: int, length: int) -> int:
        """Return the bytes of one forward pass besides the weights, for sequences padded to `length`."""
        tokens, pairs = num_sequences * length, num_sequences * length * length
        bias = min(self.bias_bytes, pairs * self.bias_bytes_per_pair)
        widest = max(
            tokens * each.per_token
            + pairs * each.per_pair
            + length * length * each.per_longest_pair
            + num_sequences * each.per_sequence
            + each.fixed
            for each in self.moments
        )
        beside = max(0, bias - tokens * self.spare_bytes_per_token)
        return self.fixed_bytes + beside + widest + num_sequences * self.bytes_per_sequence

    def largest_batch_tokens(self, free_bytes: int, length: int) -> int:
        """Return the tokens, padding included, of the largest batch that fits; 0 if none does.

        The batch's sequences have `length` tokens. `free_bytes` is the memory left once the weights are
        loaded.
        """
        left = free_bytes - self.fixed_bytes - self.bias_bytes
        fitting = (
            (left - each.fixed - length * length * each.per_longest_pair)
            // (
                length * (each.per_token + length * each.per_pair)
                + each.per_sequence
                + self.bytes_per_sequence
            )
            for each in self.moments
        )
        return max(0, min(fitting)) * length

    def longest_text(self, free_bytes: int, max_tokens: int) -> int:
        """Return how many tokens the longest text has that fits alone, at most `max_tokens`; 0 if none fits."""
        shortest, longest = 0, max_tokens
        while shortest < longest:
            middle = (shortest + longest + 1) // 2
            if self.largest_batch_tokens(free_bytes, middle):
                shortest = middle
            else:
                longest = middle - 1
        return shortest


def find_bias_bytes(kind: str, memory_bytes: int) -> int:
    """Return the bytes of the bias that an extractor computes at a time on a device with so much memory."""
    return max(BIAS_BYTES, int(memory_bytes * BIAS_SHARE)) if kind == CUDA else BIAS_BYTES


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """The bytes of a model's weights: of the embeddings, of each layer in order, and of what follows the layers.

    `common_bytes` are embeddings that every layer reads, of relative positions. `made_bytes` are made for each layer
    at load and shrink with no share. `key_bytes` are the matrices that make keys and values of `num_key_heads`, of
    which each rank has one whole head at least; `vector_bytes` are the norms and biases of layers, most of which
    tensor parallelism leaves whole.
    """

    embedding_bytes: int
    layer_bytes: tuple[int, ...]
    other_bytes: int
    common_bytes: int = 0
    made_bytes: int = 0
    key_bytes: int = 0
    num_key_heads: int = 1
    vector_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.embedding_bytes + self.common_bytes + sum(self.layer_bytes) + self.other_bytes

    def of_share(self, share: Portion) -> int:
        """Return what one device holds, at most: a stage's layers are counted as the largest of the model."""
        if share.strategy == REPLICATE:
            return self.total_bytes
        if share.strategy in (PIPELINE, OFFLOAD):
            count = len(self.layer_bytes) if share.num_layers is None else share.num_layers
            ends = self.embedding_bytes * share.is_first + self.other_bytes * share.is_last
            return ends + self.common_bytes + count * max(self.layer_bytes, default=0)
        made = len(self.layer_bytes) * self.made_bytes
        whole, copies = made, 0
        if share.strategy == TENSOR:
            whole += self.embedding_bytes + self.common_bytes + self.other_bytes + self.vector_bytes
            copies = self.key_bytes * max(0, share.num_ranks // self.num_key_heads - 1)
        return whole + -(-(self.total_bytes - whole + copies) // share.num_ranks)

    def gathered_by(self, share: Portion) -> tuple[int, int]:
        """Return what one device has of the others' weights during the layers, and during the look-up before them."""
        if share.strategy != FULLY_SHARDED:
            return 0, 0
        layers = GATHERED_LAYERS * max(self.layer_bytes, default=0)
        return layers, GATHERED_EMBEDDINGS * (self.embedding_bytes + self.common_bytes)


def count_weights(shape: ModelShape, precision: str, value_bytes: int) -> WeightBytes:
    """Return the bytes of the weights in `precision`; uncompressed values have `value_bytes`."""
    layers: dict[int, int] = {}
    embedding_bytes = other_bytes = common_bytes = key_bytes = vector_bytes = 0
    layout = find_family(shape.model_type).layout
    key_columns = () if layout is None else layout.key_columns
    for tensor in shape.tensors:
        num_bytes = _tensor_bytes(tensor, precision, value_bytes)
        if tensor.layer is not None:
            layers[tensor.layer] = layers.get(tensor.layer, 0) + num_bytes
            vector_bytes += num_bytes * (len(tensor.shape) == 1)
            key_bytes += num_bytes * any(f"{path}." in tensor.name for path in key_columns)
        elif "rel_embeddings" in tensor.name:
            common_bytes += num_bytes
        elif tensor.is_embedding:
            embedding_bytes += num_bytes
        else:
            other_bytes += num_bytes
    made = _count_positions(shape) * value_bytes if shape.is_extractor else 0
    return WeightBytes(
        embedding_bytes,
        tuple(layers[number] + made for number in sorted(layers)),
        other_bytes + shape.dense_values * FLOAT_BYTES,
        common_bytes,
        made,
        key_bytes,
        max(1, shape.num_key_value_heads),
        vector_bytes,
    )


def make_footprint(
    shape: ModelShape,
    precision: str,
    attention: str,
    *,
    arithmetic: str | None = None,
    share: Portion = WHOLE,
    kind: str = "",
    memory_bytes: int = 0,
    results: Moment = NOTHING,
) -> Footprint:
    """Return the memory needs of a share of a model with weights in `precision` and this attention kernel.

    `attention` is named as in an EncoderReport. `arithmetic` is the precision of activations and of
    uncompressed tensors; None means that of the weights, or fp32 if these are compressed. `kind` and
    `memory_bytes` are those of the device, `results` those of `count_results`.
    """
    if not shape.num_layers:  # a table of static embeddings: a token is its id, and a text its vector
        num_bytes = FLOAT_BYTES * shape.tensors[0].num_values
        return Footprint(
            num_bytes, (Moment(TOKEN_BYTES),), bytes_per_sequence=FLOAT_BYTES * shape.hidden_size
        )
    arithmetic = arithmetic or ("fp32" if precision in COMPRESSED else precision)
    value_bytes = int(VALUE_BYTES[arithmetic])
    weights = count_weights(shape, precision, value_bytes)
    positions = 0 if shape.is_extractor else _count_positions(shape) * value_bytes
    in_layers, in_look_up = weights.gathered_by(share)
    num_communicators = 0
    if kind == CUDA and share.num_ranks > 1:  # a stage has one with each neighbour
        num_communicators = 2 - share.is_first - share.is_last if share.strategy == PIPELINE else 1
    return Footprint(
        weight_bytes=weights.of_share(share),
        moments=(
            *(
                replace(moment, fixed=in_layers)
                for moment in _list_layer_moments(shape, attention, value_bytes, share)
            ),
            Moment(TOKEN_BYTES + 2 * shape.hidden_size * value_bytes, fixed=in_look_up),
            _find_last_moment(shape, value_bytes, share, results),
        ),
        bytes_per_sequence=positions + FLOAT_BYTES * shape.hidden_size,
        fixed_bytes=SCRATCH_BYTES
        + num_communicators * COMMUNICATOR_BYTES
        + _count_restored(shape, precision, value_bytes, share),
        **(_count_bias(shape, value_bytes, kind, memory_bytes) if shape.is_extractor else {}),
    )


def _count_positions(shape: ModelShape) -> int:
    """Return the number of values in the projected embeddings of a DeBERTa's relative positions, of one layer."""
    return RELATIVE_PROJECTIONS * shape.num_relative_positions * shape.hidden_size


def _count_restored(shape: ModelShape, precision: str, value_bytes: int, share: Portion) -> int:
    """Return the bytes of the largest compressed matrix while it is restored: in fp32, and in what it is used."""
    if precision not in COMPRESSED:
        return 0
    largest = max((each.num_values for each in shape.tensors if each.is_matrix), default=0)
    part = -(-largest // share.num_ranks) if share.strategy == TENSOR else largest
    return part * (FLOAT_BYTES + (value_bytes if value_bytes < FLOAT_BYTES else 0))


def _list_layer_moments(
    shape: ModelShape, attention: str, value_bytes: int, share: Portion
) -> Iterator[Moment]:
    """Yield the moments of a layer that may be its widest: the feed-forward block, attention and norm.

    Besides a layer's own tensors, its input is alive, which its caller holds, and so are the embeddings. The
    feed-forward block adds the intermediate values before and after the activation function (with a gate: both
    halves and their product); attention adds queries, keys, values, what rotates and repeats them, and its output.
    Ranks of tensor parallelism have all hidden states, and divide the others.
    """
    family = find_family(shape.model_type)
    ranks = share.num_ranks if share.strategy == TENSOR else 1
    heads = -(-shape.num_heads // ranks) * shape.head_size
    key_heads = max(1, -(-shape.num_key_value_heads // ranks)) * shape.head_size
    intermediate = -(-shape.intermediate_size // ranks)
    least_wide = family.num_wide or ((4 if shape.has_joined_gate else 3) if shape.is_gated else 2)
    wide = max(least_wide, (2 if shape.has_joined_gate else 1) + ACTIVATION_RESULTS.get(shape.activation, 1))
    states = family.num_states + (share.strategy == TENSOR)  # ranks add up their states in a copy
    rotary = 2 * family.num_rotary * shape.head_size
    # The states that a stage waits for, and those that are on their way to the next one.
    num_passing = 2 - share.is_first - share.is_last
    kept = TOKEN_BYTES + value_bytes * (rotary + num_passing * shape.hidden_size)
    masks, scores = _count_masks(shape, attention, value_bytes, ranks)
    if shape.num_relative_positions and not shape.is_extractor:
        # transformers keeps the output of every layer of a DeBERTa.
        states = shape.num_layers
        if share.strategy == PIPELINE and share.num_layers is not None:
            states = share.num_layers
        # The scores of all relative positions, from which each pair of tokens then picks one.
        relative = shape.num_heads * shape.num_relative_positions + 2 * shape.hidden_size
        yield Moment(
            kept + value_bytes * (states * shape.hidden_size + relative), masks.per_pair + scores.per_pair
        )
    yield Moment(
        kept + value_bytes * (states * shape.hidden_size + wide * intermediate),
        masks.per_pair,
        masks.per_longest_pair,
    )
    held = max(2, states - 1) * shape.hidden_size + 2 * heads + 2 * key_heads
    held += 2 * heads * (bool(family.num_rotary) + (key_heads < heads))
    yield Moment(
        kept + value_bytes * held,
        masks.per_pair + scores.per_pair,
        masks.per_longest_pair + scores.per_longest_pair,
    )
    if value_bytes < FLOAT_BYTES:
        in_norm = (states - 1) * value_bytes + NORM_STATES * FLOAT_BYTES
        yield Moment(kept + in_norm * shape.hidden_size, masks.per_pair, masks.per_longest_pair)


def _find_last_moment(shape: ModelShape, value_bytes: int, share: Portion, results: Moment) -> Moment:
    """Return the moment behind the layers: the last states as they are and in fp32, and the results."""
    if not share.is_last:
        return Moment(TOKEN_BYTES)
    pooled = (value_bytes + 2 * FLOAT_BYTES) * shape.hidden_size + results.per_token
    return Moment(TOKEN_BYTES + pooled, per_sequence=results.per_sequence, fixed=results.fixed)


def _count_masks(shape: ModelShape, attention: str, value_bytes: int, ranks: int) -> tuple[Moment, Moment]:
    """Return the bytes of the masks, which all layers use, and of the scores of one layer (worker.model.masks).

    A fused kernel stores no scores, but makes numbers of a mask that has a value for each pair. Models that look
    back need no mask for padding, which is behind; those that look both ways need one value a token. A window needs a
    value for each pair, of every sequence if padding is hidden too.
    """
    if shape.is_extractor:
        return Moment(0, EXTRACTOR_MASK_BYTES), Moment(0)
    if shape.num_relative_positions:  # no fused kernel supports such scores
        scored = RELATIVE_SCORES * value_bytes + RELATIVE_PLACE_BYTES
        return Moment(0, RELATIVE_MASK_BYTES), Moment(0, shape.num_heads * scored)
    if attention.startswith("packed"):
        return Moment(0), Moment(0)
    if attention.startswith("openvino"):
        return Moment(0, OPENVINO_MASK_BYTES), Moment(0)
    family = find_family(shape.model_type)
    if "eager" in attention or family.is_eager:
        heads = -(-shape.num_heads // ranks)
        scored = (family.num_scores - 1) * value_bytes
        if (
            family.is_causal and value_bytes < FLOAT_BYTES
        ):  # a decoder's softmax is in fp32: its input and result
            scored = 2 * FLOAT_BYTES
        # A layer keeps the scores until its end.
        return Moment(0, value_bytes * (1 + shape.has_window + heads)), Moment(0, heads * scored)
    if not shape.has_window:
        return Moment(0), Moment(0)
    if shape.sees_later:
        return Moment(0, 1), Moment(0, value_bytes)
    return Moment(0, 0, 1), Moment(0, 0, value_bytes)


def _count_bias(shape: ModelShape, value_bytes: int, kind: str, memory_bytes: int) -> dict[str, int]:
    """Return the bytes of an extractor's attention bias. No intermediate values are alive at that moment."""
    spare = 2 * shape.intermediate_size - 3 * shape.num_heads * shape.head_size
    return {
        "bias_bytes": find_bias_bytes(kind, memory_bytes),
        "bias_bytes_per_pair": BIAS_MATRICES * shape.num_heads * value_bytes,
        "spare_bytes_per_token": max(0, spare) * value_bytes,
    }


def _tensor_bytes(tensor: TensorSize, precision: str, value_bytes: int) -> int:
    if precision in COMPRESSED and tensor.is_matrix:
        num_groups = tensor.num_values // find_group_size(tensor.shape[1])
        return int(tensor.num_values * VALUE_BYTES[precision]) + num_groups * GROUP_BYTES[precision]
    if precision in COMPRESSED and tensor.is_embedding and tensor.shape[0] >= SMALLEST_TABLE_ROWS:
        return tensor.num_values + tensor.shape[0] * GROUP_BYTES["int8"]  # a vocabulary is int8 in every case
    return tensor.num_values * value_bytes
