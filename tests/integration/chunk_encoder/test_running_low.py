"""When a worker asks the dispatcher for more: as each chunk leaves it, and for nothing else."""

from sqlalchemy import Engine

from tests.obedient_engine import encoding_chunks
from tests.protocol import dispatch_all, make_items, submit
from worker.app import is_low


def test_a_chunk_that_leaves_is_told_when_it_is_held_no_more(engine: Engine) -> None:
    submit(engine, make_items(8))
    held: list[int] = []
    with encoding_chunks(engine) as encoder:
        encoder._on_end = lambda: held.append(encoder._keeper.num_held_tokens)
        dispatches = dispatch_all(engine)
        for dispatch in [*dispatches, dispatches[0]]:  # the last message is a duplicate
            encoder.encode_chunk(dispatch.chunk_id)
    assert held == [0, 0]


def test_a_worker_is_low_before_it_is_idle() -> None:
    assert is_low(0, 1000)
    assert is_low(500, 1000)
    assert not is_low(501, 1000)
