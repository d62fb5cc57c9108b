"""Both servers together: one run per directory, found by others, restarted when they die, gone when it ends."""

import os
import stat
import threading
from pathlib import Path

import psycopg
import pytest
import redis

from tests.clusters import servers_of, value
from vectormill.embedded.data_dir import find_running
from vectormill.embedded.errors import AlreadyRunning, EmbeddedServerFailed, StartCancelled
from vectormill.embedded.stack import EmbeddedStack
from vectormill.processes import lifetimes as processes


def valkeys_of(data_dir: Path) -> list[int]:
    return [process.pid for process in processes.running_in(data_dir / "valkey", "valkey-server")]


def answers(stack: EmbeddedStack) -> bool:
    try:
        with redis.Redis.from_url(stack.redis_url, socket_timeout=5) as client:
            return bool(client.ping()) and value(stack.database_url, "SELECT 1") == 1
    except (redis.RedisError, psycopg.OperationalError):
        return False


def test_a_stack_is_found_while_it_runs_and_not_afterwards(data_dir: Path) -> None:
    assert find_running(data_dir) is None
    with EmbeddedStack(data_dir) as stack:
        assert answers(stack)
        found = find_running(data_dir)
        assert found is not None
        assert (found.database_url, found.redis_url) == (stack.database_url, stack.redis_url)
        assert (found.pid, found.api_url) == (os.getpid(), None)
        assert stat.S_IMODE((data_dir / "stack.json").stat().st_mode) == 0o600
        stack.announce(api_url="http://127.0.0.1:1", flower_url="http://127.0.0.1:2")
        found = find_running(data_dir)
        assert found is not None
        assert found.api_url == "http://127.0.0.1:1"
        with pytest.raises(AlreadyRunning) as raised:
            EmbeddedStack(data_dir).start()
        assert str(raised.value) == (
            f"another vectormill (pid {os.getpid()}) is running on {data_dir}: "
            "stop it, or use another --data-dir"
        )
        assert find_running(data_dir) == found  # the refused one took nothing away
    assert find_running(data_dir) is None
    assert servers_of(data_dir) == valkeys_of(data_dir) == []
    with EmbeddedStack(data_dir) as stack:
        assert answers(stack)


def test_servers_whose_url_is_given_are_not_started_but_the_directory_is_held(data_dir: Path) -> None:
    given = ("postgresql+psycopg://elsewhere/db", "redis://elsewhere/0")
    with EmbeddedStack(data_dir, database_url=given[0], redis_url=given[1]) as stack:
        assert (stack.database_url, stack.redis_url) == given
        assert not (data_dir / "postgres").exists()
        with pytest.raises(AlreadyRunning):
            EmbeddedStack(data_dir).start()


def test_when_one_server_cannot_start_the_other_is_stopped(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vectormill.embedded.valkey.CONFIGURATION", "hz often\n")
    with pytest.raises(EmbeddedServerFailed, match="Valkey ended while starting"):
        EmbeddedStack(data_dir).start()
    assert servers_of(data_dir) == []
    assert find_running(data_dir) is None


def test_a_start_is_given_up_when_a_stop_is_asked_for(data_dir: Path) -> None:
    stopping = threading.Event()
    stopping.set()
    with pytest.raises(StartCancelled):
        EmbeddedStack(data_dir, stopping=stopping).start()
    assert servers_of(data_dir) == valkeys_of(data_dir) == []
