"""The composition root of `vectormill up`, which runs everything on one machine until a stop is requested.

Starts the servers, migrates the database, then starts API, scheduler, indexer, workers and Flower. Processes
are started by their command lines and never imported.
"""

import http.client
import json
import logging
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, get_args

from vectormill.addresses import is_loopback_host
from vectormill.domain.errors import Conflict, Unavailable
from vectormill.embedded.errors import StartCancelled
from vectormill.embedded.stack import EmbeddedStack
from vectormill.keys.own_key import OPEN_TO_ALL, OWN_KEY_FILE, TICKET_SECONDS, make_own_key, make_ticket
from vectormill.processes import lifetimes as processes
from vectormill.processes.lifetimes import end_child
from vectormill.processes.logs import open_log, tail_of
from vectormill.processes.stopping import StopSignals
from vectormill.processes.supervisor import ChildNotReady, ChildSpec, Supervisor
from vectormill.settings import PREFIX, Server, Settings, describe_data_dir, drop_secrets

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "vectormill.cli")
READY_TIMEOUT_SECONDS = 300.0  # a worker may load a large model from a slow disk
# The settings that are by default the folder in which `up` is started.
ROOTS = ("source_root", "output_root")
MIGRATION_POLL_SECONDS = 0.1
PROBE_TIMEOUT_SECONDS = 3.0
# Which only `migrate`, and which only processes that read sources are given.
OF_ROLES = ("VECTORMILL_OWNER_DATABASE_URL", "VECTORMILL_READER_DATABASE_URL")
WORKER_LINES = 4  # the last lines of each worker's log, which have the reason
# A stop takes under 15 s: the children, each server, and at most 2 s for Postgres's immediate shutdown.
CHILDREN_GRACE_SECONDS = 7.0
SERVERS_GRACE_SECONDS = 2.5
REDIS_URL = "VECTORMILL_REDIS_URL"
# Flower shows what stands in Redis, and gets no other secret.
OF_FLOWER = (REDIS_URL, "VECTORMILL_FLOWER_BASIC_AUTH")
# Only root may be able to read Python, model files and their caches, or to use the GPU.
AS_ROOT = (
    "started as root: Postgres runs as an unprivileged user, everything else as root, because that user may not be "
    "able to read Python, the models or their caches; to run nothing as root, start vectormill as an ordinary user"
)


class MigrationFailed(Unavailable):
    """The database could not be migrated."""


class PortTaken(Conflict):
    """Another program is using a port that a process of this stack needs."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The options of `vectormill up`.

    Servers whose URL the settings do not have are started under their `data_dir`; port 0 means any free one.
    """

    settings: Settings
    models: tuple[str, ...]  # one worker for each; if empty, one worker that chooses its model
    environ: Mapping[str, str]  # the environment that the children inherit
    command: tuple[str, ...] = COMMAND


def run_up(options: UpOptions, out: TextIO = sys.stdout) -> int:
    """Run everything until SIGINT, SIGTERM or SIGHUP, and return 0 then. Call in the main thread.

    Write a line that starts with "ready", and one with the next steps, to `out` when all processes are healthy. If
    that fails, raise AlreadyRunning, PortTaken, EmbeddedServerFailed, MigrationFailed or ChildNotReady. Nothing is
    left running either way.
    """
    if os.geteuid() == 0:
        logger.warning(AS_ROOT)
    with StopSignals() as stopping:
        settings = options.settings
        given = {name: getattr(settings, name) for name in get_args(Server)}
        stack = EmbeddedStack(settings.data_dir, stopping=stopping, **given)
        try:
            stack.start()
            _run_children(options, stack, stopping, out)
        except StartCancelled:
            logger.info("stopped while starting")
        finally:
            stack.stop(SERVERS_GRACE_SECONDS)
    return 0


