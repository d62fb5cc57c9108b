"""The files of one Postgres cluster: their location, their owner, and how they are created. Starts no server.

A cluster is the directory HOME/postgres, mode 0700, with data/ (PGDATA), run/ (the socket) and the password.

If this process is root, the cluster belongs to the user that Postgres runs as (see
vectormill.embedded.account). If that user cannot reach HOME, for example because it is in /root, the cluster
is created under /var/lib/vectormill/clusters/ and HOME/postgres is a symbolic link to it; no mode of any
parent directory is changed. Only the link refers to such a cluster: moving HOME keeps it, deleting HOME
leaves it behind, and a new HOME of the same name gets a new cluster, so that old data does not reappear.
"""

import hashlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vectormill.embedded.account import (
    Account,
    make_directory,
    owner_of,
    place_of_ours,
    server_account,
    write_private,
)
from vectormill.embedded.binaries import PostgresBinaries
from vectormill.embedded.errors import EmbeddedServerFailed, StartCancelled
from vectormill.processes import lifetimes as processes
from vectormill.processes.logs import open_log, tail_of

logger = logging.getLogger(__name__)

SUPERUSER = "vectormill"
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
    try:
        _wait_for_initdb(process, cancelled)
    finally:
        processes.kill_group(process.pid)
        process.wait()
    if process.returncode != 0:
        raise EmbeddedServerFailed(f"initdb could not create {draft}:{tail_of(log_path)}")
    with (draft / "postgresql.conf").open("a", encoding="utf-8") as configuration:
        configuration.write(f"\ninclude_if_exists = '{SETTINGS_FILE}'\n")
    draft.rename(cluster.data)


def _wait_for_initdb(process: "subprocess.Popen[bytes]", cancelled: threading.Event) -> None:
    deadline = time.monotonic() + INITDB_TIMEOUT_SECONDS
    while not processes.has_ended(process):
        if cancelled.wait(POLL_SECONDS):
            # Let initdb end by itself, which takes 1 to 2 s: killed, it would leak System V shared memory.
            processes.wait_until_ended(process, INITDB_GRACE_SECONDS)
            raise StartCancelled
        if time.monotonic() > deadline:
            raise EmbeddedServerFailed(
                f"initdb did not finish within {INITDB_TIMEOUT_SECONDS:.0f} s; is the disk very slow?"
            )
