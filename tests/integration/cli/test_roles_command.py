"""`vectormill roles`: an empty database, or one with a single role, gets owner, service and reader of any names."""

import subprocess
from dataclasses import asdict

import psycopg
import pytest
from sqlalchemy import make_url

from tests.clusters import connect
from tests.commands import run
from tests.protocol import claim_next, complete, make_items, submit
from tests.services import connected_engine, empty_database
from vectormill.addresses import to_libpq
from vectormill.db.roles import Roles, run_script
from vectormill.embedded.binaries import find_client

NAMES = {"OWNER_DATABASE_URL": "Ann's_owner", "DATABASE_URL": "mill", "READER_DATABASE_URL": "glance"}


def sees(connection: "psycopg.Connection[tuple[object, ...]]", table: str) -> object:
    row = connection.execute(
        "SELECT has_table_privilege('glance', %s, 'SELECT')", [f"public.{table}"]
    ).fetchone()
    return row and row[0]


def test_the_command_makes_roles_of_the_given_names_with_which_everything_works(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with empty_database(postgres_url) as admin_url:
        urls = {
            variable: make_url(admin_url)
            .set(username=name, password="to/o-s:hort@")
            .render_as_string(hide_password=False)
            for variable, name in NAMES.items()
        }
        for variable, url in urls.items():
            monkeypatch.setenv(f"VECTORMILL_{variable}", url)
        monkeypatch.setenv("ADMIN_URL", admin_url)
        monkeypatch.delenv("VECTORMILL_DATA_DIR", raising=False)
        try:
            with connect(admin_url) as admin:
                admin.execute(
                    "CREATE TABLE public.articles (body text); CREATE TABLE public.drafts (body text)"
                )
                # An earlier start was killed after it had made the roles.
                run_script(admin, "roles.sql", asdict(Roles(*NAMES.values())) | {"own": "yes"})
            for revoked in ("drafts", "articles"):  # a repetition grants nothing again
                assert run("roles", "--admin-env", "ADMIN_URL", "--own-database") == 0, capsys.readouterr()
                assert run("migrate") == 0, capsys.readouterr()
                with connect(urls["READER_DATABASE_URL"]) as reader, connect(admin_url) as admin:
                    reader.execute("SELECT * FROM articles")
                    assert sees(admin, "drafts") is (revoked == "drafts")
                    admin.execute(f"REVOKE SELECT ON public.{revoked} FROM glance")
            with connected_engine(urls["DATABASE_URL"]) as engine:
                submit(engine, make_items(3), collection="docs")
                while not complete(engine, claim_next(engine)):
                    pass
            run("doctor")
            assert "is no superuser, and queries of sources have a role of their own" in "".join(
                " ".join(line.split()) for line in capsys.readouterr().out.splitlines()
            )
            with connect(urls["READER_DATABASE_URL"]) as reader, pytest.raises(psycopg.Error, match="denied"):
                reader.execute("SELECT * FROM docs")
        finally:
            with connect(admin_url) as connection:
                for name in NAMES.values():
                    connection.execute(f'DROP OWNED BY "{name}" CASCADE')
                for name in NAMES.values():
                    connection.execute(f'DROP ROLE "{name}"')


def test_the_printed_script_does_the_same_in_psql(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in NAMES:
        monkeypatch.delenv(f"VECTORMILL_{variable}", raising=False)
    assert run("roles") == 0
    script, passwords = capsys.readouterr().out.split("\\password", 1)
    assert passwords.split("\n")[0] == ' "vectormill_owner"'
    with empty_database(postgres_url) as admin_url:
        psql = [find_client("psql"), to_libpq(admin_url), "--set=ON_ERROR_STOP=1", "--quiet"]
        for _ in range(2):
            done = subprocess.run(psql, input=script, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        with connect(admin_url) as connection:
            granted = "SELECT has_schema_privilege('vectormill_service', 'public', 'CREATE')"
            assert connection.execute(granted).fetchone() == (True,)
            locks = (
                "SELECT has_function_privilege('vectormill_reader', 'pg_advisory_lock(bigint)', 'EXECUTE')"
            )
            assert connection.execute(locks).fetchone() == (True,), (
                "others may need them in a shared database"
            )


def test_roles_that_are_not_three_and_an_administrator_that_is_not_named_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in NAMES:
        monkeypatch.setenv(f"VECTORMILL_{variable}", "postgresql://same@host/name")
    assert run("roles") == 2
    assert "must have different users" in capsys.readouterr().err
    for variable in NAMES:
        monkeypatch.delenv(f"VECTORMILL_{variable}")
    assert run("roles", "--admin-env", "NO_SUCH_URL") == 2
    assert "The environment variable NO_SUCH_URL is not set" in capsys.readouterr().err
