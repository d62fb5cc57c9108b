"""What is removed when its time is over, how much of it at once, and what is left alone."""

from itertools import count

from sqlalchemy import Engine, text

from api.queries import submit_query
from scheduler.pruner import prune_expired
from tests.protocol import SPEC, claim_next, complete, make_items, submit
from vectormill.db.jobs import retry_job
from vectormill.db.rescue import delete_expired_job
from vectormill.domain.item import ItemFailure
from vectormill.settings import Settings

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


def test_a_search_s_text_is_gone_after_its_time_when_the_api_that_asked_was_killed(engine: Engine) -> None:
    settings = Settings(search_timeout_seconds=20)
    kept = submit(engine, make_items(1))
    for number in range(2):
        submit_query(engine, settings, SPEC, f"what nobody shall read, {number}".encode())
    prune_expired(engine, 3600, 3600)
    assert count_jobs(engine) == 3
    with engine.begin() as connection:  # as if one of them had been asked a minute ago
        forgotten = connection.execute(LET_A_MINUTE_PASS, {"kept": kept.id}).scalar_one()
    assert 0 < forgotten < 120
    prune_expired(engine, 3600, 3600)
    assert count_jobs(engine) == 2
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM vectormill.chunk_payloads")).scalar_one() == 2


LET_A_MINUTE_PASS = text("""
    UPDATE vectormill.jobs SET forget_at = forget_at - interval '1 minute'
     WHERE id = (SELECT id FROM vectormill.jobs WHERE id <> :kept ORDER BY seq LIMIT 1)
    RETURNING extract(epoch FROM forget_at + interval '1 minute' - created_at)
""")
