"""The scheduler as a process of its own: elected, at work, heard, and gone when it is told to."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis
from sqlalchemy import Engine, TextClause, text

from tests.database import ask, execute
from tests.protocol import SPEC, claim_next, complete, dispatch_all, make_items, register_worker, submit
from tests.schedules import list_runs, make_collection, make_due, make_schedule
from tests.waiting import wait_for
from vectormill.broker.queues import SENTINEL_KEY, list_of
from vectormill.jobs.chunks import release_chunk
from vectormill.jobs.deletion import discard_job
from vectormill.jobs.job import COMPLETED
from vectormill.jobs.jobs import cancel_job, find_job, lock_job
from vectormill.processes.lifetimes import free_port
from vectormill.workers.workers import is_scheduler_alive

ELECTED = "INFO scheduler.main: Elected; dispatching."
# Of the term: what is done beside it has words of its own.
GIVEN_UP = "Cannot reach Postgres; retrying"
COMMAND = (sys.executable, "-m", "vectormill.cli", "scheduler")


@contextmanager
def running_scheduler(
    database_url: str, redis_url: str, log: Path, **more: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """A scheduler that does not wait for unclaimed dispatches: what it repairs, it has found out otherwise."""
    environ = {
        "PATH": os.defpath,
        "PYTHONPATH": str(Path.cwd()),
        "VECTORMILL_LOG_LEVEL": "info",
        "VECTORMILL_DATABASE_URL": database_url,
        "VECTORMILL_REDIS_URL": redis_url,
        "VECTORMILL_QUEUED_TIMEOUT_SECONDS": "3600",
        **more,
    }
    with log.open("wb") as output, subprocess.Popen(COMMAND, env=environ, stderr=output) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_scheduler_says_that_it_was_elected_dispatches_and_stops_when_told_to(
    engine: Engine, database_url: str, redis_url: str, tmp_path: Path
) -> None:
    log = tmp_path / "scheduler.log"
    with running_scheduler(database_url, redis_url, log) as process:
        wait_for(lambda: log.exists() and ELECTED in log.read_text())
        register_worker(engine)  # who is alive for seconds only, and a start may take longer
        submit(engine, make_items(4))
        wait_for(lambda: count_queued(engine) == 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert ELECTED in log.read_text()
    assert ask(engine, is_scheduler_alive)


def test_a_scheduler_counts_what_commits_have_only_noted(
    engine: Engine, database_url: str, redis_url: str, tmp_path: Path
) -> None:
    job = submit(engine, make_items(4))
    claimed = claim_next(engine)
    with engine.connect() as connection, connection.begin():
        lock_job(connection, job.id)
        assert not complete(engine, claimed)
    with (
        running_scheduler(database_url, redis_url, tmp_path / "scheduler.log"),
        engine.connect() as connection,
    ):
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        wait_for(lambda: find_job(connection, job.id).state == COMPLETED)


def test_another_scheduler_rings_for_what_one_had_marked_when_it_was_killed(
    engine: Engine, database_url: str, redis_url: str, tmp_path: Path
) -> None:
    redis, logs = Redis.from_url(redis_url), [tmp_path / "first.log", tmp_path / "second.log"]
    redis.flushall()
    with running_scheduler(database_url, redis_url, logs[0]) as first:
        wait_for(lambda: ELECTED in logs[0].read_text())
        wait_for(lambda: redis.exists(SENTINEL_KEY))  # nobody will think that Redis was flushed
        with running_scheduler(database_url, redis_url, logs[1]):
            first.send_signal(signal.SIGSTOP)
            register_worker(engine)
            submit(engine, make_items(4))
            assert len(dispatch_all(engine)) == 1  # as the first one would, without the message
            first.kill()
            wait_for(lambda: redis.llen(list_of(SPEC.model, priority=5)) == 1)
    assert ELECTED in logs[1].read_text()
    redis.close()


def test_a_scheduler_that_meets_an_error_of_the_database_is_elected_again(
    engine: Engine, admin: Engine, database_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Its lock is of a session: kept in the pool, nobody else had it, and the scheduler waited for itself for ever."""
    log = tmp_path / "scheduler.log"
    with running_scheduler(database_url, redis_url, log):
        for _ in range(3):
            wait_for(lambda: ELECTED in log.read_text().rpartition(GIVEN_UP)[2])
            times = log.read_text().count(
                GIVEN_UP
            )  # more than once in a term, where it is met again meanwhile
            rename(admin, "chunks", "gone")
            try:
                wait_for(lambda times=times: log.read_text().count(GIVEN_UP) > times)  # type: ignore[misc]
            finally:
                rename(admin, "gone", "chunks")
        register_worker(engine)
        submit(engine, make_items(4))
        wait_for(lambda: count_queued(engine) == 1)


