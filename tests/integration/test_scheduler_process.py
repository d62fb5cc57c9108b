"""The scheduler as a process of its own: elected, at work, heard, and gone when it is told to."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from sqlalchemy import Engine, text

from tests.protocol import make_items, register_worker, submit
from tests.waiting import wait_for
from vectormill.db.workers import is_scheduler_alive

COMMAND = (sys.executable, "-m", "vectormill.cli", "scheduler")


def test_a_scheduler_says_that_it_was_elected_dispatches_and_stops_when_told_to(
    engine: Engine, database_url: str, redis_url: str, tmp_path: Path
) -> None:
    log = tmp_path / "scheduler.log"
    urls = {"VECTORMILL_DATABASE_URL": database_url, "VECTORMILL_REDIS_URL": redis_url}
    environ = {
        "PATH": os.defpath,
        "PYTHONPATH": str(Path.cwd()),
        "VECTORMILL_LOG_LEVEL": "info",
        **urls,
    }
    register_worker(engine)
    submit(engine, make_items(4))
    with log.open("wb") as output, subprocess.Popen(COMMAND, env=environ, stderr=output) as process:
        try:
            wait_for(lambda: count_queued(engine) == 1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            process.kill()
    assert "INFO scheduler.main: Elected; dispatching." in log.read_text()
    with engine.connect() as connection:
        assert is_scheduler_alive(connection)


def count_queued(engine: Engine) -> int:
    queued = text("SELECT count(*) FROM vectormill.chunks WHERE state = 'queued'")
    with engine.connect() as connection:
        return int(connection.execute(queued).scalar_one())
