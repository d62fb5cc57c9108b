"""Start, supervise and stop the embedded Postgres and Valkey of one data directory.

DATA_DIR/vectormill.lock   held while a stack runs here; contains its pid and start
DATA_DIR/stack.json        the URLs of the servers, for command-line tools
DATA_DIR/api.key           the own key of the stack (vectormill/keys/own_key.py)
DATA_DIR/postgres/         the cluster, or a link to it (see vectormill.embedded.postgres)
DATA_DIR/valkey/           its configuration
DATA_DIR/logs/             one log for each server
"""

import logging
import os
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Self, get_args

from vectormill.db.roles import Roles, derive_url
from vectormill.domain.errors import VectormillError
from vectormill.embedded.account import make_data_dir
from vectormill.embedded.data_dir import LOCK_NAME, DirectoryLock, RunningStack, remove_note, write_note
from vectormill.embedded.errors import StartCancelled
from vectormill.embedded.postgres import EmbeddedPostgres
from vectormill.embedded.server import EmbeddedServer
from vectormill.embedded.valkey import EmbeddedValkey
from vectormill.processes import lifetimes as processes
from vectormill.processes.supervisor import Backoff
from vectormill.settings import Server

logger = logging.getLogger(__name__)


class EmbeddedStack:
    """A context manager that locks the data directory and runs its servers. It can be used once.

    A server whose URL is given is not started: with both URLs, only the directory is locked. A server that
    dies is restarted with the same URL, after a backoff that grows with repeated failures.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        stopping: threading.Event | None = None,
        **given: str | None,
    ) -> None:
        """Create the stack without starting it; `given` are URLs by the names of their settings.

        Setting `stopping` cancels a start in progress and every restart.
        """
        self.data_dir = data_dir.expanduser().absolute()
        self._stopping = stopping or threading.Event()
        self._lock = DirectoryLock(self.data_dir / LOCK_NAME)
        self._given = given
        self._urls = {"postgres": given.get("database_url"), "valkey": given.get("redis_url")}
        own: tuple[EmbeddedServer, ...] = (
            EmbeddedPostgres(self.data_dir, cancelled=self._stopping),
            EmbeddedValkey(self.data_dir, cancelled=self._stopping),
        )
        self._servers = tuple(server for server in own if self._urls[server.name] is None)
        self._guards = {server.name: threading.Lock() for server in self._servers}
        self._watches: list[threading.Thread] = []

    @property
    def urls(self) -> dict[str, Any]:
        """Return the URLs of Postgres for its roles, and of Valkey, by the names of their settings, once they run.

        Owner and reader are None if Postgres was given, and they were not.
        """
        urls = {name: self._given.get(name) for name in get_args(Server)} | {"redis_url": self.redis_url}
        if self._given.get("database_url") is None:
            roles, admin_url = Roles(), self._url("postgres")
            urls["database_url"] = derive_url(admin_url, roles.service)
            urls["owner_database_url"] = derive_url(admin_url, roles.owner)
            urls["reader_database_url"] = derive_url(admin_url, roles.reader)
        return urls

    @property
    def database_url(self) -> str:
        """Return the SQLAlchemy URL of Postgres for services; available once the stack has started."""
        url: str = self.urls["database_url"]
        return url

    @property
    def redis_url(self) -> str:
        """Return the URL of Valkey; available once the stack has started."""
        return self._url("valkey")

    def _url(self, name: str) -> str:
        url = self._urls[name]
        if url is None:
            raise RuntimeError(f"{name} has no URL before the stack has started")
        return url

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Lock the directory and start both servers at once, except those whose URL was given.

        Raise AlreadyRunning, EmbeddedServerFailed or StartCancelled; nothing is left running then.
        """
        make_data_dir(self.data_dir)
        self._lock.acquire()
        try:
            self._start_servers()
            self.announce()
        except BaseException:
            self.stop()
            raise
        for server in self._servers:
            watch = threading.Thread(
                target=self._keep_alive, args=(server,), name=f"{server.name}-watch", daemon=True
            )
            watch.start()
            self._watches.append(watch)

    def _start_servers(self) -> None:
        if not self._servers:
            return
        with ThreadPoolExecutor(len(self._servers), thread_name_prefix="start") as pool:
            starts = {server.name: pool.submit(server.start) for server in self._servers}
            wait(starts.values(), return_when=FIRST_EXCEPTION)
            failures = [start.exception() for start in starts.values() if start.done() and start.exception()]
            if failures:
                self._stopping.set()  # cancel the other server's start, which may be in a long recovery
        for failure in failures:
            assert failure is not None
            raise failure
        self._urls.update({name: start.result() for name, start in starts.items()})

    def announce(
        self, *, api_url: str | None = None, flower_url: str | None = None, api_key: str | None = None
    ) -> None:
        """Write the note with the URLs of this stack, which `find_running` reads."""
        pid = os.getpid()
        began = processes.started_at(pid) or 0.0
        write_note(
            self.data_dir,
            RunningStack(pid, began, api_url=api_url, flower_url=flower_url, api_key=api_key, **self.urls),
        )

    def _keep_alive(self, server: EmbeddedServer) -> None:
        """Restart the server whenever it ends, until the stack is stopped. Blocks its thread."""
        backoff = Backoff()
        while True:
            began = time.monotonic()
            server.wait()  # wait returns at once if the last start failed
            if self._stopping.is_set():
                return
            pause = backoff.pause_after(time.monotonic() - began)
            logger.warning("%s ended; restarting it in %.1f s", server.name, pause)
            if self._stopping.wait(pause):
                return
            with self._guards[server.name]:
                if self._stopping.is_set():
                    return
                try:
                    server.start()
                except StartCancelled:
                    return
                except (VectormillError, OSError) as error:
                    logger.error("%s could not be restarted: %s", server.name, error)

    def stop(self, timeout: float = 4.0) -> None:
        """Stop the servers, remove the note and release the lock.

        Postgres has `timeout` seconds for a fast shutdown. Stopping twice is not an error.
        """
        self._stopping.set()
        for server in reversed(self._servers):
            with self._guards[server.name]:
                server.stop(timeout)
        for watch in self._watches:
            watch.join()
        self._watches.clear()
        if self._lock.is_held:
            remove_note(self.data_dir)
            self._lock.release()

    def destroy(self) -> None:
        """Stop the servers and delete the database, wherever it is."""
        self.stop()
        for server in self._servers:
            if isinstance(server, EmbeddedPostgres):
                server.destroy()
