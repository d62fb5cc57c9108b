"""`vectormill keys`, straight to a real Postgres: of the settings, or of a data directory."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from tests.commands import run as run_command
from tests.database import execute
from tests.services import connected_engine
from vectormill.embedded.stack import EmbeddedStack
from vectormill.keys.api_key import hash_secret
from vectormill.keys.api_keys import load_keys

Run = Callable[..., int]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, database_url: str) -> None:
    monkeypatch.setenv("VECTORMILL_DATABASE_URL", database_url)
    monkeypatch.delenv("VECTORMILL_API_KEY", raising=False)


run = partial(run_command, "keys")


def list_states(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    capsys.readouterr()
    assert run("list", "--json") == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {record["name"]: record["state"] for record in records}


def test_a_key_is_shown_once_alone_on_stdout_and_nowhere_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("create", "laptop", "--scope", "read", "--expires", "90d") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("vmk_")
    assert len(shown.out.split()) == 1
    assert "shown this once" in shown.err
    assert run("list") == 0
    _, line = capsys.readouterr().out.splitlines()
    assert line.split("\t")[:3] == ["laptop", "read", "valid"]
    assert shown.out.strip() not in line


def test_a_name_is_taken_until_its_key_is_revoked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("create", "laptop") == 0
    assert run("create", "laptop") == 2
    assert "A key named 'laptop'" in capsys.readouterr().err
    assert run("revoke", "laptop") == 0
    assert "It was the last key" in capsys.readouterr().out
    assert list_states(capsys) == {"laptop": "revoked"}
    assert run("create", "laptop") == 0
    assert list_states(capsys) == {"laptop": "valid"}
    assert run("revoke", "nobody") == 2
    assert "`vectormill keys list` lists all" in capsys.readouterr().err


def test_a_key_from_the_environment_is_stored_once_and_another_value_replaces_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    first, second = ("vmk_" + letter * 64 for letter in "ab")
    for value, status, said in (
        (None, 2, "VECTORMILL_API_KEY is not set"),
        ("password", 2, "openssl rand -hex 32"),
        (first, 0, "Stored the key compose (admin)."),
        (first, 0, "is stored already as compose (admin)"),
        (second, 0, "Stored the key compose (admin) in place of its former value, which is revoked."),
        (second, 0, "is stored already as compose (admin)"),
        (first, 2, "The key in VECTORMILL_API_KEY was compose and is revoked: set another one, such as"),
    ):
        if value is not None:
            monkeypatch.setenv("VECTORMILL_API_KEY", value)
        assert run("create", "compose", "--scope", "admin", "--from-environment") == status
        shown = capsys.readouterr()
        assert said in shown.err
        assert shown.out == ""
    with engine.connect() as connection:
        assert [(key.hash, key.scope) for key in load_keys(connection)] == [(hash_secret(second), "admin")]
    monkeypatch.setenv("VECTORMILL_API_KEY", second)
    let_keys_expire()
    assert run("create", "compose", "--from-environment") == 2
    assert "was compose and is expired" in capsys.readouterr().err


def test_two_deployments_at_once_store_the_same_new_key(
    monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    command = [sys.executable, "-m", "vectormill.cli", "keys", "create", "helm", "--from-environment"]
    secrets = ["vmk_" + letter * 64 for letter in "ab"]
    for secret in secrets:
        environment = {**os.environ, "VECTORMILL_API_KEY": secret}
        both = [subprocess.Popen(command, env=environment) for _ in range(2)]
        assert [each.wait(100) for each in both] == [0, 0]
    with engine.connect() as connection:
        assert [key.hash for key in load_keys(connection)] == [hash_secret(secrets[-1])]


def test_a_data_directory_gets_its_first_key_before_its_first_start(data_dir: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VECTORMILL_")}

    def keys(*arguments: str) -> str:
        command = [sys.executable, "-m", "vectormill.cli", "keys", *arguments, "--data-dir", str(data_dir)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=100, check=True
        )
        return done.stdout

    assert keys("create", "me").startswith("vmk_")
    with EmbeddedStack(data_dir, redis_url="redis://"):  # as if `up` ran there
        assert "\nme\twrite\tvalid" in keys("list")
    assert not (data_dir / "stack.json").exists()


start_api = partial(run_command, "api", "--port", "1")


def test_an_api_without_a_key_does_not_start_for_other_machines(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ["0.0.0.0", "::", "192.0.2.7"]:
        assert start_api("--host", host) == 2
        said = capsys.readouterr().err
        assert f"Refusing to listen on {host} without an API key" in said
        assert "Create a key with `vectormill keys create NAME`" in said
        run("create", "short", "--expires", "1h")
        let_keys_expire()
        assert start_api("--host", host) == 2


def let_keys_expire() -> None:
    with connected_engine(os.environ["VECTORMILL_DATABASE_URL"]) as engine, engine.begin() as connection:
        connection.execute(text("UPDATE vectormill.api_keys SET expires_at = now()"))


def test_a_database_that_was_never_migrated_is_told_so(
    admin: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(admin, "DROP SCHEMA vectormill CASCADE")
    for status in (start_api("--host", "0.0.0.0"), run("create", "me"), run("list"), run("revoke", "me")):
        assert status == 2
    assert capsys.readouterr().err.count("run `vectormill migrate` first") == 4
