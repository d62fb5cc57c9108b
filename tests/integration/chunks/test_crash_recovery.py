"""A worker's process that ends: which of its chunks are to blame, which are suspect, and which are only returned."""

import signal
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, text

from tests.database import ask, execute
from tests.protocol import claim, dispatch_all, make_items, submit
from vectormill.jobs.chunk import Claim
from vectormill.jobs.chunks import mark_alone
from vectormill.jobs.jobs import lock_job
from worker.identity import EndedWorker, release_chunks_of

DEAD, LIVE = uuid4(), uuid4()


def hold(engine: Engine, incarnation: UUID, count: int) -> list[Claim]:
    """So many chunks of one item that the worker of this incarnation holds."""
    submit(engine, make_items(count), chunk_max_items=1)
    claims = [
        claim(engine, dispatch.chunk_id, f"model-cpu0@host#{incarnation.hex[:8]}")
        for dispatch in dispatch_all(engine)
    ]
    return [claimed for claimed in claims if claimed is not None]


def counts(engine: Engine) -> list[tuple[str, int, int, int]]:
    with engine.connect() as connection:
        rows = connection.execute(
            text("SELECT state, attempt, lost, lapsed FROM vectormill.chunks ORDER BY id")
        )
        return [tuple(row) for row in rows]


def end(engine: Engine, number: signal.Signals) -> None:
    release_chunks_of([EndedWorker.parse(str(EndedWorker(DEAD, -number)))], engine)


@pytest.mark.parametrize(
    "number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE]
)
def test_chunks_that_were_together_when_a_process_failed_are_suspect_and_return_at_once(
    engine: Engine, number: signal.Signals
) -> None:
    held = hold(engine, DEAD, 2)
    hold(engine, LIVE, 1)
    end(engine, number)
    assert counts(engine) == [("pending", 0, 1, 0), ("pending", 0, 1, 0), ("leased", 1, 0, 0)]
    assert ask(engine, lock_job, held[0].job_id).num_retried_chunks == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_was_killed_speaks_against_no_chunk(engine: Engine, number: signal.Signals) -> None:
    (claimed,) = hold(engine, DEAD, 1)
    ask(engine, mark_alone, claimed)
    end(engine, number)
    assert counts(engine) == [("pending", 0, 0, 1)]


def test_a_chunk_that_was_alone_is_to_blame_and_those_that_waited_for_it_are_not(engine: Engine) -> None:
    alone, _, suspect = hold(engine, DEAD, 3)
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE vectormill.chunks SET lost = 1 WHERE id = ANY(CAST(:ids AS bigint[]))"),
            {"ids": [alone.chunk_id, suspect.chunk_id]},
        )
        mark_alone(connection, alone)
    end(engine, signal.SIGSEGV)
    assert counts(engine) == [("pending", 0, 2, 0), ("pending", 0, 0, 0), ("pending", 0, 1, 0)]


def test_a_suspect_that_waited_with_others_gathers_no_blame_by_that(engine: Engine) -> None:
    hold(engine, DEAD, 2)
    execute(engine, "UPDATE vectormill.chunks SET lost = 1")
    end(engine, signal.SIGSEGV)
    assert counts(engine) == [("pending", 0, 1, 0)] * 2


def test_a_worker_that_returns_chunks_of_several_jobs_waits_for_none_of_them(engine: Engine) -> None:
    jobs = [hold(engine, DEAD, 1)[0].job_id for _ in range(2)]
    with engine.begin() as holding:
        holding.execute(text("SET LOCAL lock_timeout = '10s'"))
        for job in jobs:
            lock_job(holding, job)
        end(engine, signal.SIGSEGV)
    assert [ask(engine, lock_job, job).num_retried_chunks for job in jobs] == [1, 1]
