"""Comparisons in SQL that stand between two processes, each alone: take one away, and one of these fails."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, text

from tests.protocol import claim, claim_next, complete, dispatch_all, make_items, submit
from tests.waiting import wait_for
from vectormill.domain.errors import JobNotFound
from vectormill.jobs.chunks import COUNT_RETRIED_CHUNK, renew_leases
from vectormill.jobs.completion import FENCE
from vectormill.jobs.jobs import delete_job, find_job

PATIENCE_SECONDS = 60.0
COUNT_BLOCKED = text("""
    SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0
""")
LEFT_SECONDS = text("SELECT extract(epoch FROM lease_until - now()) FROM vectormill.chunks WHERE id = :id")


def test_of_all_commits_of_a_job_exactly_one_is_told_that_it_ended_it(engine: Engine) -> None:
    submit(engine, make_items(12))
    claims = [claim(engine, dispatch.chunk_id) for dispatch in dispatch_all(engine)]
    assert [complete(engine, claimed) for claimed in claims if claimed] == [False, False, True]


def test_a_worker_that_lost_its_lease_does_not_renew_its_successors(engine: Engine) -> None:
    submit(engine, make_items(4))
    zombie = claim_next(engine, "zombie", lease_seconds=-1)
    assert claim(engine, zombie.chunk_id, "thief", lease_seconds=30) is not None
    with engine.begin() as connection:
        assert renew_leases(connection, [zombie], 3600) == {}
        assert connection.execute(LEFT_SECONDS, {"id": zombie.chunk_id}).scalar_one() < 60


def test_a_job_keeps_its_idempotency_key_however_long_nothing_moves_in_it(engine: Engine) -> None:
    job = submit(engine, make_items(4), idempotency_key="k")
    with engine.begin() as connection:
        connection.execute(text("UPDATE vectormill.jobs SET updated_at = now() - interval '1 day'"))
    assert submit(engine, make_items(4), idempotency_key="k").id == job.id


def test_a_query_is_removed_while_a_worker_commits_it_and_neither_waits_for_the_other(engine: Engine) -> None:
    job = submit(engine, make_items(4))
    claimed = claim_next(engine)

    def remove() -> None:
        with engine.begin() as connection:
            delete_job(connection, job.id)

    def is_waiting() -> bool:
        with engine.connect() as connection:
            return bool(connection.execute(COUNT_BLOCKED).scalar_one())

    with ThreadPoolExecutor(1) as other:
        with engine.begin() as connection:
            # The commit's first statement, of which the other then waits.
            connection.execute(FENCE, {"state": "done", "chunk_id": claimed.chunk_id, "fence": claimed.fence})
            removed = other.submit(remove)
            wait_for(is_waiting, PATIENCE_SECONDS, "the removal waits for the commit")
            connection.execute(COUNT_RETRIED_CHUNK, {"job_id": job.id})  # the last one locks the job's row
        removed.result(PATIENCE_SECONDS)
    with engine.connect() as connection, pytest.raises(JobNotFound):
        find_job(connection, job.id)
