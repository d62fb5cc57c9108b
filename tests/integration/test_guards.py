"""Comparisons in SQL that stand between two processes, each alone: take one away, and one of these fails."""

from sqlalchemy import Engine, text

from tests.protocol import claim, claim_next, complete, dispatch_all, make_items, submit
from vectormill.db.chunks import renew_leases

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
