"""What is removed when its time is over or its user says so, in what portions, and what is left alone meanwhile."""

import itertools

import pytest
from psycopg.errors import UndefinedTable
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError, ProgrammingError

from scheduler import pruner
from scheduler.pruner import Pruner
from tests.database import ask, execute
from tests.protocol import SPEC, claim_next, complete, make_items, submit
from vectormill.domain.errors import JobNotFound, WrongJobState
from vectormill.jobs.deletion import delete_batch, discard_expired_jobs, discard_job, lock_discarded_job
from vectormill.jobs.export import read_results
from vectormill.jobs.item import Item, ItemFailure
from vectormill.jobs.job import Job, NewJob
from vectormill.jobs.jobs import find_job, list_jobs, retry_job
from vectormill.jobs.submission import JobWriter
from vectormill.settings import Settings

EVER = -1.0  # seconds of retention after which every ended job is past it
NEVER = 1e9

COUNT_ROWS = text("""
    SELECT (SELECT count(*) FROM vectormill.jobs) AS jobs,
           (SELECT count(*) FROM vectormill.chunks) AS chunks,
           (SELECT count(*) FROM vectormill.chunk_payloads) AS payloads,
           (SELECT count(*) FROM vectormill.chunk_vectors) AS vectors,
           (SELECT count(*) FROM vectormill.item_errors) AS errors
""")


def run_job(engine: Engine, num_chunks: int = 1, collection: str | None = None, prefix: str = "k") -> Job:
    """An ended job with one failed item in each of its chunks of four items."""
    items = make_items(4 * num_chunks, prefix)
    job = submit(engine, items, collection=collection, idempotency_key=prefix)
    while not complete(engine, claim_next(engine), {0: ItemFailure("encoding_failed", "so it is")}):
        pass
    return job


def count_rows(engine: Engine) -> tuple[int, ...]:
    """Of jobs, chunks, payloads, vectors and errors."""
    return tuple(execute(engine, COUNT_ROWS).one())


def test_ended_jobs_are_removed_when_their_retention_is_over_and_others_stay(engine: Engine) -> None:
    run_job(engine, 2)
    waiting = submit(engine, make_items(4))
    assert Pruner(engine, NEVER, NEVER).prune() == 0
    assert Pruner(engine, EVER, NEVER).prune() == 1
    assert count_rows(engine) == (1, 1, 1, 0, 0)
    assert ask(engine, find_job, waiting.id).state == "queued"


def test_a_job_that_is_being_retried_is_left_alone(engine: Engine) -> None:
    job = run_job(engine)
    with engine.begin() as connection:
        retry_job(connection, job.id)
        assert ask(engine, discard_expired_jobs, EVER) == 0
    assert Pruner(engine, EVER, NEVER).prune() == 0


def test_a_job_that_is_retried_while_it_is_deleted_is_the_one_or_the_other(engine: Engine) -> None:
    job = run_job(engine)
    ask(engine, discard_job, job.id)
    with engine.begin() as connection, pytest.raises(JobNotFound):
        retry_job(connection, job.id)
    other = run_job(engine, prefix="other")
    ask(engine, retry_job, other.id)
    with engine.begin() as connection, pytest.raises(WrongJobState, match="cancel it first"):
        discard_job(connection, other.id)


def test_a_deleted_job_is_gone_for_everybody_before_its_rows_are(engine: Engine) -> None:
    job = run_job(engine, 3, collection="docs")
    ask(engine, discard_job, job.id)
    assert count_rows(engine) == (1, 3, 3, 0, 3)
    with engine.connect() as connection:
        with pytest.raises(JobNotFound):
            find_job(connection, job.id)
        for state in (None, "completed_with_errors"):
            assert list_jobs(connection, state=state, before_seq=None, limit=9) == []
        with pytest.raises(JobNotFound):
            discard_job(connection, job.id)
    with pytest.raises(JobNotFound):
        read_results(engine, job.id)
    again = run_job(engine, 3, collection="docs")  # under the same Idempotency-Key
    assert again.id != job.id


def test_a_job_is_removed_in_batches_and_whoever_comes_after_a_crash_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruner, "BATCH_CHUNKS", 2)
    job = run_job(engine, 7)
    ask(engine, discard_job, job.id)
    assert ask(engine, delete_batch, job.id, max_chunks=2, max_errors=3) is False
    assert count_rows(engine) == (1, 5, 7, 7, 4)
    with engine.connect() as connection:  # killed in the middle of the next batch
        assert delete_batch(connection, job.id, max_chunks=2, max_errors=3) is False
        connection.rollback()
    assert count_rows(engine) == (1, 5, 7, 7, 4)
    assert Pruner(engine, NEVER, NEVER).prune() == 1
    assert count_rows(engine) == (0, 0, 0, 0, 0)


