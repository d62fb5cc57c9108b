"""Large uploads, which are written in parts: their signs of life, and what becomes of those that give none."""

from dataclasses import dataclass

import pytest
from sqlalchemy import Engine, text

from tests.protocol import SPEC, make_items, submit
from vectormill.db.jobs import find_job
from vectormill.db.rescue import delete_stale_uploads
from vectormill.db.submission import JobWriter
from vectormill.domain.errors import SubmissionInProgress, UploadRemoved
from vectormill.domain.job import NewJob
from vectormill.settings import Settings

KEY = "nightly"
PART = 4 * 8  # items of 8 chunks, which are written as one


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def begin_upload(engine: Engine, clock: Clock | None = None) -> JobWriter:
    """An upload whose first part is written."""
    new_job = NewJob(SPEC, idempotency_key=KEY)
    writer = JobWriter(engine, new_job, Settings(chunk_max_items=4), clock or Clock())
    writer.__enter__()
    for item in make_items(PART):
        writer.add(item)
    return writer


def age_uploads(engine: Engine, seconds: float) -> None:
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE vectormill.jobs SET updated_at = updated_at - make_interval(secs => :seconds)"),
            {"seconds": seconds},
        )


def seconds_silent(engine: Engine) -> float:
    silent = text("SELECT extract(epoch FROM now() - updated_at)::float8 FROM vectormill.jobs")
    with engine.connect() as connection:
        return float(connection.execute(silent).scalar_one())


def test_the_key_of_an_upload_that_lives_is_not_given_away(engine: Engine) -> None:
    writer = begin_upload(engine)
    age_uploads(engine, 50)
    with pytest.raises(SubmissionInProgress):
        submit(engine, make_items(2), idempotency_key=KEY)
    assert writer.finish().num_items == PART


def test_after_a_crash_of_the_api_a_client_that_tries_again_gets_its_job_within_a_minute(
    engine: Engine,
) -> None:
    crashed = begin_upload(engine)
    age_uploads(engine, 61)
    job = submit(engine, make_items(PART), idempotency_key=KEY)
    with pytest.raises(UploadRemoved):  # had it only slept
        crashed.finish()
    crashed.__exit__(None, None, None)
    with engine.connect() as connection:
        assert find_job(connection, job.id).num_items == PART
        assert connection.execute(text("SELECT count(*) FROM vectormill.jobs")).scalar_one() == 1


def test_an_upload_that_trickles_gives_signs_of_life(engine: Engine) -> None:
    clock = Clock()
    writer = begin_upload(engine, clock)
    age_uploads(engine, 50)
    more = iter(make_items(3, prefix="more"))
    clock.now = 14.0
    writer.add(next(more))
    assert seconds_silent(engine) >= 50
    clock.now = 16.0
    writer.add(next(more))
    assert seconds_silent(engine) < 50
    writer.add(next(more))
    assert writer.finish().num_items == PART + 3


def test_an_upload_that_was_removed_meanwhile_is_told_so(engine: Engine) -> None:
    writer = begin_upload(engine)
    with engine.begin() as connection:
        assert len(delete_stale_uploads(connection, timeout_seconds=-1)) == 1
    rest = make_items(PART, prefix="more")
    for item in rest[:-1]:
        writer.add(item)
    with pytest.raises(UploadRemoved):
        writer.add(rest[-1])
    writer.__exit__(None, None, None)
