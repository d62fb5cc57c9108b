"""What a worker counts of its chunks for those who watch it."""

from typing import Any, cast

import pytest

from vectormill.jobs.chunks.chunks import ClaimedChunk
from worker.chunk.ledger import ChunkLedger, Histogram


@pytest.mark.parametrize(
    ("value", "place"),
    [(0.0, 0), (0.5, 0), (0.51, 1), (2.0, 1), (2.1, 2)],  # a bound belongs to its bucket, as Prometheus says
)
def test_a_value_is_counted_in_the_bucket_of_the_first_bound_that_is_not_below_it(
    value: float, place: int
) -> None:
    histogram = Histogram((0.5, 2))
    histogram.add(value)
    told = histogram.describe()
    assert told["counts"] == [int(index == place) for index in range(3)]
    assert (told["bounds"], told["sum"]) == ([0.5, 2], value)


def test_only_what_was_committed_has_a_time_to_its_commit() -> None:
    ledger = ChunkLedger()
    ledger.note_end("lease lost", 7.0)
    ledger.note_end("done", 0.3)
    told = ledger.totals()
    assert told["chunk_outcomes"] == {"lease lost": 1, "done": 1, "split": 0}
    assert (sum(told["claim_to_commit_seconds"]["counts"]), told["claim_to_commit_seconds"]["sum"]) == (
        1,
        0.3,
    )


def test_a_first_dispatch_is_no_redispatch_and_a_late_message_has_no_lag() -> None:
    ledger = ChunkLedger()
    for num_dispatches, seconds in ((1, 0.2), (2, None)):
        ledger.note_claim(ClaimedChunk(cast(Any, None), None, num_dispatches, seconds))
    told = ledger.totals()
    assert told["num_redispatched_chunks"] == 1
    assert sum(told["dispatch_seconds"]["counts"]) == 1
