"""A container's health check: exit code 0 if its process is healthy, else 1 with a sentence.

    healthcheck.py http://127.0.0.1:8000/readyz    the address answers with success
    healthcheck.py scheduler                       a scheduler has sent a heartbeat lately
    healthcheck.py indexer                         an indexer has sent a heartbeat lately
    healthcheck.py worker                          a worker of this host has sent a heartbeat lately

Scheduler, indexer and workers listen on no port; their heartbeats are in Postgres. An address is checked every few
seconds, so that needs only the standard library.
"""

import socket
import sys
from urllib.error import URLError
from urllib.request import urlopen


def find_complaint(subject: str) -> str | None:
    """Return a sentence that says why the process is unhealthy; None if it is healthy."""
    if "://" not in subject:
        return find_missing_heartbeat(subject)
    try:
        urlopen(subject, timeout=4).close()  # noqa: S310 - the URL is one that docker-compose.yml names
    except URLError as error:
        return f"Cannot check {subject}: {error}"
    return None


def find_missing_heartbeat(process: str) -> str | None:
    """Return a sentence if this kind of process, or a worker of this host, has sent no heartbeat lately."""
    from sqlalchemy.exc import SQLAlchemyError

    from vectormill.db.session import make_engine
    from vectormill.settings import load_settings
    from vectormill.workers.workers import list_signs_of_life, list_workers

    try:
        engine = make_engine(
            load_settings().database_url or "", application_name="vectormill healthcheck", pool_size=1
        )
        with engine.connect() as connection:
            if process == "worker":
                host = socket.gethostname()
                is_alive = any(worker.name.endswith(f"@{host}") for worker in list_workers(connection))
            else:
                is_alive = process in list_signs_of_life(connection)
    except SQLAlchemyError as error:
        return f"Cannot check {process}: {error}"
    return None if is_alive else f"No {process} on this host has sent a heartbeat recently."


if __name__ == "__main__":
    sys.exit(find_complaint(sys.argv[1]))  # a sentence goes to stderr and means exit code 1
