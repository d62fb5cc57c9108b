"""What both costs of a batch promise to the pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.batching.cost import BatchCost, find_quadratic_length

QUADRATIC_LENGTH = 1000.0
COSTS: list[BatchCost] = [BatchCost(QUADRATIC_LENGTH), BatchCost(QUADRATIC_LENGTH, pads=False)]
LENGTHS = st.lists(st.integers(1, 10_000), min_size=1, max_size=20)


def cost_of(cost: BatchCost, lengths: list[int]) -> float:
    return cost.of_batch(len(lengths), max(lengths), sum(map(cost.of_sequence, lengths)))


@pytest.mark.parametrize("cost", COSTS, ids=type)
@given(lengths=LENGTHS)
def test_a_batch_costs_at_least_what_its_sequences_cost_and_they_cost_at_least_their_tokens(
    cost: BatchCost, lengths: list[int]
) -> None:
    alone = sum(map(cost.of_sequence, lengths))
    assert cost_of(cost, lengths) >= alone * (1 - 1e-9)
    assert alone >= sum(lengths)


@pytest.mark.parametrize("cost", COSTS, ids=type)
@given(lengths=LENGTHS, another=st.integers(1, 10_000))
def test_a_batch_that_grows_costs_more(cost: BatchCost, lengths: list[int], another: int) -> None:
    assert cost_of(cost, [*lengths, another]) > cost_of(cost, lengths)


@pytest.mark.parametrize("cost", COSTS, ids=type)
def test_sequences_of_one_length_cost_the_same_with_and_without_padding(cost: BatchCost) -> None:
    assert cost_of(cost, [100] * 7) == pytest.approx(770)


@pytest.mark.parametrize("cost", COSTS, ids=type)
def test_at_the_quadratic_length_a_token_costs_twice_as_much(cost: BatchCost) -> None:
    assert cost.of_sequence(1000) == 2000
    assert cost.of_sequence(1) == pytest.approx(1, rel=0.01)


def test_only_the_kernel_that_pads_computes_the_longest_for_all() -> None:
    assert cost_of(BatchCost(), [10, 90]) == 180
    assert cost_of(BatchCost(pads=False), [10, 90]) == 100
    assert [cost.pads for cost in COSTS] == [True, False]


@pytest.mark.parametrize(
    ("sizes", "is_gated", "expected"),
    [
        ((384, 384, 384, 1536), False, 2304),  # MiniLM-L6
        ((768, 768, 768, 3072), False, 4608),  # BERT-base
        # Qwen3-Embedding-0.6B: wider heads, and two queries share a key.
        ((1024, 2048, 1024, 3072), True, 3840),
    ],
)
def test_the_quadratic_length_is_where_attention_takes_as_much_as_the_linear_layers(
    sizes: tuple[int, int, int, int], is_gated: bool, expected: float
) -> None:
    assert find_quadratic_length(*sizes, is_gated=is_gated) == expected


def test_scores_of_positions_are_twice_as_much_arithmetic_as_attention_without_them() -> None:
    of_deberta_base = find_quadratic_length(768, 768, 768, 3072, is_gated=False, has_relative_scores=True)
    assert of_deberta_base == 4608 / 3


def test_padding_is_counted_in_squares_where_these_are_held() -> None:
    assert [BatchCost().weigh(12), BatchCost(pads=False).weigh(12)] == [12, 12]
    assert BatchCost(holds_squares=True).weigh(12) == 144
