"""An embedded Valkey server (it speaks the Redis protocol), run as a child of this process.

It persists nothing: all its data may be lost at any time (Postgres is the source of truth), so it writes no
files and never delays a write. It listens on a loopback port and requires a generated password. The password
is in a configuration file that only its user can read, not on the command line, which everybody can read.
Started by root, it runs as root.
"""

import contextlib
import secrets
import signal
import threading
import time
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from vectormill.embedded.account import write_private
from vectormill.embedded.binaries import find_valkey_server
from vectormill.embedded.errors import EmbeddedServerFailed, StartCancelled
from vectormill.embedded.server import EmbeddedServer
from vectormill.processes import lifetimes as processes
from vectormill.processes.lifetimes import end_leftovers
from vectormill.processes.logs import open_log, tail_of

START_TIMEOUT_SECONDS = 30.0
BIND_ATTEMPTS = 5
POLL_SECONDS = 0.02
NO_RETRY = Retry(NoBackoff(), 0)
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}

CONFIGURATION = """\
# Written by vectormill at every start.
bind 127.0.0.1
port {port}
protected-mode yes
requirepass {password}
dir {directory}

maxmemory 256mb
# A full broker refuses messages, and the dispatcher sends them later; evicting would drop them unnoticed.
maxmemory-policy noeviction
save ""
appendonly no
tcp-keepalive 60
timeout 0
# Timers of an idle server: half the usual ten a second. Blocked clients' time-outs are late by at most 0.2 s.
hz 5
dynamic-hz yes
daemonize no
logfile ""
"""


class EmbeddedValkey(EmbeddedServer):
    """A Valkey server of a home directory. It has nothing to save, so it is soon killed if it does not stop."""

    name = "valkey"
    ladder = ((signal.SIGTERM, 1.0),)

    def __init__(
        self, home: Path, *, log_path: Path | None = None, cancelled: threading.Event | None = None
    ) -> None:
        super().__init__(home, log_path=log_path, cancelled=cancelled)
        self._directory = home / "valkey"
        self._password = secrets.token_urlsafe(32)

    def _start(self) -> str:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._hold(self._directory)
        end_leftovers(self._directory, "valkey-server", ((signal.SIGTERM, 5.0),))
        # If a free port was taken meanwhile, another one is tried, unless a URL with this port was already returned.
        for _ in range(BIND_ATTEMPTS):
            port = self._port or processes.free_port()
            if self._runs_on(port):
                self._port = port
                return f"redis://:{self._password}@127.0.0.1:{port}/0"
        raise EmbeddedServerFailed(f"Valkey ended while starting:{tail_of(self._log_path)}")

    def _runs_on(self, port: int) -> bool:
        """Start the server and wait until it answers. Return False if it ended instead."""
        configuration = self._directory / "valkey.conf"
        path = str(self._directory.resolve()).replace("\\", "\\\\").replace('"', '\\"')
        text = CONFIGURATION.format(port=port, password=self._password, directory=f'"{path}"')
        write_private(configuration, text)
        with open_log(self._log_path) as output:
            self._process = processes.spawn(
                [str(find_valkey_server()), str(configuration)], env=ENVIRONMENT, output=output
            )
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        client = redis.Redis(
            host="127.0.0.1", port=port, password=self._password, socket_timeout=5, retry=NO_RETRY
        )
        with contextlib.closing(client):
            while not processes.has_ended(self._process):
                # Another server on that port would refuse the password, so success means that ours answers.
                with contextlib.suppress(redis.RedisError):
                    client.ping()
                    return True
                if time.monotonic() > deadline:
                    raise EmbeddedServerFailed(f"Valkey does not answer:{tail_of(self._log_path)}")
                if self._cancelled.wait(POLL_SECONDS):
                    raise StartCancelled
        processes.wait_for_group(self._process)  # reap the process here, before the next attempt replaces it
        return False
