"""How batches turn out while chunks come and go as in a worker: little padding, full batches, nobody left behind."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from worker.batching.cost import BatchCost, LengthBuckets
from worker.batching.pool import BatchLimits, SequencePool

Draw = Callable[[random.Random], int]

# As many tokens as a worker keeps in flight: 200,000 to 300,000 of paragraphs.
SLOTS = 6
CHUNK_ITEMS = 512
BUDGET = 2048  # in 1,024 tokens there is room for one long text and nothing beside it
# A committed chunk is replaced by the next one while this many batches are encoded.
BATCHES_UNTIL_NEXT_CHUNK = 2


def paragraph(rng: random.Random) -> int:
    return min(256, max(3, int(rng.lognormvariate(4.0, 0.8))))


def query(rng: random.Random) -> int:
    return rng.randint(5, 12)


def long_document(rng: random.Random) -> int:
    return min(256, int(rng.gauss(250, 25)))


def longer_document(rng: random.Random) -> int:
    return 512 if rng.random() < 0.8 else rng.randint(256, 512)


def outlier(rng: random.Random) -> int:
    return rng.randint(256, 512) if rng.random() < 0.1 else max(3, int(rng.gauss(16, 4)))


def chinese(rng: random.Random) -> int:
    return min(256, max(4, int(rng.lognormvariate(4.6, 0.5))))


MIXES = [paragraph, query, long_document, longer_document, outlier, chinese]


@dataclass
class Run:
    """What was seen of one run, without its end, where fewer and fewer chunks are in flight."""

    num_tokens: int = 0
    num_computed: int = 0
    fills: list[float] = field(default_factory=list)  # of each batch, cost by budget
    ages: dict[int, int] = field(default_factory=dict)  # of each chunk, batches from its arrival to its end
    ended: list[int] = field(default_factory=list)

    @property
    def waste(self) -> float:
        return 1 - self.num_tokens / self.num_computed


def run_chunks(chunks: list[list[int]], budget: int, cost: BatchCost | None = None) -> Run:
    """Encodes chunks of these lengths, as many at a time as a worker has slots."""
    cost = cost or BatchCost(quadratic_length=2304)
    pool, run = SequencePool(BatchLimits(budget), cost), Run()
    left: dict[int, int] = {}
    arrived: dict[int, int] = {}
    due = [0] * SLOTS  # the batches after which a slot is free
    num_batches = 0
    while len(run.ages) < len(chunks):
        while due and due[0] <= num_batches and len(arrived) < len(chunks):
            number = len(arrived)
            pool.add(number, chunks[number])
            left[number], arrived[number] = len(chunks[number]), due.pop(0)
        batch = pool.take_batch()
        num_batches += 1
        if not len(batch):  # all chunks in flight have ended: the next ones are being claimed
            continue
        lengths = batch.lengths.tolist()
        if len(arrived) < len(chunks):
            places = zip(batch.requests.tolist(), batch.positions.tolist(), strict=True)
            run.num_tokens += sum(chunks[request][position] for request, position in places)
            run.num_computed += max(lengths) * len(batch) if cost.pads else sum(lengths)
            run.fills.append(
                cost.of_batch(len(batch), max(lengths), sum(map(cost.of_sequence, lengths))) / budget
            )
        for request in batch.requests.tolist():
            left[request] -= 1
            if not left[request]:
                run.ages[request] = num_batches - arrived[request]
                run.ended.append(request)
                due.append(num_batches + BATCHES_UNTIL_NEXT_CHUNK)
    return run


def draw_chunks(draw: Draw, num_chunks: int = 24, num_items: int = CHUNK_ITEMS) -> list[list[int]]:
    rng = random.Random(draw.__name__)
    return [[draw(rng) for _ in range(num_items)] for _ in range(num_chunks)]


def test_little_is_padding_whatever_the_texts_the_budget_and_the_chunks() -> None:
    exact, in_buckets = BatchCost(2304), BatchCost(2304, LengthBuckets(512))
    cases = [
        (CHUNK_ITEMS, BUDGET, exact),
        (CHUNK_ITEMS // 2, BUDGET, in_buckets),  # fewer to choose from
        (CHUNK_ITEMS, BUDGET // 4, exact),
        (CHUNK_ITEMS, 16 * BUDGET, in_buckets),  # a GPU, without a packed kernel
    ]
    for draw, (num_items, budget, cost) in itertools.product(MIXES, cases):
        chunks = draw_chunks(draw, num_chunks=14, num_items=num_items)
        assert run_chunks(chunks, budget, cost).waste <= 0.03, (draw.__name__, num_items, budget, cost)


def test_batches_are_full_and_no_chunk_is_left_behind() -> None:
    """No batch helps a younger chunk without the oldest, so that a chunk waits for those in flight when it came."""
    for draw in MIXES:
        chunks = draw_chunks(draw)
        run = run_chunks(chunks, BUDGET)
        fill = sum(run.fills) / len(run.fills)
        assert fill >= 0.85, draw.__name__
        batches_per_chunk = sum(map(sum, chunks)) / len(chunks) / BUDGET / fill
        assert max(run.ages.values()) <= 1.5 * SLOTS * batches_per_chunk + 2 * SLOTS, draw.__name__
        assert len(run.ended) == len(chunks)
        packed = run_chunks(chunks, 16 * BUDGET, BatchCost(quadratic_length=2304, pads=False))
        # 6 x 512 queries have 26,000 tokens, which fill not one batch.
        assert sum(packed.fills) / len(packed.fills) >= (0.6 if draw is query else 0.85), draw.__name__


def test_of_two_jobs_neither_starves_whatever_its_lengths() -> None:
    """The dispatcher hands out their chunks in turn. A chunk of queries ends with its elder, long documents or not."""
    rng = random.Random(0)
    chunks = [[(longer_document, query)[number % 2](rng) for _ in range(CHUNK_ITEMS)] for number in range(40)]
    run = run_chunks(chunks, BUDGET)
    batches_of_a_document_chunk = CHUNK_ITEMS * 512 / BUDGET
    for job in (0, 1):
        assert max(age for number, age in run.ages.items() if number % 2 == job) < (
            (SLOTS + 1) * batches_of_a_document_chunk
        )
    # Neither runs far ahead of the other: of any chunks that ended in a row, about as many are of each.
    for end in range(8, 33):
        assert 2 <= sum(number % 2 for number in run.ended[end - 8 : end]) <= 6
