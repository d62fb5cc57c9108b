"""Start Flower in read-only mode: it shows workers and tasks and can change nothing."""

import os

from vectormill.addresses import is_loopback_host
from vectormill.domain.errors import ConfigurationError
from vectormill.processes.logs import JSON, begin_logging
from vectormill.settings import Settings

# By default Flower keeps 100,000 tasks and every worker that ever existed (flower #1305, #1492).
_BOUNDS = ("--max-tasks=20000", "--max-workers=500", "--purge-offline-workers=3600", "--inspect-timeout=3000")
_COLUMNS = "name,uuid,state,kwargs,result,received,started,runtime,worker"
_BUCKETS = "0.05,0.1,0.25,0.5,1,2,5,10,20,40,80,160,inf"


def refuse_without_password(host: str, basic_auth: str | None) -> None:
    """Raise ConfigurationError for a public address without a password.

    Flower shows the names of workers and jobs to everyone who reaches it.
    """
    if basic_auth is None and not is_loopback_host(host):
        raise ConfigurationError(
            f"Flower does not listen on {host} without a password: set VECTORMILL_FLOWER_BASIC_AUTH to "
            "user:password, or use a loopback address."
        )


def run(settings: Settings, host: str, port: int) -> None:
    """Run Flower in this process until SIGTERM or SIGINT."""
    refuse_without_password(host, settings.flower_basic_auth)
    redis_url = settings.need("redis_url")
    # Imported here, because `up` checks the password without Celery.
    from celery.bin.base import CLIContext
    from celery.bin.celery import celery
    from click import Context
    from flower.command import flower

    from vectormill.broker.app import make_app

    if settings.log_format == JSON:  # Flower adds no log handler if there is one; its own is plain text
        begin_logging("flower", settings.log_level, JSON)
    arguments = [
        f"--conf={os.devnull}",  # by default it runs flowerconfig.py of the current folder
        f"--address={host}",
        f"--port={port}",
        "--read-only=True",
        f"--tasks-columns={_COLUMNS}",
        f"--task-runtime-metric-buckets={_BUCKETS}",
        *_BOUNDS,
    ]
    if settings.flower_basic_auth:
        arguments.append(f"--basic-auth={settings.flower_basic_auth}")
    # Celery's own command line would import the app by its name, from the current folder first, and would take another
    # app from the variable APP.
    flower.main(arguments, parent=Context(celery, obj=CLIContext(make_app(redis_url), True, None)))
