"""The scheduler as a process of its own: elected, at work, heard, and gone when it is told to."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis
from sqlalchemy import Engine, text

from tests.protocol import SPEC, dispatch_all, make_items, register_worker, submit
from tests.waiting import wait_for
from vectormill.broker.queues import list_of
from vectormill.broker.sentinel import SENTINEL_KEY
from vectormill.db.workers import is_scheduler_alive

ELECTED = "INFO scheduler.main: Elected; dispatching."
COMMAND = (sys.executable, "-m", "vectormill.cli", "scheduler")


@contextmanager
def running_scheduler(database_url: str, redis_url: str, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A scheduler that does not wait for unclaimed dispatches: what it repairs, it has found out otherwise."""
    environ = {
        "PATH": os.defpath,
        "PYTHONPATH": str(Path.cwd()),
        "VECTORMILL_LOG_LEVEL": "info",
        "VECTORMILL_DATABASE_URL": database_url,
        "VECTORMILL_REDIS_URL": redis_url,
        "VECTORMILL_QUEUED_TIMEOUT_SECONDS": "3600",
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
    register_worker(engine)
    submit(engine, make_items(4))
    with running_scheduler(database_url, redis_url, log) as process:
        wait_for(lambda: count_queued(engine) == 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert ELECTED in log.read_text()
    with engine.connect() as connection:
        assert is_scheduler_alive(connection)


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


def count_queued(engine: Engine) -> int:
    queued = text("SELECT count(*) FROM vectormill.chunks WHERE state = 'queued'")
    with engine.connect() as connection:
        return int(connection.execute(queued).scalar_one())
