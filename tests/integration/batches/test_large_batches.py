"""A batch of many lines passes through API and indexer in the memory of a few chunks: no part of its way holds it."""

import tracemalloc
from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine

from tests.api_server import api_client
from tests.large_batch import play

# 20 MB of requests, and 120 MB of answers.
NUM_LINES = 20_000
MOST_BYTES = 24 << 20


def measure_traced(act: Callable[[], Any]) -> tuple[Any, int]:
    """The answer, and the peak of what Python and NumPy have allocated meanwhile."""
    answer, peak = None, 0
    tracemalloc.start()
    try:
        answer = act()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return answer, peak


def test_a_file_of_many_lines_is_answered_in_the_memory_of_a_few_chunks(engine: Engine) -> None:
    with api_client(engine) as http:
        passages = play(engine, http, NUM_LINES, measure_traced)
    assert [passage.name for passage in passages] == ["upload", "validation", "finalizing", "download"]
    for passage in passages:
        assert passage.peak_bytes < MOST_BYTES, passage
