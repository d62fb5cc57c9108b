"""The size of batches: how it is tuned, bounded, halved and grown back. On simulated devices, whose knee is known."""

import random
from collections.abc import Callable

import pytest

from worker.batching.budget import LENGTH_CLASSES, BudgetRules, EncodedBatch, TokenBudget, find_length_class
from worker.batching.climb import Climb, choose_pair, choose_size
from worker.batching.comparison import FEWEST_PAIRS, MOST_PAIRS, is_decided

Device = Callable[[int], float]  # tokens in a batch -> seconds


def saturating(half_tokens: int, rate: float = 100_000.0) -> Device:
    """Fixed costs weigh as much as `half_tokens`: with so many, half of the rate is reached."""
    return lambda tokens: (tokens + half_tokens) / rate


def falling(cache_tokens: int) -> Device:
    """What does not fit into a cache takes one and a half times as long."""
    return lambda tokens: (tokens + 200) / 100_000 * (1.5 if tokens > cache_tokens else 1.0)


def observe(budget: TokenBudget, length: int, tokens: int, seconds: float) -> None:
    """A batch of sequences of one length, which cost as much as they have tokens."""
    budget.observe(EncodedBatch(length, tokens, tokens, tokens, one_more=length, seconds=seconds))


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


def rate(device: Device, tokens: int) -> float:
    return tokens / device(tokens)


@pytest.mark.parametrize(
    ("device", "smallest", "largest"),
    [
        (saturating(10), 256, 512),  # nothing is gained by size: the smallest is as fast as any
        (saturating(100), 2048, 4096),  # 2048 reaches 95 %, 4096 97.6 %, 8192 98.8 %
        (saturating(2000), 32768, 131072),
        (falling(3000), 2048, 2048),  # 4096 would be slower than 2048 and 1024 is 8 % behind
        (falling(1500), 1024, 1024),
    ],
)
def test_the_budget_climbs_to_the_knee_and_takes_the_smallest_that_is_as_good(
    device: Device, smallest: int, largest: int
) -> None:
    budget = make_budget()
    sizes = run(budget, device)
    assert smallest <= sizes[-1] <= largest
    assert len(set(sizes[-200:])) == 1, "it has come to rest"
    best = max(rate(device, 1 << step) for step in range(8, 18))
    assert rate(device, sizes[-1]) >= 0.95 * best


@pytest.mark.parametrize("seed", range(20))
def test_noise_neither_moves_the_budget_for_ever_nor_far_from_the_knee(seed: int) -> None:
    random_numbers = random.Random(seed)
    clean = saturating(400)

    def noisy(tokens: int) -> float:
        return clean(tokens) * random_numbers.lognormvariate(0, 0.05)

    sizes = run(make_budget(), noisy, batches=2000)
    assert len(set(sizes[-300:])) == 1
    assert rate(clean, sizes[-1]) >= 0.83 * rate(clean, 1 << 17)


def test_a_machine_that_grows_slower_meanwhile_does_not_change_the_outcome() -> None:
    clean = saturating(2000)
    num_batches = 0

    def slowing(tokens: int) -> float:
        nonlocal num_batches
        num_batches += 1
        return clean(tokens) * (1 + num_batches / 2000)

    assert run(make_budget(), slowing)[-1] == run(make_budget(), clean)[-1]


def test_a_batch_that_takes_half_a_second_is_not_made_larger() -> None:
    slow = saturating(
        2000, rate=2048 / 0.4
    )  # at 2048 tokens 0.8 s, and larger ones would still be 30 % faster
    sizes = run(make_budget(), slow)
    assert max(sizes) <= 2048 * 2
    assert sizes.count(4096) <= 4, "nor is the comparison carried to its end"


def test_batches_that_are_not_full_say_nothing() -> None:
    budget = make_budget()
    for _ in range(100):
        observe(budget, 32, 1024, 1e-6)
    assert budget.max_batch_tokens(32) == 2048
    assert not budget.is_changed