def test_two_pruners_do_not_wait_for_each_other(engine: Engine) -> None:
    first, second = run_job(engine, prefix="first"), run_job(engine, prefix="second")
    ask(engine, discard_job, first.id)
    with engine.begin() as connection:
        job = lock_discarded_job(connection)
        assert job is not None
        assert delete_batch(connection, job.id, 9, 9) is True
        assert Pruner(engine, NEVER, NEVER).prune() == 0
        ask(engine, discard_job, second.id)
        assert Pruner(engine, NEVER, NEVER).prune() == 1
    Pruner(engine, NEVER, NEVER).prune()
    assert count_rows(engine) == (0, 0, 0, 0, 0)


def test_a_pruner_that_finds_no_database_tries_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = [OSError("no file descriptors"), OperationalError("SELECT 1", {}, Exception("away")), None]
    monkeypatch.setattr(pruner, "_PAUSE_SECONDS", 0.01)
    pruning = Pruner(engine, NEVER, NEVER)

    def prune() -> None:
        error = attempts.pop(0)
        if error is not None:
            raise error
        pruning.stopping.set()

    monkeypatch.setattr(pruning, "prune", prune)
    with pruning:
        assert pruning.stopping.wait(80)
    assert attempts == []


def test_a_search_s_text_is_gone_after_its_time_when_the_api_that_asked_was_killed(engine: Engine) -> None:
    settings = Settings()
    kept = submit(engine, make_items(1))
    for number in range(2):
        with JobWriter(engine, NewJob(SPEC, lifetime_seconds=50), settings) as writer:
            writer.add(Item("0", f"what nobody shall read, {number}".encode()))
            writer.finish()
    Pruner(engine, NEVER, NEVER).prune()
    assert count_rows(engine)[0] == 3
    with engine.begin() as connection:  # as if one of them had been asked a minute ago
        forgotten = connection.execute(LET_A_MINUTE_PASS, {"kept": kept.id}).scalar_one()
    assert 0 < forgotten < 120
    Pruner(engine, NEVER, NEVER).prune()
    assert count_rows(engine)[0] == 2
    assert execute(engine, "SELECT count(*) FROM vectormill.chunk_payloads").scalar_one() == 2


LET_A_MINUTE_PASS = text("""
    UPDATE vectormill.jobs SET forget_at = forget_at - interval '1 minute'
     WHERE id = (SELECT id FROM vectormill.jobs WHERE id <> :kept ORDER BY seq LIMIT 1)
    RETURNING extract(epoch FROM forget_at + interval '1 minute' - created_at)
""")


def test_the_removal_of_a_large_job_gives_the_other_duties_their_turn(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruner, "BATCH_CHUNKS", 2)
    ask(engine, discard_job, run_job(engine, 7).id)
    moments = itertools.count(step=pruner.DELETING_SECONDS)
    duty = Pruner(engine, NEVER, NEVER, clock=lambda: next(moments))
    assert duty.prune() == 0  # one batch, and then the time is over
    assert 0 < count_rows(engine)[1] < 7
    while duty.prune() == 0:
        pass
    assert count_rows(engine) == (0, 0, 0, 0, 0)


def test_a_small_job_is_removed_before_a_large_one_that_was_deleted_earlier(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruner, "BATCH_CHUNKS", 2)
    ask(engine, discard_job, run_job(engine, 7).id)
    ask(engine, discard_job, run_job(engine, 1, prefix="small").id)
    moments = itertools.count(step=pruner.DELETING_SECONDS / 2)
    duty = Pruner(engine, NEVER, NEVER, clock=lambda: next(moments))
    assert duty.prune() == 1
    assert count_rows(engine)[:2] == (1, 5)


def test_an_error_of_one_duty_takes_no_turn_from_the_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> int:
        raise ProgrammingError("DROP TABLE", {}, UndefinedTable("it is gone"))

    monkeypatch.setattr(pruner, "drop_orphaned_tables", fail)
    ask(engine, discard_job, run_job(engine).id)
    assert Pruner(engine, NEVER, NEVER).prune() == 1


def test_a_batch_grows_while_it_is_quick_and_shrinks_when_it_is_slow() -> None:
    taken = [(100, 0.01), (8_000, 0.2), (200, 0.3), (200, 0.5), (1, 9.0)]
    assert [pruner.plan_batch(*each) for each in taken] == [200, 10_000, 200, 100, 1]
