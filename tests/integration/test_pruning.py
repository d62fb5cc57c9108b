"""What is removed when its time is over, how much of it at once, and what is left alone."""

from itertools import count

from sqlalchemy import Engine, text

from scheduler.pruner import prune_expired
from tests.protocol import claim_next, complete, make_items, submit
from vectormill.db.jobs import retry_job
from vectormill.db.rescue import delete_expired_job
from vectormill.domain.item import ItemFailure

EVER = -1.0  # seconds of retention after which every ended job is past it


def run_jobs(engine: Engine, num_jobs: int) -> None:
    for _ in range(num_jobs):
        submit(engine, make_items(4))
        complete(engine, claim_next(engine))


def count_jobs(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM vectormill.jobs")).scalar_one())


def test_a_round_ends_after_a_second_and_the_next_one_goes_on(engine: Engine) -> None:
    run_jobs(engine, 5)
    looks = count()
    assert prune_expired(engine, EVER, 3600, clock=lambda: next(looks) * 0.4) == 2
    assert prune_expired(engine, EVER, 3600) == 3
    assert prune_expired(engine, EVER, 3600) == 0


def test_a_job_that_is_being_retried_is_left_alone(engine: Engine) -> None:
    job = submit(engine, make_items(4))
    complete(engine, claim_next(engine), {0: ItemFailure("encoding_failed", "so it is")})
    with engine.begin() as connection:
        retry_job(connection, job.id)
        with engine.begin() as pruner:
            assert delete_expired_job(pruner, EVER) is None
    assert count_jobs(engine) == 1
