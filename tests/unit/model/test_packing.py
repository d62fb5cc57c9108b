"""A batch as one row of tokens: bounds, positions, and what each token of a window sees."""

import numpy as np
import pytest

from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.choice import AttentionShape
from worker.encoder.padding import pad_batch
from worker.model.packed import pack_batch

BATCH = Batch.from_ids(
    [np.array([7, 8, 9], np.int32), np.array([1], np.int32), np.array([5, 1, 6], np.int32)], [2, 0, 1]
)


def test_a_packed_batch_has_bounds_and_no_padding() -> None:
    packed = pack_batch(BATCH, AttentionShape("bert", 8, 1))
    assert packed.input_ids.tolist() == [7, 8, 9, 1, 5, 1, 6]
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 7]
    assert packed.prompt_lengths is not None
    assert (packed.prompt_lengths.tolist(), packed.max_seqlen) == ([2, 0, 1], 3)


@pytest.mark.parametrize(
    ("model_type", "padding_id", "expected"),
    [
        ("bert", 1, [0, 1, 2, 0, 0, 1, 2]),
        ("qwen3", 0, [0, 1, 2, 0, 0, 1, 2]),
        # From the padding id + 1; a padding token in the text itself stands at the padding id and is not counted.
        ("roberta", 1, [2, 3, 4, 1, 2, 1, 3]),
        ("xlm-roberta", 0, [1, 2, 3, 1, 1, 2, 3]),
    ],
)
def test_positions_begin_again_with_every_sequence(
    model_type: str, padding_id: int, expected: list[int]
) -> None:
    assert pack_batch(BATCH, AttentionShape(model_type, 8, padding_id)).position_ids.tolist() == expected


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ((-1, 0), ["1000", "1100", "1110", "1111"]),  # causal
        ((1, 0), ["1000", "1100", "0110", "0011"]),  # causal, itself and one before
        ((1, 1), ["1100", "1110", "0111", "0011"]),  # one either way
        ((-1, 1), ["1100", "1110", "1111", "1111"]),
    ],
)
def test_a_window_is_inclusive_on_both_sides(window: tuple[int, int], expected: list[str]) -> None:
    import torch

    from worker.model.packed import make_window_mask

    mask = make_window_mask(4, window, torch.device("cpu"))
    assert mask is not None
    assert ["".join(str(int(seen)) for seen in row) for row in mask] == expected


def test_inputs_travel_as_one_array_and_arrive_as_they_were() -> None:
    from worker.model.cuda_pass import join_inputs, split_inputs

    inputs = [np.arange(6).reshape(2, 3), np.arange(4), np.array([[7]])]
    joined = join_inputs(inputs, pin_memory=False)
    assert joined.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 7]
    parts = split_inputs(joined, [array.shape for array in inputs])
    assert all(np.array_equal(part.numpy(), array) for part, array in zip(parts, inputs, strict=True))


PAIRS = Batch(
    {
        "input_ids": Ragged.from_rows([np.array([7, 8, 9]), np.array([5])], np.int32),
        "token_type_ids": Ragged.from_rows([np.array([0, 1, 1]), np.array([1])], np.int8),
    }
)


def test_every_input_with_a_value_a_token_is_packed_and_padded_alike() -> None:
    packed, padded = pack_batch(PAIRS, AttentionShape("bert", 8, 1)), pad_batch(PAIRS, pad_token_id=3)
    assert {name: values.tolist() for name, values in packed.tokens.items()} == {
        "input_ids": [7, 8, 9, 5],
        "token_type_ids": [0, 1, 1, 1],
    }
    assert {name: values.tolist() for name, values in padded.tokens.items()} == {
        "input_ids": [[7, 8, 9], [5, 3, 3]],
        "token_type_ids": [[0, 1, 1], [1, 0, 0]],
    }


def test_a_part_and_a_choice_of_a_batch_keep_all_its_inputs() -> None:
    part, chosen = PAIRS.part(1, 2), PAIRS.take(np.array([1, 0]))
    assert [rows.covered.tolist() for rows in part.inputs.values()] == [[5], [1]]
    assert [rows.covered.tolist() for rows in chosen.inputs.values()] == [[5, 7, 8, 9], [1, 0, 1, 1]]
