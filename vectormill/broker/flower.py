"""Start Flower in read-only mode: it shows workers and tasks and can change nothing."""

import os
import sys

from vectormill.addresses import is_loopback_host
from vectormill.domain.errors import ConfigurationError
from vectormill.settings import Settings, process_environment

# By default Flower keeps 100,000 tasks and every worker that ever existed (flower #1305, #1492).
_BOUNDS = ("--max-tasks=20000", "--max-workers=500", "--purge-offline-workers=3600", "--inspect-timeout=3000")
_COLUMNS = "name,uuid,state,kwargs,result,received,started,runtime,worker"
_BUCKETS = "0.05,0.1,0.25,0.5,1,2,5,10,20,40,80,160,inf"


def flower_command(host: str, port: int) -> list[str]:
    """Return the arguments of `celery` that start Flower.

    Celery's own arguments come before the word flower, Flower's after it.
    """
    return [
        "-A",
        "vectormill.broker.flower_app",
        "flower",
        f"--address={host}",
        f"--port={port}",
        "--read-only=True",
        f"--tasks-columns={_COLUMNS}",
        f"--task-runtime-metric-buckets={_BUCKETS}",
        *_BOUNDS,
    ]


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
    """Replace this process by Flower; does not return."""
    refuse_without_password(host, settings.flower_basic_auth)
    settings.need("redis_url")
    environment = process_environment(settings)
    if settings.flower_basic_auth:
        environment["FLOWER_BASIC_AUTH"] = (
            settings.flower_basic_auth
        )  # not an argument, because `ps` shows arguments
    argv = [sys.executable, "-m", "celery", *flower_command(host, port)]
    os.execve(sys.executable, argv, environment)