def _run_children(options: UpOptions, stack: EmbeddedStack, stopping: threading.Event, out: TextIO) -> None:
    settings = options.settings
    environ = {
        **{name: value for name, value in options.environ.items() if name not in OF_ROLES},
        "VECTORMILL_DATA_DIR": str(stack.data_dir),
        "PYTHONUNBUFFERED": "1",  # otherwise the last lines of a killed child would stay in its buffer
        "VECTORMILL_DATABASE_URL": stack.database_url,
        REDIS_URL: stack.redis_url,
    }
    for name in ROOTS:
        environ[PREFIX + name.upper()] = os.pathsep.join(map(str, getattr(settings, name) or (Path.cwd(),)))
    owner, reader = stack.urls["owner_database_url"], stack.urls["reader_database_url"]
    of_owner = environ | ({} if owner is None else {OF_ROLES[0]: owner})
    environ |= {} if reader is None else {OF_ROLES[1]: reader}
    logs = stack.data_dir / "logs"
    api = choose_endpoint(settings.api_host, settings.api_port, "--api-port")
    flower = choose_endpoint(settings.flower_host, settings.flower_port, "--flower-port")
    _migrate((*options.command, "migrate"), of_owner, logs / "migrate.log", stopping)
    refuse_to_open_without_key(settings.api_host, stack)
    if settings.open_loopback:
        environ[f"{PREFIX}OPEN_LOOPBACK"] = "true"
    is_asked = is_loopback_host(settings.api_host) and not settings.open_loopback
    own_key = make_own_key(stack.data_dir) if is_asked else None
    children = plan_children(options, api, flower, environ, logs)
    supervisor = Supervisor(children, stopping=stopping)
    try:
        if supervisor.start(READY_TIMEOUT_SECONDS):
            needed_key = own_key if own_key is not None and api.refuses_its_user() else None
            stack.announce(api_url=api.url, flower_url=flower.url, api_key=needed_key)
            out.write(describe_start(api.url, flower.url, stack.data_dir))
            if needed_key is not None:
                out.write(describe_key(api.url, stack.data_dir, needed_key))
            if settings.open_loopback:
                out.write(f"open   {OPEN_TO_ALL}\n")
            out.flush()
            supervisor.wait(other_logs=[logs / "postgres.log", logs / "valkey.log"])
    finally:
        supervisor.stop(CHILDREN_GRACE_SECONDS)


def describe_start(api_url: str, flower_url: str, data_dir: Path) -> str:
    """Return the lines with the addresses of a stack that is ready, and with commands for another terminal."""
    option = describe_data_dir(data_dir)
    return (
        f"ready  api {api_url}  console {api_url}/console  flower {flower_url}  data {data_dir}\n"
        f"next   in another terminal: `vectormill submit FILE --collection docs{option}`, "
        f'and then `vectormill search docs "WORDS"{option}`\n'
    )


def describe_key(api_url: str, data_dir: Path, own_key: str) -> str:
    """Return the lines with the key that requests need where the API cannot tell whose they are."""
    key = f"$(cat {shlex.quote(str(data_dir / OWN_KEY_FILE))})"
    ticket = make_ticket(own_key, int(time.time()))
    return (
        "key    this system does not tell the API which user a request comes from, so each needs the key of this "
        "stack; the commands of vectormill and vectormill.Client find it by themselves\n"
        f'       curl -H "Authorization: Bearer {key}" {api_url}/v1/jobs\n'
        f'       export OPENAI_BASE_URL={api_url}/v1 OPENAI_API_KEY="{key}"\n'
        f"       {api_url}/console/login?ticket={ticket}  signs one browser in, within "
        f"{TICKET_SECONDS // 60} minutes\n"
    )


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address on which a child listens, with requests that check whether it is ready."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """Return the URL under which this machine can reach the child."""
        host = self._reachable_host()
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def _reachable_host(self) -> str:
        """Return the host to connect to: the loopback for a server that listens on all addresses."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 - read, not bound

    def answer(self, path: str) -> bytes | None:
        """Return the body of a GET if the answer is 200, else None."""
        status, body = self.ask(path)
        return body if status == 200 else None

    def refuses_its_user(self) -> bool:
        """Return whether the API cannot tell that a request comes from the user who runs it."""
        status, body = self.ask("/v1/jobs?limit=1")
        return status == 401 and b"other-user" in body

    def ask(self, path: str) -> tuple[int, bytes]:
        """Return the status and the body of a GET; 0 if there is no answer. Proxies are not used."""
        connection = http.client.HTTPConnection(
            self._reachable_host(), self.port, timeout=PROBE_TIMEOUT_SECONDS
        )
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def readiness(self) -> dict[str, Any]:
        """Return the API's report on itself, workers and scheduler; empty if it is not ready."""
        try:
            said = json.loads(self.answer("/readyz") or b"{}")
        except ValueError:
            return {}
        return said if isinstance(said, dict) else {}


