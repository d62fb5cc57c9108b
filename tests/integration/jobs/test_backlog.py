"""What waits, by model and priority: counted without reading chunks that nobody was given, nor jobs that have ended."""

import json
from dataclasses import replace
from typing import Any

from sqlalchemy import Engine, text

from tests.protocol import SPEC, claim, claim_next, complete, dispatch_all, make_items, submit
from vectormill.jobs.backlog import LIST_WAITING, Waiting, list_waiting
from vectormill.jobs.jobs import pause_job, resume_job

AGE = text("UPDATE vectormill.jobs SET created_at = now() - CAST(:age AS interval) WHERE id = :job_id")


def look(engine: Engine) -> list[Waiting]:
    with engine.connect() as connection:
        return list_waiting(connection)


def age(engine: Engine, job_id: Any, seconds: int) -> None:
    with engine.begin() as connection:
        connection.execute(AGE, {"age": f"{seconds} seconds", "job_id": job_id})


def test_nothing_waits_where_no_job_is_open(engine: Engine) -> None:
    assert look(engine) == []
    submit(engine, make_items(2))
    complete(engine, claim_next(engine))
    assert look(engine) == []


def test_jobs_are_counted_by_model_and_priority_with_the_age_of_the_oldest(engine: Engine) -> None:
    old, young = submit(engine, make_items(10)), submit(engine, make_items(3))
    submit(engine, make_items(5), priority=0)
    submit(engine, make_items(1), spec=replace(SPEC, model="other"))
    age(engine, old.id, 7200)
    age(engine, young.id, 60)
    urgent, bulk, other = look(engine)
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
    (bulk,) = look(engine)
    assert (bulk.num_pending_chunks, bulk.num_queued_chunks, bulk.num_leased_chunks) == (0, 2, 1)
    assert bulk.oldest_seconds is not None
    for dispatch in others:
        claim(engine, dispatch.chunk_id)
    (held,) = look(engine)
    assert (held.num_queued_chunks, held.num_leased_chunks, held.oldest_seconds) == (0, 3, None)


def test_a_paused_job_waits_for_its_client_and_its_pause_is_no_age(engine: Engine) -> None:
    job = submit(engine, make_items(4))
    claim_next(engine)
    with engine.begin() as connection:
        pause_job(connection, job.id)
    assert look(engine) == []
    with engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE vectormill.jobs SET created_at = now() - interval '1 hour', "
                "started_at = now() - interval '1 hour', paused_at = now() - interval '59 minutes' WHERE id = :id"
            ),
            {"id": job.id},
        )
        resume_job(connection, job.id)
    with engine.begin() as connection:  # what its worker held is offered again
        connection.execute(text("UPDATE vectormill.chunks SET state = 'pending', lease_until = NULL"))
    (waiting,) = look(engine)
    assert waiting.oldest_seconds is not None
    assert 50 < waiting.oldest_seconds < 120


def test_ten_thousand_ended_jobs_are_not_read(engine: Engine) -> None:
    job = submit(engine, make_items(4))
    with engine.begin() as connection:
        connection.execute(
            text("""
                INSERT INTO vectormill.jobs (state, model, spec, priority, num_items, num_done, id, finished_at)
                SELECT 'completed', model, spec, priority, 4, 4, gen_random_uuid(), now()
                  FROM vectormill.jobs, generate_series(1, 10000) WHERE id = :id
            """),
            {"id": job.id},
        )
        connection.execute(text("ANALYZE vectormill.jobs"))
        connection.execute(text("ANALYZE vectormill.chunks"))
        plan = connection.execute(text(f"EXPLAIN (FORMAT JSON) {LIST_WAITING.text}")).scalar_one()
    assert "ix_jobs_in_progress" in json.dumps(plan)
    (waiting,) = look(engine)
    assert waiting.num_jobs == 1
