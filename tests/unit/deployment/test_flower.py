"""Flower shows names of workers and jobs: nobody but this machine sees them without a password."""

import pytest

from tests.commands import run
from vectormill.up import UpOptions

ELSEWHERE = ["0.0.0.0", "::", "192.0.2.7", "mill.example.org"]


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments with which Flower would have run."""
    commands: list[list[str]] = []
    monkeypatch.setattr("flower.command.flower.main", lambda arguments, parent: commands.append(arguments))
    monkeypatch.setenv("VECTORMILL_REDIS_URL", "redis://:secret@127.0.0.1:1/0")
    monkeypatch.delenv("VECTORMILL_FLOWER_BASIC_AUTH", raising=False)
    return commands


def test_without_a_password_flower_is_not_opened_to_other_machines(
    started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    for host in ELSEWHERE:
        assert run("flower", "--host", host) == 2
        assert started == []
        assert "set VECTORMILL_FLOWER_BASIC_AUTH" in capsys.readouterr().err


def test_on_the_loopback_flower_needs_none(started: list[list[str]]) -> None:
    cases: tuple[str, ...] = (
        "127.0.0.1",
        "localhost",
        "::1",
    )
    for host in cases:
        assert run("flower", "--host", host) == 0
        assert f"--address={host}" in started.pop()


def test_with_a_password_flower_is_opened_and_asks_for_it(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VECTORMILL_FLOWER_BASIC_AUTH", "me:moonshine")
    assert run("flower", "--host", "0.0.0.0") == 0
    assert "--basic-auth=me:moonshine" in started[0]


def test_the_host_of_up_is_the_api_s_and_not_flower_s(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, str]] = []

    def run_up(options: UpOptions) -> int:
        ran.append((options.settings.api_host, options.settings.flower_host))
        return 0

    monkeypatch.setattr("vectormill.up.run_up", run_up)
    assert run("up", "--host", "0.0.0.0") == 0
    assert ran == [("0.0.0.0", "127.0.0.1")]


def test_up_opens_no_flower_without_a_password_either(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vectormill.up.run_up", lambda options: pytest.fail("it was started"))
    monkeypatch.setenv("VECTORMILL_FLOWER_HOST", "0.0.0.0")
    assert run("up") == 2
    assert "set VECTORMILL_FLOWER_BASIC_AUTH" in capsys.readouterr().err
