"""How a job ends on several streams, simulated with the worker's own pool and feed: they run dry together."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.batching.simulated_streams import simulate
from vectormill.jobs.chunks.chunk_size import choose_chunk_tokens
from worker.batching.feed import SMALLEST_LAST_SHARE, Feed
from worker.batching.limits import BatchLimits
from worker.batching.pool import SequencePool

# Of a short job: as many paragraphs, 30 to 256 tokens long, as have 126,000 tokens.
SHORT_TOKENS = 126_000
LONG_TOKENS = 1_260_000
BUDGET = 1024


def make_job(num_tokens: int, mean: float = 4.5, spread: float = 0.6) -> list[NDArray[np.int64]]:
    """Chunks as a submission cuts them, of lengths as those of paragraphs are; always the same."""
    random = np.random.default_rng(0)
    chunks: list[NDArray[np.int64]] = []
    taken = 0
    while taken < num_tokens:
        lengths = np.clip(random.lognormal(mean, spread, 4096), 8, 256).astype(np.int64)
        size = min(choose_chunk_tokens(taken), num_tokens - taken)
        chunks.append(lengths[: int(np.searchsorted(np.cumsum(lengths), size)) + 1])
        taken += int(chunks[-1].sum())
    return chunks


def never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Feed, "_share_of_last", lambda feed: math.inf)


@pytest.mark.parametrize(
    ("num_streams", "tokens", "gain", "reason"),
    [
        (2, SHORT_TOKENS, 1.0, "each has seventy batches: the last one is next to nothing"),
        (16, SHORT_TOKENS, 1.02, "each has nine"),
        (16, SHORT_TOKENS // 4, 1.08, "each has two"),
        (16, LONG_TOKENS, 1.0, "and nothing is lost where there are ninety"),
    ],
)
def test_the_last_batches_are_cut_so_that_streams_end_together(
    num_streams: int, tokens: int, gain: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tokens)
    cut = simulate(job, num_streams)
    never_cut(monkeypatch)
    whole = simulate(job, num_streams)
    assert cut.num_tokens == whole.num_tokens
    assert sum(count for count, _ in cut.shapes) == sum(len(lengths) for lengths in job)
    assert whole.seconds / cut.seconds >= gain * 0.999, reason
    # Of the time of a batch on one stream, what each of them stands still on the mean.
    assert cut.idle_seconds / num_streams < 0.5 * BUDGET / 4275, reason


def test_a_short_job_on_two_streams_is_nearly_as_fast_as_a_long_one() -> None:
    short, long = simulate(make_job(SHORT_TOKENS)), simulate(make_job(LONG_TOKENS))
    assert short.tokens_per_second >= 0.98 * long.tokens_per_second


def test_one_stream_is_cut_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(SHORT_TOKENS)
    cut = simulate(job, 1)
    never_cut(monkeypatch)
    assert simulate(job, 1).shapes == cut.shapes


@pytest.mark.parametrize(
    ("num_waiting", "num_tokenizing", "expected", "reason"),
    [
        (100, 0, 8, "there is a full batch for each of four streams"),
        (16, 0, 4, "each gets a quarter of what is left"),
        (6, 0, 2, "but nothing smaller than a quarter of a full one"),
        (16, 1, 8, "more will come in a moment"),
    ],
)
def test_the_rest_is_shared_out_when_nothing_more_is_on_its_way(
    num_waiting: int, num_tokenizing: int, expected: int, reason: str
) -> None:
    pool = SequencePool(BatchLimits(8 * 128))
    feed = Feed(pool)
    feed.num_started = feed.num_streams = 4
    feed.num_tokenizing = num_tokenizing
    pool.add(0, [128] * num_waiting)
    assert len(feed.take(0.0, is_runner_idle=True)) == expected, reason
    assert SMALLEST_LAST_SHARE == 1 / 4
