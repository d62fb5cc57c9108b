"""Commands that run a process, or `up` for all, and those that migrate, back up and restore the database."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from vectormill.cli.command import command, top
from vectormill.cli.files import name_output
from vectormill.cli.printing import tell
from vectormill.files.outputs import check_outputs

if TYPE_CHECKING:
    from vectormill.settings import Server, Settings


# The servers that a process cannot do without.
NEEDED: Final[Mapping[str, "tuple[Server, ...]"]] = {
    "api": ("database_url",),
    "indexer": ("database_url",),
    "launcher": ("database_url", "redis_url"),
    "scheduler": ("database_url", "redis_url"),
}
# The processes that start tracing here; workers start it in worker/app.py.
TRACED: Final = ("api", "indexer", "scheduler")


@command(
    top,
    "vectormill up --data-dir ./data --api-port 8000",
    note="The line `ready` shows the URLs. Ctrl-C stops everything; jobs continue at the next `up`.",
)
def up(
    *,
    data_dir: Path | None = None,
    host: str | None = None,
    api_port: int | None = None,
    flower_port: int | None = None,
    model: list[str] | None = None,
    open: bool = False,
) -> None:
    """Run every process on this machine in the foreground, with its own Postgres and Valkey.

    With VECTORMILL_DATABASE_URL or VECTORMILL_REDIS_URL set, those are used instead.

    Args:
        api_port (PORT, 1 to 65535):  [default: 8000]
        flower_port (PORT, 1 to 65535):  [default: 5555]
        model (NAME): A model to serve. May be repeated.
        open: Let every user of this machine in while no API key exists, and not only the one who starts it.
    """
    from vectormill.broker.flower import refuse_without_password
    from vectormill.extras import require_service
    from vectormill.settings import process_environment

    settings = begin_process(
        "up",
        data_dir=data_dir,
        api_host=host,
        api_port=api_port,
        flower_port=flower_port,
        open_loopback=open or None,
    )
    require_service(is_embedded=settings.database_url is None or settings.redis_url is None)

    from vectormill.up import UpOptions, run_up

    refuse_without_password(settings.flower_host, settings.flower_basic_auth)
    raise typer.Exit(run_up(UpOptions(settings, tuple(model or ()), process_environment())))


@command(top, "vectormill api --host 0.0.0.0 --port 8000")
def api(*, host: str | None = None, port: int | None = None, data_dir: Path | None = None) -> None:
    """Run the HTTP API. Needs Postgres, and works without Redis; its reference is at /docs.

    Args:
        port (PORT, 1 to 65535):  [default: 8000]
    """
    from api.app import run

    run(begin_process("api", data_dir=data_dir, api_host=host, api_port=port))


@command(top, "vectormill scheduler")
def scheduler(*, data_dir: Path | None = None) -> None:
    """Run the scheduler: it dispatches chunks, recovers lost ones, and removes old data.

    Any number may run; a lock in Postgres elects one.
    """
    from scheduler.main import run

    run(begin_process("scheduler", data_dir=data_dir))


@command(top, "vectormill indexer")
def indexer(*, data_dir: Path | None = None) -> None:
    """Run the indexer, which keeps collections in step with their sources. Needs only Postgres.

    Any number may run; each takes up to VECTORMILL_INDEXER_RUNS runs. Secrets of sources must be set for this process.
    """
    from indexer.main import run

    run(begin_process("indexer", data_dir=data_dir))


@command(top, "vectormill worker --model all-MiniLM-L6-v2 --devices cuda:0,cuda:1")
def worker(
    *, model: list[str] | None = None, devices: str | None = None, data_dir: Path | None = None
) -> None:
    """Run workers: one pinned Celery worker per replica of the placement, restarted when it dies.

    Args:
        model (NAME): A model to serve. May be repeated.  [default: all registered]
        devices (LIST): auto, cpu, or a list such as cuda:0,cuda:1 or cpu:0,cpu:1.
            [default: VECTORMILL_WORKER_DEVICES, or auto]
    """
    from worker.launcher import run

    settings = begin_process("launcher", data_dir=data_dir)
    run(settings, models=tuple(model or ()), devices=devices)


@command(top, "vectormill flower --port 5555")
def flower(*, host: str | None = None, port: int | None = None, data_dir: Path | None = None) -> None:
    """Run Flower, which shows the workers and their tasks. It changes nothing.

    Args:
        host (HOST): The address to listen on. Any address but loopback needs VECTORMILL_FLOWER_BASIC_AUTH.
            [default: 127.0.0.1]
        port (PORT, 1 to 65535):  [default: 5555]
    """
    from vectormill.broker.flower import run
    from vectormill.cli.endpoint import find_service

    settings = find_service("redis_url", data_dir=data_dir, flower_host=host, flower_port=port)
    run(settings, settings.flower_host, settings.flower_port)


@command(
    top,
    "vectormill roles | psql -d vectormill",
    "ADMIN_URL=postgresql://postgres:…@db/vectormill vectormill roles --admin-env ADMIN_URL",
    note="Then VECTORMILL_DATABASE_URL is the URL of the service, VECTORMILL_OWNER_DATABASE_URL that of the owner, for "
    "`vectormill migrate`, and VECTORMILL_READER_DATABASE_URL that of the reader, for the API and the indexer. `up` "
    "does all this by itself.",
)
def roles(*, admin_env: str | None = None, own_database: bool = False) -> None:
    """Print the SQL that makes the roles of Postgres for Vectormill, or run it.

    A service needs no superuser: it owns the tables that it makes and writes rows of the others, and queries of sources
    are read by a role that sees only what is granted to it. Names and passwords are those of the three URLs, if they
    are set. A repetition changes nothing, and an installation with one role becomes one of three.

    Args:
        admin_env (VARIABLE): The environment variable with the URL of a superuser, by which the statements are run.
            They are printed if it is not given.
        own_database (FLAG): The database has nothing but Vectormill and the tables that it encodes: sources may read
            the tables in public that are there, and take no advisory locks.
    """
    from vectormill.db.roles import find_roles, run_as_admin, write_script
    from vectormill.settings import load_settings, read_variable

    found, passwords = find_roles(load_settings())
    if admin_env is None:
        typer.echo(write_script(found, is_own=own_database), nl=False)
        return
    run_as_admin(read_variable(admin_env), found, passwords, is_own=own_database)
    typer.echo(f"The roles {found.owner}, {found.service} and {found.reader} have what they need.")


@command(top, "VECTORMILL_DATABASE_URL=postgresql://… vectormill migrate")
def migrate(*, data_dir: Path | None = None) -> None:
    """Migrate the schema of the database to this version. `up` does this by itself."""
    from vectormill.cli.endpoint import find_database
    from vectormill.db.migrations import migrate as migrate_schema

    begin_process("migrate")
    with find_database(data_dir, is_migrated=False, has_data=True) as settings:
        migrate_schema(settings)
    typer.echo("The schema is up to date.")


def begin_process(name: str, **overrides: Any) -> "Settings":
    """Configure logging of this process to stderr, and return its settings with the servers that it needs.

    Raise ConfigurationError without one of them.
    """
    from vectormill.cli.endpoint import find_service
    from vectormill.processes.logs import begin_logging
    from vectormill.settings import find_collector, load_settings
    from vectormill.tracing import begin_tracing

    needed = NEEDED.get(name, ())
    settings = find_service(*needed, **overrides) if needed else load_settings(**overrides)
    for server in needed:
        settings.need(server)
    begin_logging(name, settings.log_level, settings.log_format)
    if name in TRACED:
        begin_tracing(name, find_collector(settings), settings.trace_ratio)
    return settings


@command(
    top,
    "vectormill backup vectormill.dump",
    "VECTORMILL_DATABASE_URL=postgresql://… vectormill backup /backups/$(date +%F).dump",
    note="Everything durable is in Postgres; only results in object storage and models are not in the file. "
    "It is a dump of pg_dump in its custom format.",
)
def backup(output: Path, *, data_dir: Path | None = None) -> None:
    """Write the whole database to a file, as of this moment, while all processes continue.

    The file appears whole or not at all.

    Args:
        output (FILE): The file to write, or - for stdout; an existing one is replaced once the new one is complete.
    """
    from vectormill.cli.endpoint import find_database
    from vectormill.db.backup import dump
    from vectormill.embedded.binaries import find_client

    began = time.monotonic()
    path = name_output(output)
    check_outputs([path])
    with find_database(data_dir, is_migrated=False, has_data=True) as settings:
        num_bytes = dump(find_client("pg_dump"), settings, path)
    tell(f"Wrote {num_bytes:,} bytes to {path} in {time.monotonic() - began:,.0f} s.")


@command(
    top,
    "vectormill restore vectormill.dump --data-dir ./restored",
    "VECTORMILL_DATABASE_URL=postgresql://…/new vectormill restore vectormill.dump",
    note="The database must be empty: for an embedded one, name a new directory. It is restored in one transaction, "
    "indexes are built again, and the schema is migrated to this release.",
)
def restore(input: Path, *, data_dir: Path | None = None) -> None:
    """Fill an empty database from a file of `vectormill backup`, all of it or nothing.

    Open jobs continue when the processes are started again. What was committed after the backup is encoded again.

    Args:
        input (FILE): The file that `vectormill backup` or pg_dump --format=custom wrote.
    """
    from vectormill.cli.endpoint import find_database
    from vectormill.db import backup as backups
    from vectormill.domain.errors import ConfigurationError
    from vectormill.embedded.binaries import find_client

    if not input.is_file():
        raise ConfigurationError(f"There is no file {input}.")
    began = time.monotonic()
    with find_database(data_dir, is_migrated=False) as settings:
        counts = backups.restore(find_client("pg_restore"), settings, input)
    told = ", ".join(f"{number:,} {name}" for name, number in counts.items())
    tell(f"Restored {told} in {time.monotonic() - began:,.0f} s.")
