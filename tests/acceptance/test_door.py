"""What a stranger finds: arguments without secrets, workers that obey nobody, and a door that wants a key."""

from contextlib import suppress

import httpx
import psutil
from sqlalchemy import make_url

from tests.acceptance.stack import Stack
from tests.waiting import wait_for
from vectormill.broker.app import make_app


def test_no_secret_stands_in_the_arguments_of_a_process(stack: Stack) -> None:
    urls = stack.urls()
    secrets = [str(make_url(urls[name]).password) for name in ("database_url", "redis_url")]
    assert all(len(secret) > 30 for secret in secrets)
    commands = []
    for process in stack.processes():
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            commands.append(" ".join(process.cmdline()))
    assert len(commands) > 6
    assert [command for command in commands if any(secret in command for secret in secrets)] == []


def test_the_model_process_knows_no_service(stack: Stack) -> None:
    runner = next(process for process in stack.processes() if is_runner(process))
    known = runner.environ()
    assert "PATH" in known
    assert not {"VECTORMILL_DATABASE_URL", "VECTORMILL_REDIS_URL"} & known.keys()


def is_runner(process: psutil.Process) -> bool:
    return any("runner_process" in word for word in process.cmdline())


def test_workers_obey_nobody_who_speaks_through_redis_and_flower_still_shows_them(stack: Stack) -> None:
    def shown() -> bool:
        page = httpx.get(f"http://127.0.0.1:{stack.flower_port}/workers", params={"json": "1"}).json()
        return any(worker["status"] for worker in page["data"])

    wait_for(shown, 60, "Flower shows the worker")
    remote = make_app(stack.urls()["redis_url"]).control
    assert remote.ping(timeout=3) == []
    remote.shutdown()
    assert remote.ping(timeout=3) == []
    assert shown()
