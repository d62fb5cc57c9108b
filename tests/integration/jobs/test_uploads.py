"""Large uploads, which are written in parts: their signs of life, and what becomes of those that give none."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.engine.interfaces import DBAPICursor
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import PoolProxiedConnection

from tests.database import ask
from tests.protocol import SPEC, make_items, submit
from tests.services import connected_engine
from vectormill.collections.collection import Generation
from vectormill.collections.collections import open_collection
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import SubmissionInProgress, UploadRemoved
from vectormill.jobs import submission
from vectormill.jobs.deletion import discard_stale_uploads
from vectormill.jobs.item import Item
from vectormill.jobs.job import NewJob
from vectormill.jobs.jobs import find_job, list_jobs
from vectormill.jobs.submission import JobWriter
from vectormill.settings import Settings

KEY = "nightly"
PART = 4 * 8  # items of 8 chunks, which are written as one


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def count_jobs(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM vectormill.jobs")).scalar_one())


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
        assert [each.id for each in list_jobs(connection, state=None, before_seq=None, limit=9)] == [job.id]


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
    assert ask(engine, discard_stale_uploads, timeout_seconds=-1) == 1
    rest = make_items(PART, prefix="more")
    for item in rest[:-1]:
        writer.add(item)
    with pytest.raises(UploadRemoved):
        writer.add(rest[-1])
    writer.__exit__(None, None, None)


def lose_commit_reply(engine: Engine, network: pytest.MonkeyPatch, *, is_cut: bool) -> None:
    """The next COMMIT of this engine is done, and its reply is lost; cut off, it can ask for nothing afterwards."""
    commit, execute = engine.dialect.do_commit, engine.dialect.do_execute
    lost: list[PoolProxiedConnection] = []

    def commit_in_silence(connection: PoolProxiedConnection) -> None:
        commit(connection)
        if not lost:
            lost.append(connection)
            raise psycopg.OperationalError("server closed the connection unexpectedly")

    def execute_unless_cut(cursor: DBAPICursor, statement: str, *rest: Any) -> None:
        if lost and is_cut:
            raise psycopg.OperationalError("connection to server failed")
        execute(cursor, statement, *rest)

    network.setattr(engine.dialect, "do_commit", commit_in_silence)
    network.setattr(engine.dialect, "do_execute", execute_unless_cut)


# In one transaction, and one that closes an upload in parts.
@pytest.mark.parametrize("num_items", [2, PART + 2])
def test_a_job_whose_commit_reply_was_lost_is_not_deleted_under_the_client_that_repeats(
    engine: Engine, database_url: str, monkeypatch: pytest.MonkeyPatch, num_items: int
) -> None:
    items = make_items(num_items)
    first = JobWriter(engine, NewJob(SPEC, idempotency_key=KEY), Settings(chunk_max_items=4))
    with first, connected_engine(database_url) as other_api:
        for item in items:
            first.add(item)
        with monkeypatch.context() as network:
            lose_commit_reply(engine, network, is_cut=True)
            with pytest.raises(OperationalError, match="closed the connection"):
                first.finish()
        answered = submit(other_api, items, idempotency_key=KEY)
    with engine.connect() as connection:
        job = find_job(connection, answered.id)
        chunks = text("SELECT count(*) FROM vectormill.chunks WHERE job_id = :id")
        assert connection.execute(chunks, {"id": job.id}).scalar_one() == job.num_chunks
    assert (job.state, job.num_items) == ("queued", num_items)


@pytest.mark.parametrize("num_items", [2, PART + 2])
def test_a_job_whose_commit_reply_was_lost_is_answered_when_the_database_can_be_asked(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, num_items: int
) -> None:
    with JobWriter(engine, NewJob(SPEC), Settings(chunk_max_items=4)) as writer:
        for item in make_items(num_items):
            writer.add(item)
        lose_commit_reply(engine, monkeypatch, is_cut=False)
        job = writer.finish()
    assert (job.state, job.num_items, count_jobs(engine)) == ("queued", num_items, 1)


def test_two_first_submissions_to_one_collection_wait_for_no_lock_of_each_other(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)

    def open_together(connection: Connection, name: str, spec: EncodingSpec) -> Generation:
        both.wait(30)
        return open_collection(connection, name, spec)

    monkeypatch.setattr(submission, "open_collection", open_together)
    with ThreadPoolExecutor(2) as pool:
        jobs = list(pool.map(lambda key: submit(engine, [Item(key, b"text")], collection="new"), ("a", "b")))
    assert {job.collection for job in jobs} == {"new"}
