"""The predicted weights of a model are those counted by hand from its sizes, and batches are limited by the prediction.

The memory of a pass is measured in tests/contract/test_footprint_agrees.py.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.devices.device import CUDA
from worker.placement.footprint import COMMUNICATOR_BYTES, Footprint, ModelShare, Moment, make_footprint
from worker.placement.strategies import FULLY_SHARDED, PIPELINE, TENSOR

CARD = Registry({}).card(DEFAULT_MODEL, weights=True)
SHAPE = CARD.find_shape()
# 30,522 words, 512 positions and 2 types of 384 values, and the norm behind them.
NUM_EMBEDDING_VALUES = (30522 + 512 + 2 + 2) * 384
# Four matrices of attention, two of the feed-forward block, their biases and two norms.
NUM_LAYER_VALUES = 4 * (384 * 384 + 384) + 2 * 384 * 1536 + 1536 + 384 + 4 * 384


@pytest.mark.parametrize(("precision", "num_bytes"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_weights_are_counted_once_at_their_precision_and_unused_heads_are_not(
    precision: str, num_bytes: int
) -> None:
    footprint = make_footprint(SHAPE, precision, "sdpa")
    assert footprint.weight_bytes == num_bytes * (NUM_EMBEDDING_VALUES + 6 * NUM_LAYER_VALUES)


def test_compression_compresses_matrices_and_the_vocabulary_and_restores_one_matrix_at_a_time() -> None:
    whole, int8 = (make_footprint(SHAPE, name, "sdpa") for name in ("fp32", "int8"))
    matrices = 6 * (4 * 384 * 384 + 2 * 384 * 1536)
    # One byte a value and a scale of four a row of the vocabulary, or a group of a matrix.
    saved = 30522 * (3 * 384 - 4) + matrices * (4 - 1) - matrices // 64 * 4
    assert whole.weight_bytes - int8.weight_bytes == saved
    assert int8.fixed_bytes - whole.fixed_bytes == 4 * 384 * 1536
    in_bf16 = make_footprint(SHAPE, "int8", "sdpa", arithmetic="bf16")
    assert in_bf16.fixed_bytes - whole.fixed_bytes == (4 + 2) * 384 * 1536


def test_ranks_hold_their_part_of_the_weights_and_gather_three_layers_where_each_is_cut() -> None:
    layers, embeddings = 6 * NUM_LAYER_VALUES * 4, NUM_EMBEDDING_VALUES * 4

    def predict(share: ModelShare, kind: str = "cpu") -> Footprint:
        return make_footprint(SHAPE, "fp32", "packed", share=share, kind=kind)

    assert predict(ModelShare(PIPELINE, 3, 2, answers=False)).weight_bytes == embeddings + layers // 3
    assert predict(ModelShare(PIPELINE, 3, 2, is_first=False, answers=False)).weight_bytes == layers // 3
    vectors = 6 * 4 * (1536 + 9 * 384)  # biases and norms, which are left whole
    assert predict(ModelShare(TENSOR, 2)).weight_bytes == embeddings + vectors + (layers - vectors) // 2
    sharded = predict(ModelShare(FULLY_SHARDED, 4))
    # Each tensor is cut between rows, so that a rank may have a row more of each.
    assert 0 <= sharded.weight_bytes - (embeddings + layers) // 4 <= 0.005 * sharded.weight_bytes
    assert {moment.fixed for moment in sharded.moments} == {0, 2 * embeddings, 3 * layers // 6}
    # A stage in the middle talks to two neighbours, by a communicator each; gloo takes no memory of a device.
    middle = ModelShare(PIPELINE, 3, 2, is_first=False, answers=False)
    for share, count in (
        (middle, 2),
        (ModelShare(PIPELINE, 3, 2, answers=False), 1),
        (ModelShare(TENSOR, 2), 1),
    ):
        more = predict(share, CUDA).fixed_bytes - predict(share).fixed_bytes
        assert more == count * COMMUNICATOR_BYTES


@pytest.mark.parametrize(
    ("attention", "sees_later", "has_window", "grows"),
    [
        ("padded (sdpa)", True, False, False),  # one value a token hides the padding
        ("padded (sdpa)", False, False, False),  # the padding is behind
        ("packed (varlen)", True, True, False),
        ("padded (sdpa)", True, True, True),
        ("padded (sdpa)", False, True, True),
        ("padded (eager)", True, False, True),
        ("openvino", True, False, True),
    ],
)
def test_only_kernels_that_hold_scores_or_masks_pay_for_squared_lengths(
    attention: str, sees_later: bool, has_window: bool, grows: bool
) -> None:
    shape = replace(SHAPE, sees_later=sees_later, has_window=has_window)
    footprint = make_footprint(shape, "fp32", attention)
    of_same_tokens = [footprint.predict_batch_bytes(8192 // length, length) for length in (256, 8192)]
    assert (of_same_tokens[1] > of_same_tokens[0]) == grows


amounts = st.integers(0, 5000)
moments = st.builds(Moment, st.integers(1, 5000), *[amounts] * 7)
footprints = st.builds(
    Footprint,
    st.just(0),
    st.lists(moments, min_size=1, max_size=3).map(tuple),
    fixed_bytes=amounts,
    block_tokens=st.integers(1, 100),
)


@given(footprints, st.integers(1, 600), st.integers(-1000, 1 << 30))
def test_the_largest_batch_fits_and_one_sequence_more_does_not(
    footprint: Footprint, length: int, free_bytes: int
) -> None:
    tokens = footprint.largest_batch_tokens(free_bytes, length)
    assert tokens % length == 0
    assert not tokens or footprint.predict_batch_bytes(tokens // length, length) <= free_bytes
    assert footprint.predict_batch_bytes(tokens // length + 1, length) > free_bytes


@given(footprints, st.integers(1, 600), st.integers(0, 1 << 24))
def test_the_longest_text_fits_alone_and_a_longer_one_does_not(
    footprint: Footprint, max_tokens: int, free_bytes: int
) -> None:
    longest = footprint.longest_text(free_bytes, max_tokens)
    assert not longest or footprint.predict_batch_bytes(1, longest) <= free_bytes
    assert longest == max_tokens or footprint.predict_batch_bytes(1, longest + 1) > free_bytes