def rename(engine: Engine, old: str, new: str) -> None:
    execute(engine, f"ALTER TABLE vectormill.{old} RENAME TO {new}")


# Whoever deletes a chunk waits until the test lets go of the lock.
SLOW_DELETE = text("""
    CREATE FUNCTION vectormill.wait_for_test() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_advisory_xact_lock_shared(4711); RETURN OLD; END $$;
    CREATE TRIGGER wait_for_test BEFORE DELETE ON vectormill.chunks
       FOR EACH ROW EXECUTE FUNCTION vectormill.wait_for_test();
""")
IS_DELETING = text("""
    SELECT EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND NOT granted
                      AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
""")


def test_a_deletion_that_takes_long_delays_neither_dispatch_nor_reaping_nor_the_sign_of_life(
    engine: Engine, database_url: str, redis_url: str, tmp_path: Path
) -> None:
    deleted = submit(engine, make_items(8))
    while not complete(engine, claim_next(engine)):
        pass
    with engine.begin() as connection:
        discard_job(connection, deleted.id)
        connection.execute(SLOW_DELETE)
    with engine.begin() as holder:
        holder.execute(text("SELECT pg_advisory_xact_lock(4711)"))
        with running_scheduler(database_url, redis_url, tmp_path / "scheduler.log"):
            wait_for(lambda: scalar(engine, IS_DELETING) is True)
            cancelled = submit(engine, make_items(4))
            claimed = claim_next(engine)  # before there is a worker: the scheduler would be as fast
            register_worker(engine)
            with engine.begin() as connection:
                cancel_job(connection, cancelled.id)
                release_chunk(connection, claimed, "the worker was asked to stop", is_counted=False)
            submit(engine, make_items(4))
            wait_for(lambda: count_queued(engine) == 1)
            wait_for(lambda: ask(engine, find_job, cancelled.id).state == "cancelled")  # by the reaper
            began = scalar(engine, BEAT_AT)
            wait_for(lambda: scalar(engine, BEAT_AT) != began)
            assert scalar(engine, COUNT_JOBS) == 3
            holder.rollback()
            wait_for(lambda: scalar(engine, COUNT_JOBS) == 2, seconds=60)


BEAT_AT = text("SELECT max(beat_at) FROM vectormill.heartbeats")
COUNT_JOBS = text("SELECT count(*) FROM vectormill.jobs")


def scalar(engine: Engine, statement: TextClause) -> object:
    return execute(engine, statement).scalar_one()


def count_queued(engine: Engine) -> int:
    queued = text("SELECT count(*) FROM vectormill.chunks WHERE state = 'queued'")
    return int(execute(engine, queued).scalar_one())


def test_what_is_due_makes_its_run_while_redis_is_away(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    make_collection(engine, "docs")
    make_schedule(engine, "docs", "0 2 1 6 *")
    due_at = make_due(engine, "docs")
    nobody = f"redis://127.0.0.1:{free_port()}/0"
    with running_scheduler(database_url, nobody, tmp_path / "scheduler.log"):
        wait_for(lambda: [run.due_at for run in list_runs(engine, "docs")] == [due_at])
