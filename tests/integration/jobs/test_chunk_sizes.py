"""How a job's items are cut into chunks, whatever their lengths: all of them, in order, and no chunk too large."""

from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from tests.database import execute
from tests.protocol import SPEC, submit
from vectormill.jobs.chunk import TokenEstimate, choose_chunk_tokens, decode_payload
from vectormill.jobs.item import Item
from vectormill.jobs.job import NewJob
from vectormill.jobs.submission import JobWriter
from vectormill.settings import Settings

LIST_CHUNKS = text("""
    SELECT seq, first_item, num_items, estimated_tokens, items
      FROM vectormill.chunks JOIN vectormill.chunk_payloads ON chunk_id = chunks.id
     WHERE job_id = :job_id ORDER BY seq
""")

# Runs of texts of one length: as a corpus has them, and short to write down.
RUNS = st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 700)), min_size=1, max_size=6)
MAX_BYTES = 65_536


def write(engine: Engine, items: list[Item], **limits: Any) -> list[Any]:
    """The job's chunks, each with its items."""
    with JobWriter(engine, NewJob(SPEC), Settings(**limits)) as writer:
        for item in items:
            writer.add(item)
        job = writer.finish()
    return list(execute(engine, LIST_CHUNKS, job_id=job.id))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs=RUNS, max_items=st.sampled_from([1, 100, 2048]))
def test_every_item_is_in_one_chunk_in_its_order_and_no_chunk_is_larger_than_its_bounds(
    engine: Engine, runs: list[tuple[int, int]], max_items: int
) -> None:
    counted = [(count if max_items > 1 else count % 50 + 1, length) for count, length in runs]
    texts = [b"x" * length for count, length in counted for _ in range(count)]
    items = [Item(str(number), content) for number, content in enumerate(texts)]
    chunks = write(engine, items, chunk_max_items=max_items, chunk_max_bytes=MAX_BYTES)
    stored = [decode_payload(chunk.items) for chunk in chunks]
    assert [item for chunk in stored for item in chunk] == items
    estimate, num_before = TokenEstimate(SPEC), 0
    for number, (chunk, held) in enumerate(zip(chunks, stored, strict=True)):
        assert (chunk.seq, chunk.num_items) == (number, len(held))
        sizes = [estimate.of(item.text) for item in held]
        num_bytes = [len(item.text) + len(item.key) for item in held]
        assert chunk.estimated_tokens == sum(sizes)
        # The last item is the one that closed it.
        wanted = choose_chunk_tokens(num_before)
        assert sum(sizes[:-1]) < wanted
        assert len(held) <= max_items
        assert sum(num_bytes[:-1]) < MAX_BYTES
        is_last = chunk is chunks[-1]
        assert is_last or sum(sizes) >= wanted or len(held) == max_items or sum(num_bytes) >= MAX_BYTES
        num_before += sum(sizes)
    assert all(one.first_item + one.num_items == other.first_item for one, other in pairwise(chunks))


def test_a_job_of_some_hundred_texts_is_spread_over_several_workers(engine: Engine) -> None:
    job = submit(engine, [Item(str(number), b"x" * 240) for number in range(1200)], chunk_max_items=2048)
    sizes = [row.estimated_tokens for row in execute(engine, LIST_CHUNKS, job_id=job.id)]
    assert len(sizes) >= 3 * 4
    assert max(sizes) <= sum(sizes) / 8


def test_a_part_of_an_upload_has_as_many_texts_as_a_few_of_the_largest_chunks(engine: Engine) -> None:
    """Or a job of some thousand texts would be written in as many transactions as it has small chunks."""
    count = text("SELECT count(*) FROM vectormill.chunks")
    with JobWriter(engine, NewJob(SPEC), Settings()) as writer, engine.connect() as connection:
        for number in range(8000):
            writer.add(Item(str(number), b"x" * 40))
        assert connection.execute(count).scalar_one() == 0
        for number in range(8000, 40_000):
            writer.add(Item(str(number), b"x" * 40))
        assert connection.execute(count).scalar_one() > 0
