"""A real Valkey: nobody reads its password, it comes back at the same address, and it dies with us."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from vectormill.embedded.errors import AlreadyRunning, EmbeddedServerFailed
from vectormill.embedded.valkey import EmbeddedValkey
from vectormill.processes import lifetimes as processes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path)
    yield server
    server.stop()


def client_of(url: str) -> "redis.Redis":
    return redis.Redis.from_url(url, socket_timeout=5)


def servers_of(home: Path) -> list[int]:
    return [process.pid for process in processes.running_in(home / "valkey", "valkey-server")]


def test_the_server_keeps_nothing_and_refuses_rather_than_evicts(server: EmbeddedValkey) -> None:
    with client_of(server.start()) as client:
        wanted = {"maxmemory": "268435456", "maxmemory-policy": "noeviction", "save": "", "appendonly": "no"}
        assert {name: client.config_get(name)[name] for name in wanted} == wanted


def test_only_its_owner_can_read_the_password(server: EmbeddedValkey, tmp_path: Path) -> None:
    url = server.start()
    password = url.split(":")[2].split("@")[0]
    assert len(password) > 32
    assert server.pid is not None
    assert not any(password in word for word in psutil.Process(server.pid).cmdline())
    configuration = tmp_path / "valkey" / "valkey.conf"
    assert password in configuration.read_text()
    assert configuration.stat().st_mode & 0o777 == 0o600
    with client_of(url.replace(password, "wrong")) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()


def test_the_server_comes_back_at_the_same_address(server: EmbeddedValkey, tmp_path: Path) -> None:
    url = server.start()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    assert server.start() == url
    with client_of(url) as client:
        assert client.ping()
    server.stop()
    assert servers_of(tmp_path) == []
    server.stop()  # again is no error


def test_a_second_server_on_the_same_home_is_refused(server: EmbeddedValkey, tmp_path: Path) -> None:
    server.start()
    with pytest.raises(AlreadyRunning, match=rf"vectormill \(pid {os.getpid()}\) is running on"):
        EmbeddedValkey(tmp_path).start()
    assert len(servers_of(tmp_path)) == 1


def test_a_server_left_running_is_ended(server: EmbeddedValkey, tmp_path: Path) -> None:
    abandoned = EmbeddedValkey(tmp_path)
    abandoned.start()
    assert abandoned._lock is not None
    abandoned._lock.release()  # as the kernel does when the holder is killed; on macOS the server lives on
    server.start()
    assert servers_of(tmp_path) == [server.pid]
    abandoned.stop()


def test_a_server_that_cannot_start_says_why_with_its_own_words(
    server: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vectormill.embedded.valkey.CONFIGURATION", "hz often\n")
    with pytest.raises(EmbeddedServerFailed, match=r"(?s)Valkey ended while starting:.*hz"):
        server.start()
    assert server.pid is None


def test_a_directory_may_have_any_name(tmp_path: Path) -> None:
    odd = tmp_path / 'a "b" \\ ü'
    odd.mkdir()
    server = EmbeddedValkey(odd)
    try:
        with client_of(server.start()) as client:
            assert client.ping()
        assert servers_of(odd) == [server.pid]
    finally:
        server.stop()
