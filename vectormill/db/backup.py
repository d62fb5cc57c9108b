"""Write the whole database to a file, and fill an empty database from it, with Postgres' own programs."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final

from sqlalchemy import text
from sqlalchemy.engine import make_url

from vectormill.db.migrations import upgrade
from vectormill.db.session import make_engine
from vectormill.domain.errors import ConfigurationError
from vectormill.files.outputs import open_replacement
from vectormill.settings import process_environment

# pg_dump fails if a table that it has listed is dropped before it is locked, as those of a deleted collection are.
DUMP_ATTEMPTS: Final = 3
PIECE_BYTES: Final = 1 << 20
IS_USED: Final = text("SELECT to_regnamespace('vectormill') IS NOT NULL")
COUNT: Final = text("""
    SELECT (SELECT count(*) FROM vectormill.jobs) AS jobs,
           (SELECT count(*) FROM vectormill.collections) AS collections,
           (SELECT count(*) FROM vectormill.schedules) AS schedules,
           (SELECT count(*) FROM vectormill.api_keys) AS keys
""")


def dump(pg_dump: str, database_url: str, output: Path) -> int:
    """Write the database, as of this moment, to a file of pg_dump, which appears whole or not at all.

    Only this user can read it: it has all texts, and the hashes of keys. Return the number of bytes.
    """
    with open_replacement(output, is_private=True) as file:
        start = file.tell() if file.seekable() else None
        for attempt in range(1, DUMP_ATTEMPTS + 1):
            try:
                return run_client(pg_dump, database_url, "--format=custom", output=file)
            except ConfigurationError:
                if attempt == DUMP_ATTEMPTS or start is None:
                    raise
                file.seek(start)
                file.truncate()
    raise AssertionError("the last attempt returns or raises")


def restore(pg_restore: str, database_url: str, dumped: Path) -> Mapping[str, int]:
    """Fill an empty database from a file of `dump`, all of it or nothing, and migrate it to this release.

    Return how many jobs, collections, schedules and keys there are. Raise ConfigurationError if the database is
    not empty or the file cannot be restored.
    """
    engine = make_engine(database_url, application_name="vectormill restore", pool_size=1)
    try:
        with engine.connect() as connection:
            if connection.scalar(IS_USED):
                raise ConfigurationError(
                    "This database has a schema vectormill already, which a restore would mix with the backup's. "
                    "Create an empty database and set VECTORMILL_DATABASE_URL to it, or name a new --data-dir."
                )
        run_client(
            pg_restore, database_url, "--no-owner", "--exit-on-error", "--single-transaction", str(dumped)
        )
        upgrade(database_url)
        with engine.connect() as connection:
            return connection.execute(COUNT).one()._asdict()
    finally:
        engine.dispose()


def run_client(program: str, database_url: str, *arguments: str, output: BinaryIO | None = None) -> int:
    """Run one of Postgres' programs on a database, and write its output to a file. Return the number of bytes.

    In a terminal it says which table it is at. The password is passed in the environment, because `ps` shows
    arguments. Raise ConfigurationError with the program's last words if it fails.
    """
    url = make_url(database_url).difference_update_query(["pgbouncer"])
    target = url.set(drivername="postgresql", password=None).render_as_string(hide_password=False)
    secret = {} if url.password is None else {"PGPASSWORD": str(url.password)}
    shown = ["--verbose"] if sys.stderr.isatty() else []
    num_bytes = 0
    with (
        tempfile.TemporaryFile() as messages,
        subprocess.Popen(
            [program, f"--dbname={target}", "--no-password", *shown, *arguments],
            env=process_environment() | secret,
            stdout=None if output is None else subprocess.PIPE,
            stderr=None if shown else messages,
        ) as process,
    ):
        if output is not None:
            assert process.stdout is not None
            while part := process.stdout.read(PIECE_BYTES):
                num_bytes += output.write(part)
        if process.wait() != 0:
            messages.seek(0)
            said = messages.read().decode(errors="replace").strip() or "its messages are above"
            raise ConfigurationError(f"{Path(program).name} failed: {said}")
    return num_bytes
