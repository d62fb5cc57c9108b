"""What waits, by model and priority: counted without reading chunks that nobody was given, nor jobs that have ended."""

from dataclasses import replace
from typing import Any

from sqlalchemy import Engine, text

from tests.database import ask, execute
from tests.protocol import (
    SPEC,
    check_open_job_counts,
    claim,
    claim_next,
    complete,
    dispatch_all,
    make_items,
    submit,
)
from vectormill.jobs.backlog import add_up_counts, count_open_jobs, count_pending_items, list_waiting
from vectormill.jobs.item import EMPTY_TEXT, ItemFailure
from vectormill.jobs.job import NewJob
from vectormill.jobs.jobs import cancel_job, delete_job, pause_job, resume_job, retry_job
from vectormill.jobs.submission import JobWriter
from vectormill.settings import Settings

AGE = text("UPDATE vectormill.jobs SET created_at = now() - CAST(:age AS interval) WHERE id = :job_id")


def age(engine: Engine, job_id: Any, seconds: int) -> None:
    execute(engine, AGE, age=f"{seconds} seconds", job_id=job_id)


def test_nothing_waits_where_no_job_is_open(engine: Engine) -> None:
    assert ask(engine, list_waiting) == []
    submit(engine, make_items(2))
    complete(engine, claim_next(engine))
    assert ask(engine, list_waiting) == []


def test_jobs_are_counted_by_model_and_priority_with_the_age_of_the_oldest(engine: Engine) -> None:
    old, young = submit(engine, make_items(10)), submit(engine, make_items(3))
    submit(engine, make_items(5), priority=0)
    submit(engine, make_items(1), spec=replace(SPEC, model="other"))
    age(engine, old.id, 7200)
    age(engine, young.id, 60)
    urgent, bulk, other = ask(engine, list_waiting)
    assert (urgent.model, urgent.priority, urgent.num_jobs, urgent.num_items) == ("fake", 0, 1, 5)
    assert (bulk.model, bulk.priority, bulk.num_jobs, bulk.num_items) == ("fake", 5, 2, 13)
    assert bulk.num_pending_chunks == 4
    assert bulk.oldest_seconds is not None
    assert 7200 <= bulk.oldest_seconds < 7300
    assert (other.model, other.num_pending_chunks) == ("other", 1)


def test_what_workers_were_given_is_told_apart_and_what_they_hold_has_no_age(engine: Engine) -> None:
    job = submit(engine, make_items(10))
    age(engine, job.id, 100)
    first, *others = dispatch_all(engine)
    claim(engine, first.chunk_id)
    (bulk,) = ask(engine, list_waiting)
    assert (bulk.num_pending_chunks, bulk.num_queued_chunks, bulk.num_leased_chunks) == (0, 2, 1)
    assert bulk.oldest_seconds is not None
    for dispatch in others:
        claim(engine, dispatch.chunk_id)
    (held,) = ask(engine, list_waiting)
    assert (held.num_queued_chunks, held.num_leased_chunks, held.oldest_seconds) == (0, 3, None)


def test_a_paused_job_waits_for_its_client_and_its_pause_is_no_age(engine: Engine) -> None:
    job = submit(engine, make_items(4))
    claim_next(engine)
    ask(engine, pause_job, job.id)
    assert ask(engine, list_waiting) == []
    execute(
        engine,
        "UPDATE vectormill.jobs SET created_at = now() - interval '1 hour', "
        "started_at = now() - interval '1 hour', paused_at = now() - interval '59 minutes' WHERE id = :id",
        id=job.id,
    )
    ask(engine, resume_job, job.id)
    with engine.begin() as connection:  # what its worker held is offered again
        connection.execute(text("UPDATE vectormill.chunks SET state = 'pending', lease_until = NULL"))
    (waiting,) = ask(engine, list_waiting)
    assert waiting.oldest_seconds is not None
    assert 50 < waiting.oldest_seconds < 120


