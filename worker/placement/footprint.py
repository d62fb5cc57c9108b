"""Predict the memory that a share of a model needs on a device, without loading weights. Imports no torch.

One function, `make_footprint`, tells what a plan counts, how large a batch may be, how long a text, and what
`vectormill plan` prints. Activations are those of a forward pass without gradients: a layer's output replaces
that of the layer before, so only the widest moment of a layer matters, and recomputing activations would save
nothing. tests/contract/test_footprint_agrees.py compares the prediction with what torch's allocator counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from operator import add
from typing import Final

from vectormill.models.families import EXTRACTOR, Family, ScoreMatrices, find_family
from vectormill.models.model_card import ModelCard
from vectormill.models.model_shape import ModelShape, TensorSize
from vectormill.models.rounding import SMALLEST_TABLE_ROWS, find_group_size
from worker.devices.backends import BACKENDS
from worker.devices.device import CUDA
from worker.placement.strategies import FULLY_SHARDED, NUM_SLOTS, OFFLOAD, PIPELINE, REPLICATE, TENSOR

VALUE_BYTES: Final = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0}
FLOAT_BYTES: Final = 4
# Each group of compressed values has a scale.
GROUP_BYTES: Final = {"int8": 4}
COMPRESSED: Final = frozenset(GROUP_BYTES)  # of the weights only; products are computed in floats

# A batch holds of each token, besides its hidden states, the id, the position, a value of a mask, and its place among
# those that a head reads, as int64.
TOKEN_BYTES: Final = 8 + 8 + 8 + 8
# What the attention of a backend takes for each pair of tokens of a sequence, where it has one of its own.
PAIR_BYTES: Final = {each.attention: each.pair_bytes for each in BACKENDS.values() if each.pair_bytes}

# Memory that kernels keep from the first batch on: packed matrices, thread stacks, code. Measured 13 to 16 MB
# on a CPU; cuBLAS' workspace on CUDA has that size.
SCRATCH_BYTES: Final = 16_000_000
# The buffers of a communicator of NCCL. A guess, not yet measured on GPUs: its default is a buffer of 4 MiB
# (NCCL_BUFFSIZE) for each protocol, peer and channel. Gloo takes main memory, which counts as the process's own.
COMMUNICATOR_BYTES: Final = 256 << 20

# The results that an activation function has alive at its end, if it is several operations; measured.
ACTIVATION_RESULTS: Final = {
    **dict.fromkeys(("gelu_10", "quick_gelu", "relu2", "sqrtsoftplus"), 2),
    **dict.fromkeys(
        ("gelu_new", "gated-gelu", "gelu_python", "gelu_python_tanh", "gelu_accurate", "laplace"), 3
    ),
    "gelu_fast": 4,
}
# The states in fp32 while a norm in a model of 16 bits computes: the states, their square, and the result.
NORM_STATES: Final = 3

# A DeBERTa projects the embeddings of its relative positions as queries and as keys.
RELATIVE_PROJECTIONS: Final = 2
# An extractor projects them once, when it is loaded, and computes as many heads at a time as fit into this
# many bytes, or on a GPU into this share of its memory, at least one (worker.tasks.extract.model.network). For each
# head a pair of tokens takes so many bytes by the size of a number: in fp32 the bias, what is added to it, and what
# both are gathered from, twice as wide; in 16 bits the scores, of which torch makes fp32. Measured on a CPU.
BIAS_BYTES: Final = 64 << 20
BIAS_SHARE: Final = 1 / 64
BIAS_PAIR_BYTES: Final = {4: 4 * 4, 2: 6 * 2}

HALF_BYTES: Final = 2  # of a vector of a token
# The numbers of tokens for words that a sparse head computes at a time (worker.model.heads).
WORD_LOGITS: Final = 1 << 24

# The layers that full sharding has whole at a time: the one that is computed, the gathered parts that it was copied
# from, and those of the next one. Of the embeddings it has the copy and the parts, before any layer. Source:
# FSDPParamGroup.wait_for_unshard of torch.
GATHERED_LAYERS: Final = 3
GATHERED_EMBEDDINGS: Final = 2
# The embeddings hold five states at once: rows of three tables (words, positions, segments), their sum and its norm.
# Positions are counted in as many numbers as a batch has. All of this matters only where large tables are gathered;
# otherwise a layer takes more.
LOOK_UP_STATES: Final = 5
PLACE_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class ModelShare:
    """The part of a model on one device: `num_layers` (None for all), which `num_ranks` devices share by `strategy`.

    The first stage of a pipeline `is_first` and has the embeddings. A device that `answers` makes the results of
    batches, and has the heads for it: the last stage of a pipeline, which also has what follows the layers, the first
    rank of tensor parallelism, and every device otherwise. With layers in main memory, `num_layers` counts those that
    the device has at a time.
    """

    strategy: str = REPLICATE
    num_ranks: int = 1
    num_layers: int | None = None
    is_first: bool = True
    answers: bool = True


WHOLE: Final = ModelShare()


def list_shares(
    strategy: str, stage_layers: Sequence[int], num_ranks: int, num_offloaded: int = 0
) -> list[ModelShare]:
    """Return the share of each device of a replica, whose stages have so many layers.

    `num_offloaded` of them are in main memory, and pass through slots of the device.
    """
    if strategy == OFFLOAD:
        return [ModelShare(strategy, num_layers=stage_layers[0] - num_offloaded + NUM_SLOTS)]
    ranks = range(num_ranks)
    if strategy == PIPELINE:
        last = num_ranks - 1
        return [
            ModelShare(strategy, num_ranks, stage_layers[rank], rank == 0, rank == last) for rank in ranks
        ]
    return [ModelShare(strategy, num_ranks, answers=strategy != TENSOR or rank == 0) for rank in ranks]


@dataclass(frozen=True, slots=True)
class Moment:
    """The bytes of all tensors that are in memory together at one moment of a forward pass, besides the weights.

    Of a batch of n sequences, padded to L tokens each, they are n · L times `per_token`, n · L² times `per_pair`, L²
    times `per_longest_pair` (tensors that all sequences share), n times `per_sequence`, and `fixed`. What is computed
    a part at a time takes n · L times `capped_per_token` and n · L² times `capped_per_pair`, at most `cap`.
    """

    per_token: int = 0
    per_pair: int = 0
    per_longest_pair: int = 0
    per_sequence: int = 0
    fixed: int = 0
    capped_per_token: int = 0
    capped_per_pair: int = 0
    cap: int = 0

    def __add__(self, other: "Moment") -> "Moment":
        return Moment(*map(add, astuple(self), astuple(other)))

    def count_bytes(self, num_sequences: int, length: int) -> int:
        """Return the bytes for sequences padded to `length`."""
        each, capped = self._count_each(length)
        return num_sequences * each + min(num_sequences * capped, self.cap) + self._count_once(length)

    def count_fitting(self, free_bytes: int, length: int) -> int:
        """Return how many sequences of this length fit into the bytes; less than 0 if not even what they share does."""
        each, capped = self._count_each(length)
        left = free_bytes - self._count_once(length)
        return max(left // (each + capped), (left - self.cap) // each)

    def _count_each(self, length: int) -> tuple[int, int]:
        each = self.per_sequence + length * (self.per_token + length * self.per_pair)
        return each, length * (self.capped_per_token + length * self.capped_per_pair)

    def _count_once(self, length: int) -> int:
        return self.fixed + length * length * self.per_longest_pair


NOTHING: Final = Moment()


def count_results(card: ModelCard) -> Moment:
    """Return what results take beyond a dense vector. They are copied once, into one array of bytes."""
    words = card.sparse_dimensions if card.sparse_head is not None and not card.sparse_head.file else 0
    return Moment(
        2 * HALF_BYTES * card.token_dimensions,
        per_sequence=2 * FLOAT_BYTES * words,
    )


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory needs of a share of a model: its weights, and the activations of a batch.

    `weight_bytes` are held from loading on, `fixed_bytes` during every pass, whatever its batch: among them are
    weights that are restored. A batch needs what the largest of its `moments` does. Texts are padded to a multiple
    of `block_tokens`.
    """

    weight_bytes: int
    moments: tuple[Moment, ...]
    fixed_bytes: int = SCRATCH_BYTES
    block_tokens: int = 1

    def predict_batch_bytes(self, num_sequences: int, length: int) -> int:
        """Return the bytes of one forward pass besides the weights, for sequences padded to `length`."""
        padded = self._pad(length)
        return self.fixed_bytes + max(each.count_bytes(num_sequences, padded) for each in self.moments)

    def largest_batch_tokens(self, free_bytes: int, length: int) -> int:
        """Return the tokens, padding included, of the largest batch that fits; 0 if none does.

        The batch's sequences have `length` tokens. `free_bytes` is the memory left once the weights are
        loaded.
        """
        left, padded = free_bytes - self.fixed_bytes, self._pad(length)
        return max(0, min(each.count_fitting(left, padded) for each in self.moments)) * length

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

    def _pad(self, length: int) -> int:
        return -(-length // self.block_tokens) * self.block_tokens


def find_bias_bytes(kind: str, memory_bytes: int) -> int:
    """Return the bytes of the bias that an extractor computes at a time on a device with so much memory."""
    return max(BIAS_BYTES, int(memory_bytes * BIAS_SHARE)) if kind == CUDA else BIAS_BYTES


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """The bytes of a model's weights: of the embeddings, of each layer in order, and of what follows the layers.

    `other_bytes` follow the layers: the last norm, and `head_bytes` of the heads that make results, which each device
    that answers has completely. `word_bytes` are those of the vocabulary's matrix in a head that weighs words, which
    only a device with the whole model has in common with the embeddings. `common_bytes` are the embeddings of relative
    positions, which every layer reads. An extractor keeps `made_bytes` of their projections for each layer, which no
    strategy divides; `layer_bytes` contain them. `key_bytes` are the matrices of all layers that make keys and values
    of `num_key_heads`, of which each rank of tensor parallelism has one whole head at least, and `vector_bytes` are
    the norms and biases of all layers, most of which it leaves whole.
    """

    embedding_bytes: int
    layer_bytes: tuple[int, ...]
    other_bytes: int
    common_bytes: int = 0
    made_bytes: int = 0
    key_bytes: int = 0
    num_key_heads: int = 1
    vector_bytes: int = 0
    head_bytes: int = 0
    word_bytes: int = 0
    row_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Return the bytes of the whole model on one device."""
        return self.embedding_bytes + self.common_bytes + sum(self.layer_bytes) + self.other_bytes

    def of_share(self, share: ModelShare) -> int:
        """Return what one device holds, at most: a stage's layers are counted as the largest of the model."""
        if share.strategy == REPLICATE:
            return self.total_bytes
        words = self.word_bytes * share.answers
        if share.strategy in (PIPELINE, OFFLOAD):
            count = len(self.layer_bytes) if share.num_layers is None else share.num_layers
            ends = self.embedding_bytes * share.is_first + self.other_bytes * share.answers + words
            return ends + self.common_bytes + count * max(self.layer_bytes, default=0)
        whole, copies = len(self.layer_bytes) * self.made_bytes, 0
        if share.strategy == TENSOR:
            whole += self.embedding_bytes + self.common_bytes + self.vector_bytes
            whole += self.other_bytes - self.head_bytes
            copies = self.key_bytes * max(0, share.num_ranks // self.num_key_heads - 1)
        cut = self.total_bytes - self.head_bytes - whole + copies
        if share.strategy == FULLY_SHARDED:  # each tensor is cut between rows
            cut += share.num_ranks * self.row_bytes
        return whole + words + self.head_bytes * share.answers - (-cut // share.num_ranks)


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
        elif "rel_embeddings" in tensor.name or (
            shape.num_relative_positions and tensor.name.startswith("encoder.LayerNorm")
        ):
            common_bytes += num_bytes
        elif tensor.is_embedding:
            embedding_bytes += num_bytes
        else:
            other_bytes += num_bytes
    made = _count_positions(shape) * value_bytes if shape.is_extractor else 0
    heads = shape.dense_values * FLOAT_BYTES + shape.head_values * value_bytes
    words = 0
    if shape.weighs_words:
        rows, width = _find_vocabulary(shape)
        words = rows * width * value_bytes
        # A matrix and a norm before the vocabulary's, which has a bias.
        heads += (shape.hidden_size * width + 3 * width + rows) * value_bytes
        if precision in COMPRESSED and rows >= SMALLEST_TABLE_ROWS:  # the head's matrix is not compressed
            heads, words = heads + words, 0
    return WeightBytes(
        embedding_bytes,
        tuple(layers[number] + made for number in sorted(layers)),
        other_bytes + heads,
        common_bytes,
        made,
        key_bytes,
        max(1, shape.num_key_value_heads),
        vector_bytes,
        heads,
        words,
        sum(_tensor_bytes(each, precision, value_bytes) // each.shape[0] for each in shape.tensors),
    )


def make_footprint(
    shape: ModelShape,
    precision: str,
    attention: str,
    *,
    arithmetic: str | None = None,
    share: ModelShare = WHOLE,
    kind: str = "",
    memory_bytes: int = 0,
    results: Moment = NOTHING,
) -> Footprint:
    """Return the memory needs of a share of a model with weights in `precision` and this attention kernel.

    `attention` is named as in an EncoderReport. `arithmetic` is the precision of activations and of
    uncompressed tensors; None means that of the weights, or fp32 if these are compressed. `kind` and
    `memory_bytes` are those of the device, `results` those of `count_results`.
    """
    # For further outputs, the place of each token that they read.
    index_bytes = PLACE_BYTES if results != NOTHING else 0
    pooled = Moment(index_bytes, per_sequence=FLOAT_BYTES * shape.hidden_size)
    if not shape.num_layers:  # a table of static embeddings: a token is its id, and a text its vector
        return Footprint(FLOAT_BYTES * shape.tensors[0].num_values, (Moment(TOKEN_BYTES) + pooled,))
    arithmetic = arithmetic or ("fp32" if precision in COMPRESSED else precision)
    value_bytes = int(VALUE_BYTES[arithmetic])
    weights = count_weights(shape, precision, value_bytes)
    in_layers = in_look_up = num_communicators = restored = 0
    if share.strategy == FULLY_SHARDED:
        # Weights of other devices are copied here for a moment: of the layers while one of them is computed, and of the
        # embeddings while tokens are looked up, before the first layer.
        in_layers = GATHERED_LAYERS * max(weights.layer_bytes, default=0)
        in_look_up = GATHERED_EMBEDDINGS * (weights.embedding_bytes + weights.common_bytes)
    if precision in COMPRESSED:
        # The largest compressed matrix is restored in fp32, and in what it is used.
        largest = max((each.num_values for each in shape.tensors if each.is_matrix), default=0)
        part = -(-largest // share.num_ranks) if share.strategy == TENSOR else largest
        restored = part * (FLOAT_BYTES + (value_bytes if value_bytes < FLOAT_BYTES else 0))
    # Behind the layers: the last states as they are and in fp32, and the results.
    last = Moment(TOKEN_BYTES)
    if share.answers:
        if shape.weighs_words:
            words = _find_vocabulary(shape)[0]
            results += Moment(capped_per_token=value_bytes * words, cap=value_bytes * WORD_LOGITS)
        last += results + Moment((value_bytes + 2 * FLOAT_BYTES) * shape.hidden_size)
    if kind == CUDA and share.num_ranks > 1:  # a stage has one with each neighbour
        num_communicators = _count_neighbours(share) if share.strategy == PIPELINE else 1
    cap = find_bias_bytes(kind, memory_bytes)
    moments = (
        *(
            each + Moment(fixed=in_layers)
            for each in _list_layer_moments(shape, attention, value_bytes, share, cap)
        ),
        Moment(2 * TOKEN_BYTES + LOOK_UP_STATES * shape.hidden_size * value_bytes, fixed=in_look_up),
        last,
    )
    return Footprint(
        weights.of_share(share),
        tuple(each + pooled for each in moments),
        SCRATCH_BYTES + num_communicators * COMMUNICATOR_BYTES + restored,
        max(1, shape.block_tokens),
    )


def _count_neighbours(share: ModelShare) -> int:
    """Return how many stages a stage of a pipeline exchanges hidden states with; 0 by other strategies."""
    return 2 - share.is_first - share.answers if share.strategy == PIPELINE else 0


def _count_positions(shape: ModelShape) -> int:
    """Return the number of values in the projected embeddings of a DeBERTa's relative positions, of one layer."""
    return RELATIVE_PROJECTIONS * shape.num_relative_positions * shape.hidden_size


def _list_layer_moments(
    shape: ModelShape, attention: str, value_bytes: int, share: ModelShare, cap: int
) -> Iterator[Moment]:
    """Yield the moments of a layer that may be its widest: the feed-forward block, attention and norm.

    Besides a layer's own tensors, its input is alive, which its caller holds, and so are the embeddings. The
    feed-forward block adds the intermediate values before and after the activation function (with a gate: both
    halves and their product); attention adds queries, keys, values, what rotates and repeats them, and its output.
    Ranks of tensor parallelism have all hidden states, and divide the others. An extractor computes the bias of at
    most `cap` bytes at a time.
    """
    family = EXTRACTOR if shape.is_extractor else find_family(shape.model_type)
    ranks = share.num_ranks if share.strategy == TENSOR else 1
    num_heads, hidden = -(-shape.num_heads // ranks), shape.hidden_size
    heads = num_heads * shape.head_size
    key_heads = max(1, -(-shape.num_key_value_heads // ranks)) * shape.head_size
    intermediate = -(-shape.intermediate_size // ranks)
    least_wide = family.num_wide or ((4 if shape.has_joined_gate else 3) if shape.is_gated else 2)
    wide = max(least_wide, (2 if shape.has_joined_gate else 1) + ACTIVATION_RESULTS.get(shape.activation, 1))
    states = family.num_states + (share.strategy == TENSOR)  # ranks add up their states in a copy
    if family.keeps_states:
        states += (share.strategy == PIPELINE and share.num_layers) or shape.num_layers
    rotary = 2 * family.num_rotary * shape.head_size
    # The states that a stage waits for, and those that are on their way to the next one.
    masks, scores = _count_scores(shape, family, attention, value_bytes, num_heads)
    kept = masks + Moment(TOKEN_BYTES + value_bytes * (rotary + _count_neighbours(share) * hidden))
    yield kept + Moment(value_bytes * (states * hidden + wide * intermediate))
    held = max(2, states - 1) * hidden + 2 * heads + 2 * key_heads
    held += 2 * heads * (bool(family.num_rotary) + (key_heads < heads))
    attending = kept + scores + Moment(value_bytes * held)
    if shape.is_extractor:
        bias = BIAS_PAIR_BYTES[value_bytes]
        yield attending + Moment(per_pair=bias)  # of one head at least
        attending += Moment(capped_per_pair=num_heads * bias, cap=cap)
    elif block := shape.block_tokens:
        # A token has the scores of a block and of itself; those before the softmax are shifted in a wider matrix.
        scored = (block + 1) * (3 * FLOAT_BYTES + value_bytes)
        if value_bytes == FLOAT_BYTES:
            scored = value_bytes * (3 * block + block // 2 + 4)
        attending += Moment(
            value_bytes * (hidden + block + 1) + num_heads * scored, per_sequence=value_bytes * block * hidden
        )
    yield attending
    if value_bytes < FLOAT_BYTES:
        yield kept + Moment(((states - 1) * value_bytes + NORM_STATES * FLOAT_BYTES) * hidden)


def _find_vocabulary(shape: ModelShape) -> tuple[int, ...]:
    """Return the shape [words, width] of the largest table of embeddings."""
    return max((each.shape for each in shape.tensors if each.is_embedding), default=(0, 0))


def _count_scores(
    shape: ModelShape, family: Family, attention: str, value_bytes: int, num_heads: int
) -> tuple[Moment, Moment]:
    """Return the bytes of masks and scores that are kept until the end of a layer, and those of its attention alone.

    A fused kernel stores no scores, but makes numbers of a mask that has a value for each pair. Models that look
    back need no mask for padding, which is behind; those that look both ways need one value a token. A window needs a
    value for each pair, of every sequence if padding is hidden too (worker.model.masks).
    """
    if attention.startswith("packed"):
        return NOTHING, NOTHING
    if attention in PAIR_BYTES and not shape.num_relative_positions:
        return Moment(per_pair=PAIR_BYTES[attention]), NOTHING
    found = family.scores or (ScoreMatrices() if "eager" in attention else None)
    if found is not None:
        matrix = num_heads * value_bytes
        mask = value_bytes * (1 + shape.has_window) if found.mask_bytes is None else found.mask_bytes
        once = found.num_shared * matrix + found.distance_bytes
        num_more = found.num_matrices - found.num_kept + found.num_in_half * (value_bytes < FLOAT_BYTES)
        scored = num_more * matrix + num_heads * found.index_bytes
        if family.is_causal and value_bytes < FLOAT_BYTES:  # the input of a decoder's softmax, and its result
            scored = 2 * FLOAT_BYTES * num_heads
        positions = 0 if shape.is_extractor else value_bytes * _count_positions(shape)
        copied = Moment(fixed=positions)
        if found.copies_positions:
            copied = Moment(matrix * shape.num_relative_positions, per_sequence=positions)
        return Moment(0, mask + found.num_kept * matrix, once), copied + Moment(per_pair=scored)
    if not shape.has_window:
        return NOTHING, NOTHING
    if shape.sees_later:
        return Moment(per_pair=1), Moment(per_pair=value_bytes)
    return Moment(per_longest_pair=1), Moment(per_longest_pair=value_bytes)


def _tensor_bytes(tensor: TensorSize, precision: str, value_bytes: int) -> int:
    if precision in COMPRESSED and tensor.is_matrix:
        num_groups = tensor.num_values // find_group_size(tensor.shape[1])
        return int(tensor.num_values * VALUE_BYTES[precision]) + num_groups * GROUP_BYTES[precision]
    if precision in COMPRESSED and tensor.is_embedding and tensor.shape[0] >= SMALLEST_TABLE_ROWS:
        return tensor.num_values + tensor.shape[0] * GROUP_BYTES["int8"]  # a vocabulary is int8 in every case
    return tensor.num_values * value_bytes
