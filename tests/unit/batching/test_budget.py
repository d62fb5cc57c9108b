"""The size of batches: how it grows, is bounded, halved and grown back. On simulated devices."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.batching.budget import (
    LENGTH_CLASSES,
    LONG_BATCH_SECONDS,
    LONGEST_BATCH_SECONDS,
    UNPREDICTED,
    BudgetRules,
    TokenBudget,
    describe_length_class,
    find_length_class,
)

Device = Callable[[int], float]  # tokens in a batch -> seconds


def saturating(half_tokens: int, rate: float = 100_000.0) -> Device:
    """Fixed costs weigh as much as `half_tokens`: with so many, half of the rate is reached."""
    return lambda tokens: (tokens + half_tokens) / rate


FAST = saturating(2000, rate=1_000_000)


def observe(budget: TokenBudget, length: int, tokens: int, seconds: float, num_streams: int = 1) -> None:
    """A batch of sequences of one length, which cost as much as they have tokens."""
    budget.observe(
        length, num_tokens=tokens, cost=tokens, one_more=length, seconds=seconds, num_streams=num_streams
    )


def run(budget: TokenBudget, device: Device, *, length: int = 32, batches: int = 1000) -> list[int]:
    """Full batches, two of them on their way at a time, as the executor sends them. Their sizes."""
    sizes: list[int] = []
    on_their_way = [budget.max_batch_tokens(length)]
    for _ in range(batches):
        on_their_way.append(budget.max_batch_tokens(length))
        tokens = on_their_way.pop(0) // length * length
        sizes.append(tokens)
        observe(budget, length, tokens, device(tokens))
    return sizes


def make_budget(start_tokens: int = 2048, **rules: object) -> TokenBudget:
    return TokenBudget(BudgetRules(start_tokens, **rules))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "size"),
    [
        (saturating(9, rate=7_000), 1024),  # MiniLM on two cores takes 0.15 s
        (saturating(13_000, rate=2.6e6), 262_144),  # BERT-base on an H100, at 95 % of its best rate
        (saturating(48_000, rate=12e6), 1 << 20),
    ],
)
def test_the_budget_grows_until_a_batch_takes_a_tenth_of_a_second(device: Device, size: int) -> None:
    sizes = run(make_budget(1024), device)
    assert sizes[-1] == size // 32 * 32
    assert len(set(sizes[-800:])) == 1, "it has come to rest"
    assert size == 1 << 20 or device(size) > LONG_BATCH_SECONDS * 0.9


@given(st.floats(500, 1e6), st.sampled_from([1024, 8192, 1 << 20]))
def test_batches_take_no_longer_than_a_second_unless_a_device_needs_their_tokens(
    rate: float, least_tokens: int
) -> None:
    sizes = run(make_budget(32_768, least_tokens=least_tokens), saturating(100, rate), batches=100)
    assert saturating(100, rate)(sizes[-1]) <= LONGEST_BATCH_SECONDS or sizes[-1] <= least_tokens
    longest = saturating(100, rate)(32_768)
    assert sizes[-1] >= 32_768 or (longest > LONGEST_BATCH_SECONDS and sizes[-1] >= least_tokens)


@settings(max_examples=300, deadline=None)
@given(
    fixed=st.floats(0.001, 30),
    rate=st.floats(math.log(200), math.log(1e6)).map(math.exp),
    is_hidden=st.booleans(),
    start_tokens=st.sampled_from([512, 1024, 2048, 8192, 32_768]),
    least_tokens=st.sampled_from([1024, 8192]),
    longest_seconds=st.sampled_from([3.3, 10.0, math.inf]),
    length=st.sampled_from([4, 250, 1000, 4000]),
)
def test_the_budget_comes_to_rest_where_another_size_would_not_be_better(
    fixed: float,
    rate: float,
    is_hidden: bool,
    start_tokens: int,
    least_tokens: int,
    longest_seconds: float,
    length: int,
) -> None:
    """Layers are copied or gathered for each batch, beside what is computed or before it."""

    def take_seconds(tokens: float) -> float:
        return max(fixed, tokens / rate) if is_hidden else fixed + tokens / rate

    budget = make_budget(start_tokens, least_tokens=least_tokens)
    budget.longest_seconds = longest_seconds
    size = run(budget, take_seconds, length=length, batches=300)[-1]
    assert set(run(budget, take_seconds, length=length, batches=60)) == {size}
    seconds, of_half, of_double = (take_seconds(each) for each in (size, size / 2, 2 * size))
    rounding = 1 + length / size
    if seconds > longest_seconds and size >= 512 and size > length:
        assert of_half * rounding > longest_seconds, "queries would be answered in time"
        assert seconds <= 1.56 * rounding * of_half, "they would be answered sooner"
    if seconds > LONGEST_BATCH_SECONDS and size > least_tokens:
        assert seconds <= 1.56 * rounding * of_half or size <= length
    can_grow = 2 * size < 1 << 20 and (of_double * rounding < longest_seconds or seconds > longest_seconds)
    if can_grow and seconds > LONGEST_BATCH_SECONDS:
        assert of_double * rounding >= 1.25 * seconds, "twice as many texts would take hardly longer"
    if 2 * seconds * rounding < longest_seconds:
        assert 2 * size > least_tokens


def test_noise_moves_the_size_by_one_doubling_at_most() -> None:
    calm = run(make_budget(), FAST, batches=300)[-1]
    for seed in range(20):
        noise = random.Random(seed)

        def take_seconds(tokens: int, noise: random.Random = noise) -> float:
            return FAST(tokens) * noise.lognormvariate(0, 0.05)

        assert run(make_budget(), take_seconds, batches=300)[-1] in (calm, 2 * calm)


def test_of_several_streams_the_time_of_a_batch_counts_and_not_its_share_of_the_device() -> None:
    budget = make_budget(1024)
    for _ in range(100):
        observe(budget, 32, 1024, 0.004, num_streams=61)
    assert budget.max_batch_tokens(32) == 1024
    assert budget.describe()["up to 64"]["state"] == "tuned"


def test_batches_that_are_not_full_say_nothing() -> None:
    budget = make_budget()
    for _ in range(100):
        observe(budget, 32, 1024, 1e-6)
    assert budget.max_batch_tokens(32) == 2048
    assert budget.describe()["up to 64"]["state"] == "tuning"


def test_length_classes_are_tuned_apart() -> None:
    budget = make_budget()
    run(budget, FAST, length=32)
    run(budget, saturating(0, rate=10_000), length=200)
    assert budget.max_batch_tokens(64) > 16384
    assert budget.max_batch_tokens(256) == 2048
    assert budget.max_batch_tokens(300) == 2048  # nobody has sent any of these
    assert [find_length_class(length) for length in (1, 64, 65, 1024, 8192)] == [
        64,
        64,
        256,
        1024,
        LENGTH_CLASSES[-1],
    ]


def test_a_size_that_the_user_gave_is_not_tuned_and_never_exceeded() -> None:
    budget = make_budget(4096, is_tuned=False)
    assert set(run(budget, FAST)) == {4096}
    budget.observe_out_of_memory(32, 4096)
    assert max(run(budget, FAST, batches=10)) == 2048
    assert max(run(budget, FAST, batches=1000)) == 4096
    assert budget.describe()["up to 64"]["state"] == "fixed"
    assert not budget.observe_memory(0.99), "others' use of the memory is no reason to shrink what was given"
    assert budget.max_batch_tokens(32) == 4096


def test_no_batch_is_larger_than_the_free_memory_holds() -> None:
    budget = make_budget(32768)
    budget.largest_batch_tokens = lambda length: 3000
    assert max(run(budget, FAST)) <= 3000
    assert budget.max_batch_tokens(7000) == 7000, "one sequence may always be tried"


def test_out_of_memory_halves_the_budget_and_it_grows_back_a_step_at_a_time() -> None:
    budget = make_budget(4096, is_tuned=False)
    budget.observe_out_of_memory(32, 4096)
    budget.observe_out_of_memory(32, 4096)  # the second one that was on its way
    assert budget.max_batch_tokens(32) == 2048
    assert budget.max_batch_tokens(100) == 4096, "another length class"
    sizes = run(budget, saturating(100), batches=70)
    assert sizes[:60] == [2048] * 60
    assert sizes[-1] == 3072
    budget.observe_out_of_memory(32, 3072)
    sizes = run(budget, saturating(100), batches=130)
    assert set(sizes[:126]) == {1536}, "after a relapse it waits twice as long"


def test_what_is_not_predicted_grows_up_to_the_low_watermark_and_everything_shrinks_above_the_high_one() -> (
    None
):
    budget = make_budget()
    budget.observe_memory(0.6)
    assert max(run(budget, FAST)) == 2048
    budget.observe_memory(0.3)
    assert max(run(budget, FAST)) > 8192
    before = budget.max_batch_tokens(32)
    assert budget.observe_memory(0.9)
    assert budget.max_batch_tokens(32) == before // 2
    assert not budget.observe_memory(0.9), "the batches on their way are still of the old size"
    for _ in range(200):
        budget.observe_memory(0.9)
    assert budget.max_batch_tokens(32) >= 256
    assert budget.num_shrunk > 3
    held = run(budget, FAST, batches=100)
    assert held[-1] == held[0], "it does not grow while memory is short"
    budget.observe_memory(0.3)
    assert run(budget, FAST, batches=800)[-1] > held[-1]


def slow(tokens: int) -> float:
    """So slow that nothing grows but what was lowered."""
    return 1.0


def describe_class(budget: TokenBudget, length: int) -> dict[str, Any]:
    return budget.describe()[describe_length_class(find_length_class(length))]


EXHAUSTIONS = st.tuples(st.just("exhausted"), st.integers(2, 1 << 14))
REPORTS = st.tuples(st.just("memory"), st.integers(0, 100))
RUNS = st.tuples(st.just("encoded"), st.integers(1, 300))


@settings(max_examples=60, deadline=None)
@given(
    history=st.lists(EXHAUSTIONS | REPORTS | RUNS, max_size=10),
    is_tuned=st.booleans(),
    used_percent=st.integers(0, 80),
    bound=st.sampled_from([UNPREDICTED, 1 << 12]),
    length=st.sampled_from([4, 200, 2000]),
)
def test_whatever_a_budget_went_through_good_batches_give_it_back_while_memory_is_below_the_high_watermark(
    history: list[tuple[str, int]], is_tuned: bool, used_percent: int, bound: int, length: int
) -> None:
    budget = make_budget(2048, is_tuned=is_tuned)
    budget.largest_batch_tokens = lambda _: bound
    num_exhausted = 0
    for event, number in history:
        before = budget.max_batch_tokens(length)
        if event == "exhausted":
            num_exhausted += 1
            budget.observe_out_of_memory(length, number)
            assert budget.max_batch_tokens(length) <= max(length, min(before, number // 2))
        elif event == "memory":
            is_short = is_tuned and number > 80
            is_shrunk = budget.observe_memory(number / 100)
            assert is_short or not is_shrunk
            assert budget.max_batch_tokens(length) <= before
        else:
            most = max(run(budget, slow, length=length, batches=number))
            assert most <= max(length, min(2048, bound))
    budget.observe_memory(used_percent / 100)
    ceiling = describe_class(budget, length)["ceiling_tokens"] or 4096
    # Each step adds a half, and at least 1, and needs 64 good batches, or twice as many after each relapse.
    num_steps = 4 + max(0, math.ceil(math.log(4096 / ceiling, 1.5)))
    patience = 64 << min(num_exhausted, 6)
    run(budget, slow, length=length, batches=num_steps * patience + 2)
    assert describe_class(budget, length)["ceiling_tokens"] is None
    assert budget.max_batch_tokens(length) == max(length, min(2048, bound))


@pytest.mark.parametrize(
    ("used_share", "bound", "size"),
    [
        (0.6, 20_000, 16_384),  # a 7B model in bf16 on 24 GiB: the bound tells what the rest holds
        (0.6, UNPREDICTED, 2048),
        (0.5, UNPREDICTED, 1 << 17),
        (0.85, 20_000, 1024),  # above the high watermark
    ],
)
def test_a_budget_grows_above_half_of_the_memory_as_far_as_the_free_memory_is_known_to_hold_it(
    used_share: float, bound: int, size: int
) -> None:
    budget = make_budget(2048)
    budget.largest_batch_tokens = lambda length: bound
    budget.observe_memory(used_share)
    assert run(budget, FAST, batches=300)[-1] == size


def test_another_encoder_begins_where_the_first_one_did() -> None:
    budget = make_budget()
    run(budget, FAST)
    budget.observe_out_of_memory(100, 2048)
    budget.begin()
    assert {budget.max_batch_tokens(length) for length in (32, 100)} == {2048}
