"""Partitions are made far enough ahead, and their size follows that of the chunks."""

import pytest

from vectormill.jobs.partitions import AHEAD, SPAN, STEP, ChunkSpan, plan_end


@pytest.mark.parametrize(
    ("spans", "last_id", "num_bytes", "end"),
    [
        ([ChunkSpan(0, SPAN)], 0, 1 << 20, 2 * SPAN),  # a new database has some pages for each partition
        ([ChunkSpan(0, (AHEAD + 1) * SPAN)], 1, 1 << 20, None),  # enough are ahead
        ([ChunkSpan(0, (AHEAD + 1) * SPAN)], SPAN, 1 << 20, (AHEAD + 2) * SPAN),
        ([ChunkSpan(0, 64 * SPAN)], 64 * SPAN, 1 << 30, 68 * SPAN),  # of many ids a span takes a sixteenth
        (
            [ChunkSpan(48 * SPAN, 64 * SPAN)],
            64 * SPAN,
            1 << 30,
            65 * SPAN,
        ),  # those that are gone do not count
        (
            [ChunkSpan(0, SPAN)],
            SPAN,
            SPAN << 17,
            SPAN + SPAN // 4,
        ),  # 128 KiB a chunk are 32,768 chunks of 4 GiB
        ([ChunkSpan(0, SPAN)], SPAN, SPAN << 30, SPAN + SPAN // 16 // STEP * STEP),
    ],
)
def test_spans_are_made_ahead_and_grow_with_the_number_of_chunks_and_shrink_with_their_size(
    spans: list[ChunkSpan], last_id: int, num_bytes: int, end: int | None
) -> None:
    assert plan_end(spans, last_id, num_bytes) == end


def test_there_are_few_spans_however_many_chunks_there_are() -> None:
    spans, last_id = [ChunkSpan(0, SPAN)], 10**10
    while (end := plan_end(spans, min(spans[-1].end, last_id), 1 << 30)) is not None:
        spans.append(ChunkSpan(spans[-1].end, end))
    assert len(spans) < 200
