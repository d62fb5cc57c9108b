"""Write the whole database to a file, and fill an empty database from it, with Postgres' own programs."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final, cast

from sqlalchemy import text
from sqlalchemy.engine import make_url

from vectormill.db.migrations import migrate
from vectormill.db.roles import Roles
from vectormill.db.session import make_engine
from vectormill.domain.errors import ConfigurationError
from vectormill.files.outputs import open_replacement
from vectormill.settings import Settings, process_environment

# pg_dump fails if a table that it has listed is dropped before it is locked, as those of a deleted collection are.
DUMP_ATTEMPTS: Final = 3
PIECE_BYTES: Final = 1 << 20
# `vectormill roles` makes it as a superuser, whose rights a restored one would not have.
LEFT_OUT: Final = "--exclude-schema=vectormill_server"
# Lines in the list of a backup's contents that only the owner of an extension may restore.
OF_VECTOR: Final = re.compile(
    rb"^\d+; \d+ \d+ (EXTENSION - vector|COMMENT - EXTENSION vector) *\n", re.MULTILINE
)
FIND_PREPARED: Final = text("""
    SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'vector') AS has_vector,
           EXISTS (SELECT FROM pg_roles WHERE rolname = :name) AS has_roles
""")
IS_USED: Final = text("SELECT to_regnamespace('vectormill') IS NOT NULL")
COUNT: Final = text("""
    SELECT (SELECT count(*) FROM vectormill.jobs) AS jobs,
           (SELECT count(*) FROM vectormill.collections) AS collections,
           (SELECT count(*) FROM vectormill.schedules) AS schedules,
           (SELECT count(*) FROM vectormill.api_keys) AS keys
""")


def dump(pg_dump: str, settings: Settings, output: Path) -> int:
    """Write the database, as of this moment, to a file of pg_dump, which appears whole or not at all.

    Only this user can read it: it has all texts, and the hashes of keys. Return the number of bytes.
    """
    with open_replacement(output, is_private=True) as file:
        start = file.tell() if file.seekable() else None
        for attempt in range(1, DUMP_ATTEMPTS + 1):
            try:
                return run_client(pg_dump, settings.owner_url, "--format=custom", LEFT_OUT, output=file)
            except ConfigurationError:
                if attempt == DUMP_ATTEMPTS or start is None:
                    raise
                file.seek(start)
                file.truncate()
    raise AssertionError("the last attempt returns or raises")


def restore(pg_restore: str, settings: Settings, dumped: Path) -> Mapping[str, int]:
    """Fill an empty database from a file of `dump`, all of it or nothing, and migrate it to this release.

    What the backup grants is granted again if this server has the roles of Vectormill. Return how many jobs,
    collections, schedules and keys there are. Raise ConfigurationError if the database is not empty or the file cannot
    be restored.
    """
    url = settings.owner_url
    engine = make_engine(url, application_name="vectormill restore", pool_size=1)
    try:
        with engine.connect() as connection:
            if connection.scalar(IS_USED):
                raise ConfigurationError(
                    "This database has a schema vectormill already, which a restore would mix with the backup's. "
                    "Create an empty database and set VECTORMILL_DATABASE_URL to it, or name a new --data-dir."
                )
            has_vector, has_roles = connection.execute(FIND_PREPARED, {"name": Roles().service}).one()
        with tempfile.NamedTemporaryFile() as contents:
            run_client(pg_restore, url, "--list", str(dumped), output=cast("BinaryIO", contents))
            contents.seek(0)
            kept = OF_VECTOR.sub(b"", contents.read()) if has_vector else contents.read()
            contents.truncate(0)
            contents.seek(0)
            contents.write(kept)
            contents.flush()
            grants = () if has_roles else ("--no-acl",)
            options = (f"--use-list={contents.name}", "--no-owner", "--exit-on-error", "--single-transaction")
            run_client(pg_restore, url, *options, *grants, str(dumped))
        migrate(settings)
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