def refuse_to_open_without_key(host: str, stack: EmbeddedStack) -> None:
    """Raise ConfigurationError if an API on a public host has no key.

    The API would raise the same error, but in a log that nobody reads.
    """
    if is_loopback_host(host):
        return
    # Imported late, because on the loopback this process needs no SQLAlchemy, which takes 20 MiB.
    from vectormill.keys.api_keys import require_key_beyond_loopback

    require_key_beyond_loopback(stack.database_url, host, f" --data-dir {stack.data_dir}")


def choose_endpoint(host: str, port: int, flag: str) -> Endpoint:
    """Choose the address on which a child listens; port 0 means any free one.

    Raise PortTaken if the port is in use. This is checked before the child is started, because a process of
    another stack on that port would answer the readiness check.
    """
    if port and not processes.is_port_free(port, host):
        raise PortTaken(
            f"cannot listen on {host} port {port}: another program uses the port, or this machine does not have the "
            f"address; stop that program, or use another {flag}"
        )
    return Endpoint(host, port or processes.free_port())


def plan_children(
    options: UpOptions, api: Endpoint, flower: Endpoint, environ: Mapping[str, str], logs: Path
) -> list[ChildSpec]:
    """Return the specifications of all children, in the order in which messages name them. Start nothing."""

    def child(name: str, ready: Callable[[], bool], *arguments: str) -> ChildSpec:
        left_out = () if name in ("api", "indexer") else OF_ROLES
        given = {variable: value for variable, value in environ.items() if variable not in left_out}
        return ChildSpec(name, (*options.command, *arguments), given, ready, logs / f"{name}.log")

    names = [_worker_name(model, len(options.models)) for model in options.models] or ["worker"]

    def workers_are_ready() -> bool:
        said = api.readiness()
        if said.get("failing_workers"):
            tails = "".join(tail_of(logs / f"{name}.log", WORKER_LINES) for name in names)
            raise ChildNotReady(f"a worker cannot load its model:{tails}")
        return int(said.get("workers") or 0) >= len(names)

    workers = [
        child(_worker_name(model, len(options.models)), workers_are_ready, "worker", "--model", model)
        for model in options.models
    ] or [child("worker", workers_are_ready, "worker")]
    return [
        child("api", lambda: api.answer("/readyz") is not None, "api", *_listen(api)),
        child("scheduler", lambda: bool(api.readiness().get("scheduler")), "scheduler"),
        child("indexer", lambda: bool(api.readiness().get("indexer")), "indexer"),
        *workers,
        replace(
            child("flower", lambda: flower.answer("/healthcheck") is not None, "flower", *_listen(flower)),
            env=drop_secrets(environ) | {name: environ[name] for name in OF_FLOWER if name in environ},
        ),
    ]


def _listen(endpoint: Endpoint) -> tuple[str, ...]:
    return ("--host", endpoint.host, "--port", str(endpoint.port))


def _worker_name(model: str, num_models: int) -> str:
    """Return a name for a worker that is valid as a file name, since a model may be a path or a hub name."""
    if num_models == 1:
        return "worker"
    return "worker-" + "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in model)


def _migrate(
    argv: tuple[str, ...], environ: Mapping[str, str], log_path: Path, stopping: threading.Event
) -> None:
    with open_log(log_path) as output:
        process = processes.spawn(argv, env=environ, output=output)
    try:
        while not processes.has_ended(process):
            if stopping.wait(MIGRATION_POLL_SECONDS):
                raise StartCancelled
    finally:
        # A migration is one transaction, so killing it leaves the database unchanged.
        end_child(process, ((signal.SIGTERM, CHILDREN_GRACE_SECONDS),))
    if process.returncode != 0:
        raise MigrationFailed(f"the database could not be migrated:{tail_of(log_path)}")
