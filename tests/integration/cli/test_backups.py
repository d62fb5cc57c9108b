"""A backup is made of a database that exists, and repeated if pg_dump met a table that was being dropped."""

import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.commands import run
from vectormill.db.backup import dump
from vectormill.domain.errors import ConfigurationError
from vectormill.embedded.binaries import find_client
from vectormill.settings import Settings

FAILS = """#!/bin/sh
echo attempt >> {log}
if [ "$(wc -l < {log})" -le {failures} ]; then
    echo 'pg_dump: error: relation "vectormill.generation_7" does not exist' >&2
    exit 1
fi
exec {program} "$@"
"""


def test_of_a_directory_without_a_database_there_is_no_backup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VECTORMILL_DATABASE_URL", raising=False)
    assert run("backup", str(tmp_path / "all.dump"), "--data-dir", str(tmp_path / "none")) == 2
    assert "There is no database in" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "neither a file nor a new database"


@pytest.mark.parametrize("failures", [2, 3])
def test_a_dump_that_met_a_dropped_table_is_repeated(roles: Settings, tmp_path: Path, failures: int) -> None:
    program, log, output = tmp_path / "pg_dump", tmp_path / "log", tmp_path / "vectormill.dump"
    program.write_text(FAILS.format(log=log, failures=failures, program=find_client("pg_dump")))
    program.chmod(0o755)
    if failures == 2:
        dump(str(program), roles, output)
        assert output.read_bytes().startswith(b"PGDMP")
    else:
        with pytest.raises(ConfigurationError, match="generation_7"):
            dump(str(program), roles, output)
        assert not output.exists()
    assert len(log.read_text().splitlines()) == 3
    assert not list(tmp_path.glob(".*"))


def test_backups_that_overlap_are_both_whole_and_only_their_user_s(roles: Settings, tmp_path: Path) -> None:
    output = tmp_path / "vectormill.dump"
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(dump, find_client("pg_dump"), roles, output) for _ in range(3)]:
            done.result()
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["vectormill.dump"]
    listed = subprocess.run([find_client("pg_restore"), "--list", output], capture_output=True, check=True)
    assert b"TABLE DATA vectormill jobs" in listed.stdout
