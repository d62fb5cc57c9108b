"""Counters of jobs: commits do not wait for the row of their job, and none of them is forgotten or counted twice."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine, text

from tests.database import ask, execute
from tests.protocol import claim, complete, dispatch_all, make_items, submit
from vectormill.jobs.chunk import Claim
from vectormill.jobs.item import ENCODING_FAILED, ItemFailure
from vectormill.jobs.job import COMPLETED, COMPLETED_WITH_ERRORS, Job
from vectormill.jobs.jobs import delete_job, find_job, lock_job, pause_job, retry_job
from vectormill.jobs.transitions import ADD_UP, add_up_jobs

FAILURES = {0: ItemFailure(ENCODING_FAILED, "This text cannot be encoded, as this test wants it.")}


def claims_of(engine: Engine) -> list[Claim]:
    return [taken for each in dispatch_all(engine) if (taken := claim(engine, each.chunk_id)) is not None]


def find(engine: Engine, job: Job) -> Job:
    return ask(engine, find_job, job.id)


def count_noted(engine: Engine) -> int:
    with engine.connect() as connection:
        number: int = connection.execute(text("SELECT count(*) FROM vectormill.job_increments")).scalar_one()
        return number


@contextmanager
def held(engine: Engine, job: Job) -> Iterator[None]:
    """Hold the row of the job, as a commit does that waits for the disk."""
    with engine.connect() as connection, connection.begin():
        lock_job(connection, job.id)
        yield


def test_a_commit_does_not_wait_for_the_row_of_its_job_and_is_counted_later(engine: Engine) -> None:
    job = submit(engine, make_items(12))
    first, second, third = claims_of(engine)
    with held(engine, job):
        assert not complete(engine, first)
        assert not complete(engine, second, FAILURES)
        assert not complete(engine, third)
        assert (find(engine, job).num_done, find(engine, job).is_terminal) == (0, False)
    assert add_up_jobs(engine) == 1
    ended = find(engine, job)
    assert (ended.state, ended.num_done, ended.num_failed) == (COMPLETED_WITH_ERRORS, 11, 1)
    assert (ended.num_open_chunks, ended.num_tokens, ended.num_reused) == (0, 120, 3)
    assert ended.stage_seconds == {"run": 1.5}
    assert (count_noted(engine), add_up_jobs(engine)) == (0, 0)


def pass_time(engine: Engine, job: Job, seconds: float) -> None:
    """Let the job have begun so much earlier."""
    execute(
        engine,
        "UPDATE vectormill.jobs SET started_at = started_at - :seconds * interval '1 second' WHERE id = :id",
        id=job.id,
        seconds=seconds,
    )


def test_the_time_left_follows_from_the_rate_of_the_last_minutes(engine: Engine) -> None:
    job = submit(engine, make_items(28))
    claims = claims_of(engine)
    pass_time(engine, job, 3600)  # the model was loaded, or other jobs came first
    complete(engine, claims[0])
    assert find(engine, job).eta_seconds == pytest.approx(6 * 3600, rel=0.01), "one chunk tells no other rate"
    for number, chunk in enumerate(claims[1:4], start=1):
        pass_time(engine, job, 10)
        complete(engine, chunk)
        assert find(engine, job).eta_seconds == pytest.approx((6 - number) * 10, rel=0.1)
    for chunk in claims[4:6]:  # now each takes ten minutes, and the mark of the quick ones is left behind
        pass_time(engine, job, 600)
        complete(engine, chunk)
    assert find(engine, job).eta_seconds == pytest.approx(600, rel=0.1)
    with held(engine, job):
        complete(engine, claims[6], FAILURES)
    add_up_jobs(engine)
    assert ask(engine, retry_job, job.id).pace is None


def test_the_next_commit_counts_what_others_have_noted(engine: Engine) -> None:
    job = submit(engine, make_items(8))
    first, second = claims_of(engine)
    with held(engine, job):
        complete(engine, first)
    assert complete(engine, second), "it ended the job"
    assert (find(engine, job).state, find(engine, job).num_done) == (COMPLETED, 8)


def test_a_row_that_changes_while_it_is_counted_keeps_both_changes(engine: Engine) -> None:
    job = submit(engine, make_items(8))
    first, _ = claims_of(engine)
    with held(engine, job):
        complete(engine, first)
    slow = text(ADD_UP.text.replace("WHERE id = :job_id", "WHERE id = :job_id AND pg_sleep(1) IS NOT NULL"))

    def add_up() -> None:
        execute(engine, slow, job_id=job.id)

    counting = threading.Thread(target=add_up)
    counting.start()
    time.sleep(0.3)  # its statement has begun, and has not locked the row yet
    execute(engine, "UPDATE vectormill.jobs SET num_done = num_done + 100, priority = 3")
    counting.join()
    found = find(engine, job)
    assert (found.num_done, found.num_open_chunks, found.priority) == (104, 1, 3)


def test_of_a_large_job_few_commits_change_the_row_and_it_ends_without_a_scheduler(engine: Engine) -> None:
    job = submit(engine, make_items(330), chunk_max_items=1)
    claims = claims_of(engine)
    for claimed in claims[:60]:
        complete(engine, claimed)
    assert find(engine, job).num_done + count_noted(engine) == 60
    assert count_noted(engine) > 0
    ends = [complete(engine, claimed) for claimed in claims[60:]]
    assert ends == [False] * 269 + [True]
    assert (find(engine, job).state, find(engine, job).num_done) == (COMPLETED, 330)


def test_what_was_noted_of_a_job_that_was_removed_is_forgotten(engine: Engine) -> None:
    job = submit(engine, make_items(8))
    first, _ = claims_of(engine)
    with held(engine, job):
        complete(engine, first)
    ask(engine, delete_job, job.id)
    add_up_jobs(engine)
    assert count_noted(engine) == 0


def test_a_retry_knows_of_failures_that_were_only_noted(engine: Engine) -> None:
    job = submit(engine, make_items(8))
    first, _ = claims_of(engine)
    with held(engine, job):
        complete(engine, first, FAILURES)
    ask(engine, pause_job, job.id)
    retried = ask(engine, retry_job, job.id)
    assert (retried.num_failed, retried.num_done, retried.num_open_chunks) == (0, 3, 2)