def test_a_size_that_texts_of_many_lengths_cannot_fill_is_not_asked_for_for_ever() -> None:
    budget = make_budget()
    for _ in range(300):
        most = budget.max_batch_tokens(32)
        tokens = min(most // 32 * 32, 3008)  # beyond it there would be too much padding
        observe(budget, 32, tokens, saturating(2000)(tokens))
    assert budget.describe()["up to 64"]["state"] == "tuned"
    assert budget.max_batch_tokens(32) == 2048


def test_texts_so_long_that_two_sizes_hold_equally_many_say_nothing_of_shorter_ones() -> None:
    """A chunk's longest texts come first: they must not decide for the others of their class."""
    budget = make_budget(512)
    device = saturating(100)
    for round_number in range(40):
        # Attention counted, a text of 250 tokens costs more than 256: both sizes hold one.
        for length, cost in [*[(250, 277)] * 60, *[(100, 104)] * 60]:
            num_sequences = max(budget.max_batch_tokens(length) // cost, 1)
            total = num_sequences * cost
            observed = EncodedBatch(
                length, num_sequences * length, total, total, one_more=cost, seconds=device(total)
            )
            budget.observe(observed)
        if round_number == 0:
            assert budget.describe()["up to 256"]["state"] == "tuning"
    assert budget.describe()["up to 256"]["state"] == "tuned"
    assert (
        budget.max_batch_tokens(100) >= 1024
    )  # two texts of 100 reach 68 % of the rate, four 81 %, nine 90 %


def test_length_classes_are_tuned_apart() -> None:
    budget = make_budget()
    run(budget, saturating(2000), length=32)
    run(budget, falling(1500), length=200)
    assert budget.max_batch_tokens(64) > 16384
    assert budget.max_batch_tokens(256) == 1024
    assert budget.max_batch_tokens(300) == 2048  # nobody has sent any of these
    assert [find_length_class(length) for length in (1, 64, 65, 1024, 8192)] == [
        64,
        64,
        256,
        1024,
        LENGTH_CLASSES[-1],
    ]


def test_sequences_so_long_that_every_size_holds_one_leave_the_climb_where_it_is() -> None:
    budget = make_budget()
    sizes = run(budget, saturating(100), length=5000, batches=100)
    assert set(sizes) == {5000}
    assert budget.describe()["above 1024"]["state"] == "tuned"


def test_a_size_that_the_user_gave_is_not_tuned_and_never_exceeded() -> None:
    budget = make_budget(4096, is_tuned=False)
    assert set(run(budget, saturating(2000))) == {4096}
    budget.observe_out_of_memory(32, 4096)
    assert max(run(budget, saturating(2000), batches=10)) == 2048
    assert max(run(budget, saturating(2000), batches=1000)) == 4096
    assert budget.describe()["up to 64"]["state"] == "fixed"


def test_a_size_that_the_user_gave_is_not_shrunk_because_others_use_the_memory() -> None:
    budget = make_budget(4096, is_tuned=False)
    assert not budget.observe_memory(0.99)
    assert budget.max_batch_tokens(32) == 4096
    budget.observe_out_of_memory(32, 4096)
    assert budget.max_batch_tokens(32) == 2048, "what did not fit is halved all the same"


def test_no_batch_is_larger_than_the_free_memory_holds() -> None:
    budget = make_budget(32768)
    budget.largest_batch_tokens = lambda length: 3000
    assert max(run(budget, saturating(5000))) <= 3000
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


def test_out_of_memory_while_climbing_ends_the_climb_below_it() -> None:
    budget = make_budget()
    device = saturating(2000)
    for _ in range(600):
        tokens = budget.max_batch_tokens(32)
        if tokens > 9000:
            budget.observe_out_of_memory(32, tokens)
        else:
            observe(budget, 32, tokens // 32 * 32, device(tokens))
    assert 4096 <= budget.max_batch_tokens(32) <= 16384
    assert budget.describe()["up to 64"]["num_out_of_memory"] <= 3


def test_nothing_grows_above_the_low_watermark_and_everything_shrinks_above_the_high_one() -> None:
    budget = make_budget()
    budget.observe_memory(0.6)
    assert max(run(budget, saturating(2000))) == 2048
    budget.observe_memory(0.3)
    assert max(run(budget, saturating(2000))) > 8192
    before = budget.max_batch_tokens(32)
    assert budget.observe_memory(0.9)
    assert budget.max_batch_tokens(32) == before // 2
    assert not budget.observe_memory(0.9), "the batches on their way are still of the old size"
    for _ in range(200):
        budget.observe_memory(0.9)
    assert budget.max_batch_tokens(32) >= 256
    assert budget.num_shrunk > 3
    held = run(budget, saturating(2000), batches=100)
    assert held[-1] == held[0], "it does not grow while memory is short"
    budget.observe_memory(0.3)
    assert run(budget, saturating(2000), batches=800)[-1] > held[-1]


def test_what_was_learned_is_where_the_next_budget_begins() -> None:
    first = make_budget()
    end = run(first, saturating(2000))[-1]
    assert first.is_changed
    second = make_budget()
    second.recall(first.learn())
    assert set(run(second, saturating(2000))) == {end}
    assert second.describe()["up to 64"]["state"] == "tuned"


@pytest.mark.parametrize(
    ("then", "now", "is_measured_again"),
    [
        (
            saturating(100, rate=10_000),
            saturating(2000, rate=100_000),
            True,
        ),  # it was busy when it was measured
        (saturating(2000, rate=100_000), saturating(100, rate=10_000), True),  # it is busy now
        (saturating(2000), saturating(2000, rate=70_000), False),
    ],
)
def test_what_was_learned_is_measured_again_on_a_machine_that_has_become_another(
    then: Device, now: Device, is_measured_again: bool
) -> None:
    first = make_budget()
    run(first, then)
    second = make_budget()
    second.recall(first.learn())
    fresh = run(make_budget(), now)[-1]
    sizes = run(second, now)
    assert (sizes[-1] == fresh != sizes[0]) is is_measured_again
    assert (len(set(sizes)) > 1) is is_measured_again


def test_a_ceiling_from_out_of_memory_is_learned_and_one_from_a_watermark_is_not() -> None:
    first = make_budget()
    first.observe_out_of_memory(32, 2048)
    first.observe_memory(0.95)
    second = make_budget()
    second.recall(first.learn())
    assert second.max_batch_tokens(32) <= 1024
    assert second.max_batch_tokens(100) == 2048


@pytest.mark.parametrize(
    ("rates", "pair"),
    [
        ({2048: 1.0}, (2048, 1024)),  # nothing is known: down first
        ({2048: 1.0, 1024: 0.9}, (2048, 4096)),
        ({2048: 1.0, 1024: 0.9, 4096: 1.05}, (4096, 8192)),
        ({2048: 1.0, 1024: 0.9, 4096: 1.01}, None),  # a gain too small to go on
        ({2048: 1.0, 1024: 0.99}, (1024, 512)),  # so small already that more cannot bring much
        ({2048: 1.0, 1024: 1.1}, (1024, 512)),
        ({2048: 1.0, 1024: 0.99, 512: 0.9}, None),
        ({2048: 1.0, 1024: 0.8, 4096: 1.2, 8192: 1.19}, None),
        ({8192: 1.0, 4096: 0.9}, None),  # 16384 is above the limit
        ({256: 1.0}, (256, 512)),  # 128 is below it
        ({32768: 1.0}, None),  # nothing that is known may be used
    ],
)
def test_which_sizes_are_compared_next(rates: dict[int, float], pair: tuple[int, int] | None) -> None:
    assert choose_pair(rates, {}, smallest=256, largest=8192) == pair
    assert choose_size(rates) in rates


def scattered(middle: float, scatter: float, num_pairs: int) -> list[float]:
    numbers = random.Random(3)
    return [numbers.gauss(middle, scatter) for _ in range(num_pairs)]


@pytest.mark.parametrize(
    ("ratios", "is_enough"),
    [
        ([0.9] * (FEWEST_PAIRS - 1), False),
        ([0.9] * FEWEST_PAIRS, True),
        ([0.9] * (FEWEST_PAIRS - 1) + [3.0], True),  # one batch that something else slowed
        ([1.0] * FEWEST_PAIRS, True),
        (scattered(0.99, 0.04, FEWEST_PAIRS), False),  # within the loss that is tolerated, or beyond it
        (scattered(0.99, 0.04, MOST_PAIRS), True),  # for ever is too long
        (scattered(0.93, 0.04, FEWEST_PAIRS), True),
    ],
)
def test_two_sizes_are_compared_until_it_is_clear_which_is_to_be_taken(
    ratios: list[float], is_enough: bool
) -> None:
    assert is_decided(ratios) is is_enough


def test_a_size_that_is_faster_by_little_more_than_the_noise_is_nearly_always_found() -> None:
    rates = {256: 0.94, 512: 0.965}  # all larger ones are alike; so it was found on two cores with AVX2

    def find_size(numbers: random.Random) -> int:
        def device(tokens: int) -> float:
            return tokens / 7000 / rates.get(tokens, 1.0) * numbers.gauss(1, 0.03)

        return run(make_budget(1024), device, batches=1000)[-1]

    assert sum(find_size(random.Random(seed)) >= 1024 for seed in range(40)) >= 38


def test_rates_that_another_thread_reads_for_the_report_never_change() -> None:
    climb = Climb(start=1024, smallest=256, largest=4096)
    reading = iter(climb.rates.items())
    for _ in range(FEWEST_PAIRS):
        climb.observe([1024], 1024, 0.01)
        climb.observe([512], 512, 0.01)
    assert list(climb.rates) == [1024, 512]
    assert list(reading) == [(1024, 1.0)]
