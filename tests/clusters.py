"""Directories for short-lived Postgres clusters, and shortcuts for queries to a running Postgres."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import psycopg

from vectormill.processes import lifetimes as processes

# A program that starts a server on the directory given as argument, prints the URL, and stops when its stdin
# ends.
START_AND_WAIT = """
import logging, sys, time
from pathlib import Path
from vectormill.embedded.postgres import EmbeddedPostgres
logging.basicConfig(level=logging.INFO)
server = EmbeddedPostgres(Path(sys.argv[1]))
print(server.start(), flush=True)
sys.stdin.read()
server.stop()
"""


@contextmanager
def new_directory() -> Iterator[Path]:
    """Yield a new directory, in memory if there is /dev/shm.

    A new cluster consists of a thousand files that are synced and soon deleted.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="vm-", dir=memory if memory.is_dir() else None) as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield directory


def read_admin_url(data_dir: Path, database_url: str) -> str:
    """Return the administrator's URL of a data directory's Postgres, of which `database_url` is that of its service."""
    password = quote((data_dir / "postgres" / "password").read_text().strip(), safe="")
    return f"postgresql://vectormill:{password}@{database_url.rpartition('@')[2]}"


def connect(url: str) -> "psycopg.Connection[tuple[object, ...]]":
    return psycopg.connect(url.replace("+psycopg", ""), autocommit=True)


def value(url: str, query: str) -> object:
    with connect(url) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def servers_of(home: Path) -> list[int]:
    return [process.pid for process in processes.running_in(home / "postgres" / "data", "postgres")]
