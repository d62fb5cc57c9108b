"""The processes: api, scheduler, indexer, worker, flower, migrate, and `up`, which runs them all on one machine."""

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from vectormill.cli.options import DataDir

if TYPE_CHECKING:
    from vectormill.settings import Settings

app = typer.Typer()

# Workers begin in worker/app.py.
TRACED: Final = ("api", "indexer", "scheduler")

Host = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="HOST",
        help="The address to listen on. Requests from other machines need an API key (vectormill keys).",
        show_default="127.0.0.1",
    ),
]


@app.command(
    epilog="Example: vectormill up --data-dir ./data --api-port 8000\n\n"
    "The line `ready` names the URLs. Ctrl-C stops everything; the jobs go on at the next `up`."
)
def up(
    data_dir: DataDir = None,
    host: Host = None,
    api_port: Annotated[
        int | None, typer.Option("--api-port", metavar="PORT", min=1, max=65535, show_default="8000")
    ] = None,
    flower_port: Annotated[
        int | None, typer.Option("--flower-port", metavar="PORT", min=1, max=65535, show_default="5555")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", metavar="NAME", help="A model to serve. May be repeated.", show_default=False
        ),
    ] = None,
) -> None:
    """Run every process on this machine in the foreground, with a Postgres and a Valkey of its own.

    With VECTORMILL_DATABASE_URL or VECTORMILL_REDIS_URL set, those are used instead.
    """
    from vectormill.broker.flower import refuse_without_password
    from vectormill.cli.extras import require_service
    from vectormill.settings import process_environment

    settings = begin_process(
        "up", data_dir=data_dir, api_host=host, api_port=api_port, flower_port=flower_port
    )
    require_service(is_embedded=settings.database_url is None or settings.redis_url is None)

    from vectormill.up import UpOptions, run_up

    refuse_without_password(settings.flower_host, settings.flower_basic_auth)
    options = UpOptions(
        data_dir=settings.data_dir.expanduser(),
        api_host=settings.api_host,
        api_port=settings.api_port,
        flower_host=settings.flower_host,
        flower_port=settings.flower_port,
        database_url=settings.database_url,
        redis_url=settings.redis_url,
        models=tuple(model or ()),
        environ=process_environment(),
    )
    raise typer.Exit(run_up(options))


@app.command(epilog="Example: vectormill api --host 0.0.0.0 --port 8000")
def api(
    host: Host = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="PORT", min=1, max=65535, show_default="8000")
    ] = None,
) -> None:
    """Run the HTTP API. Needs Postgres, and works without Redis; its reference is at /docs."""
    from api.app import run

    run(begin_process("api", api_host=host, api_port=port))


@app.command(epilog="Example: vectormill scheduler")
def scheduler() -> None:
    """Run the scheduler: it dispatches chunks, recovers lost ones, and removes old data.

    Any number may run; a lock in Postgres elects one.
    """
    from scheduler.main import run

    run(begin_process("scheduler"))


@app.command(epilog="Example: vectormill indexer")
def indexer() -> None:
    """Run the indexer, which keeps collections in step with their sources. Needs only Postgres.

    Any number may run; each takes up to VECTORMILL_INDEXER_RUNS runs. Secrets of sources must be set for this process.
    """
    from indexer.main import run

    run(begin_process("indexer"))


@app.command(epilog="Example: vectormill worker --model all-MiniLM-L6-v2 --devices cuda:0,cuda:1")
def worker(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="A model to serve. May be repeated.",
            show_default="all registered",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="LIST",
            help="auto, cpu, or a list such as cuda:0,cuda:1 or cpu:0,cpu:1.",
            show_default="VECTORMILL_WORKER_DEVICES, or auto",
        ),
    ] = None,
) -> None:
    """Run workers: one pinned Celery worker per replica of the placement, restarted when it dies."""
    from worker.launcher import run

    run(begin_process("launcher"), models=tuple(model or ()), devices=devices)


@app.command(epilog="Example: vectormill flower --port 5555")
def flower(
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            metavar="HOST",
            help="The address to listen on. Any but the loopback needs VECTORMILL_FLOWER_BASIC_AUTH.",
            show_default="127.0.0.1",
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="PORT", min=1, max=65535, show_default="5555")
    ] = None,
) -> None:
    """Run Flower, which shows the workers and their tasks. It changes nothing."""
    from vectormill.broker.flower import run
    from vectormill.cli.extras import require_package
    from vectormill.settings import load_settings

    require_package("flower", "flower")
    settings = load_settings(flower_host=host, flower_port=port)
    run(settings, settings.flower_host, settings.flower_port)


@app.command(epilog="Example: VECTORMILL_DATABASE_URL=postgresql://… vectormill migrate")
def migrate() -> None:
    """Migrate the schema of VECTORMILL_DATABASE_URL to this version. `up` does this by itself."""
    from vectormill.db.migrations import upgrade
    from vectormill.domain.errors import ConfigurationError

    settings = begin_process("migrate")
    if settings.database_url is None:
        raise ConfigurationError(
            "There is no database to migrate: set VECTORMILL_DATABASE_URL. The embedded one is migrated by `up`."
        )
    upgrade(settings.database_url)
    typer.echo("The schema is up to date.")


def begin_process(name: str, **overrides: Any) -> "Settings":
    """Return the settings of this process, whose log lines go to stderr from now on. Raise ConfigurationError."""
    from vectormill.processes.logs import begin_logging
    from vectormill.settings import find_collector, load_settings
    from vectormill.tracing import begin_tracing

    settings = load_settings(**overrides)
    begin_logging(name, settings.log_level, settings.log_format)
    if name in TRACED:
        begin_tracing(name, find_collector(settings), settings.trace_ratio)
    return settings