def test_the_counts_of_open_jobs_follow_every_change_of_a_job(engine: Engine) -> None:
    upload = JobWriter(engine, NewJob(SPEC, collection="docs"), Settings(chunk_max_items=4))
    jobs = [submit(engine, make_items(12), priority=3), submit(engine, make_items(4), collection="docs")]
    with upload:
        for item in make_items(400):
            upload.add(item)
        upload.finish()
    check_open_job_counts(engine)
    complete(engine, claim_next(engine))
    check_open_job_counts(engine)
    for change in (pause_job, resume_job, cancel_job):
        ask(engine, change, jobs[0].id)
        check_open_job_counts(engine)
    ask(engine, delete_job, jobs[1].id)
    execute(engine, "DELETE FROM vectormill.generations")  # the upload's job loses its generation
    check_open_job_counts(engine)
    with engine.connect() as connection:
        assert count_pending_items(connection) == 400
        assert [(each.state, each.num_jobs) for each in count_open_jobs(connection)] == [("running", 1)]


def test_a_job_that_is_retried_is_counted_again(engine: Engine) -> None:
    job = submit(engine, make_items(4))
    assert complete(engine, claim_next(engine), {1: ItemFailure(EMPTY_TEXT, "It is empty.")})
    assert ask(engine, count_pending_items) == 0
    ask(engine, retry_job, job.id)
    assert ask(engine, count_pending_items) == 1
    check_open_job_counts(engine)


def test_added_up_counts_are_the_same_and_few(engine: Engine) -> None:
    for _ in range(30):
        submit(engine, make_items(1))
    with engine.begin() as connection:  # each a job that came and went
        for _ in range(2):
            connection.execute(
                text("""
                    INSERT INTO vectormill.open_job_counts (model, state, priority, num_jobs, num_items, num_chunks)
                    SELECT 'fake', 'running', 5, sign, sign, sign
                      FROM generate_series(1, 400), unnest(ARRAY[-1, 1]) AS sign
                """)
            )
    add_up_counts(engine)
    check_open_job_counts(engine)
    assert execute(engine, "SELECT count(*) FROM vectormill.open_job_counts").scalar_one() == 1


def test_counting_waits_for_nobody_and_counts_nobody_twice(engine: Engine) -> None:
    for _ in range(3):
        submit(engine, make_items(1))
    with engine.begin() as uncommitted:
        uncommitted.execute(text("UPDATE vectormill.jobs SET state = 'paused' WHERE seq % 2 = 0"))
        with engine.begin() as other:
            other.execute(text("SET LOCAL lock_timeout = '1s'"))
            other.execute(text("UPDATE vectormill.jobs SET state = 'running' WHERE seq % 2 = 1"))
            other.execute(
                text("""
                    INSERT INTO vectormill.open_job_counts (model, state, priority, num_jobs, num_items, num_chunks)
                    SELECT 'fake', 'running', 5, 0, 0, 0 FROM generate_series(1, 1100)
                """)
            )
        add_up_counts(engine)
        check_open_job_counts(engine)
    check_open_job_counts(engine)
    with engine.connect() as connection:
        assert {each.state for each in count_open_jobs(connection)} == {"running", "paused"}


def test_a_large_job_changes_the_counts_rarely_and_is_never_counted_too_small(engine: Engine) -> None:
    job = submit(engine, make_items(6400), chunk_max_items=1)
    num_before = execute(engine, "SELECT count(*) FROM vectormill.open_job_counts").scalar_one()
    for num_done in range(0, 6401, 40):
        execute(
            engine,
            "UPDATE vectormill.jobs SET num_done = :num, num_open_chunks = 6400 - :num WHERE id = :id",
            num=num_done,
            id=job.id,
        )
        assert 0 <= ask(engine, count_pending_items) - (6400 - num_done) < 6400 / 64
    num_after = execute(engine, "SELECT count(*) FROM vectormill.open_job_counts").scalar_one()
    assert num_after - num_before == 2 * 64
