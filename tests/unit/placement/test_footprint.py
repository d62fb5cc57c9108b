"""What a model is foreseen to need, counted by hand from its sizes."""

from dataclasses import replace

import pytest

from vectormill.models.model_shape import ModelShape, TensorSize
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.placement.footprint import (
    BIAS_BYTES,
    SCRATCH_BYTES,
    Footprint,
    count_activations,
    make_footprint,
)

CARD = Registry({}).card(DEFAULT_MODEL, weights=True)
SHAPE = CARD.find_shape()
# 30,522 words, 512 positions and 2 types of 384 values, and the norm behind them.
NUM_EMBEDDING_VALUES = (30522 + 512 + 2 + 2) * 384
# Four matrices of attention, two of the feed-forward block, their biases and two norms.
NUM_LAYER_VALUES = 4 * (384 * 384 + 384) + 2 * 384 * 1536 + 1536 + 384 + 4 * 384


@pytest.mark.parametrize(
    ("precision", "weight_bytes"),
    [
        ("fp32", 4 * (NUM_EMBEDDING_VALUES + 6 * NUM_LAYER_VALUES)),  # no pooler: the network drops it
        ("bf16", 2 * (NUM_EMBEDDING_VALUES + 6 * NUM_LAYER_VALUES)),
        ("fp16", 2 * (NUM_EMBEDDING_VALUES + 6 * NUM_LAYER_VALUES)),
    ],
)
def test_weights_are_counted_once_at_their_precision_and_unused_heads_are_not(
    precision: str, weight_bytes: int
) -> None:
    footprint = make_footprint(SHAPE, precision, "sdpa")
    assert footprint.weight_bytes == weight_bytes
    assert len(footprint.layer_bytes) == footprint.num_layers == 6
    assert len(set(footprint.layer_bytes)) == 1


def test_compression_compresses_matrices_and_the_vocabulary_and_leaves_norms() -> None:
    whole, int8 = (make_footprint(SHAPE, name, "sdpa") for name in ("fp32", "int8"))
    # One byte a value and a scale of four a row.
    assert whole.embedding_bytes - int8.embedding_bytes == 30522 * (3 * 384 - 4)
    matrices = 6 * (4 * 384 * 384 + 2 * 384 * 1536)
    assert sum(whole.layer_bytes) - sum(int8.layer_bytes) == matrices * (4 - 1) - matrices // 64 * 4


@pytest.mark.parametrize(
    ("attention", "num_bytes"),
    [
        ("sdpa", 5),
        ("padded (sdpa)", 5),  # a mask, as bool and as fp32
        ("eager", 5 + 2 * 12 * 4),  # and the scores of twelve heads, before and after the softmax
        ("packed", 0),
        ("packed (vectormill_varlen)", 0),
        ("openvino", 16),
    ],
)
def test_only_kernels_that_hold_scores_or_masks_pay_for_squared_lengths(
    attention: str, num_bytes: int
) -> None:
    assert make_footprint(SHAPE, "fp32", attention).attention_bytes_per_token_squared == num_bytes


@pytest.mark.parametrize(
    ("shape", "num_values"),
    [
        (SHAPE, 2 * 384 + 2 * 1536),
        (replace(SHAPE, is_gated=True), 2 * 384 + 3 * 1536),
        (replace(SHAPE, is_gated=True, has_joined_gate=True), 2 * 384 + 4 * 1536),
        # A narrow feed-forward block: the attention is the widest moment, less with shared keys.
        (replace(SHAPE, intermediate_size=100, num_key_value_heads=3), 2 * 384 + (2 * 12 + 2 * 3) * 32),
    ],
)
def test_the_widest_moment_of_a_layer_decides(shape: ModelShape, num_values: int) -> None:
    assert count_activations(shape) == num_values


def test_a_deberta_holds_scores_of_every_relative_position_and_all_that_came_out_of_its_layers() -> None:
    shape = replace(
        SHAPE, tensors=(*SHAPE.tensors, TensorSize("encoder.rel_embeddings.weight", (512, 384), None))
    )
    footprint = make_footprint(shape, "fp32", "padded (eager)")
    assert footprint.activation_bytes_per_token == 4 * (6 * 384 + 12 * 512 + 2 * 384)
    assert footprint.attention_bytes_per_token_squared == 4 * 12 * 4 + 17
    assert footprint.bytes_per_sequence == 2 * 512 * 384 * 4
    tokens = footprint.largest_batch_tokens(100_000_000, 64)
    assert footprint.predict_batch_bytes(tokens // 64, 64) <= 100_000_000
    assert footprint.predict_batch_bytes(tokens // 64 + 1, 64) > 100_000_000


def test_an_extraction_projects_positions_once_and_has_as_many_heads_at_work_as_it_may() -> None:
    relative = TensorSize("plm.encoder.rel_embeddings.weight", (512, 384), None)
    shape = replace(SHAPE, tensors=(*SHAPE.tensors, relative), is_extractor=True)
    footprint = make_footprint(shape, "fp32", "padded (disentangled, by sequence)")
    plain = make_footprint(SHAPE, "fp32", "padded (sdpa)")
    projected = 2 * 512 * 384 * 4
    assert footprint.made_bytes == projected
    assert footprint.weight_bytes == plain.weight_bytes + 6 * projected + 512 * 384 * 4
    assert footprint.bytes_per_sequence == 0
    assert footprint.activation_bytes_per_token == 4 * (3 * 384 + 2 * 1536)
    assert footprint.attention_bytes_per_token_squared == 9
    one = footprint.predict_batch_bytes(1, 64)
    assert one == SCRATCH_BYTES + 64 * (16896 + 9 * 64) + 64 * (4 * 12 * 4 * 64 - 4 * (2 * 1536 - 3 * 384))
    # Of a large batch some heads at a time.
    many = footprint.predict_batch_bytes(4, 512)
    assert many == SCRATCH_BYTES + 2048 * (16896 + 9 * 512) + BIAS_BYTES - 2048 * 7680
    tokens = footprint.largest_batch_tokens(400_000_000, 512)
    assert footprint.predict_batch_bytes(tokens // 512, 512) <= 400_000_000


def test_the_largest_batch_fits_and_one_sequence_more_does_not() -> None:
    footprint = make_footprint(SHAPE, "fp32", "eager")
    for length in (1, 17, 128, 512):
        tokens = footprint.largest_batch_tokens(100_000_000, length)
        assert tokens % length == 0
        num_sequences = tokens // length
        assert footprint.predict_batch_bytes(num_sequences, length) <= 100_000_000
        assert footprint.predict_batch_bytes(num_sequences + 1, length) > 100_000_000


def test_nothing_fits_where_nothing_is_free() -> None:
    assert Footprint(1, 0, (0,), 0, 100, 0).largest_batch_tokens(-5, 10) == 0
