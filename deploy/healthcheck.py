"""A container's health check: exit code 0 if its process is healthy, else 1 with a sentence.

    healthcheck.py http://127.0.0.1:8000/readyz    the address answers with success
    healthcheck.py scheduler                       a scheduler has sent a heartbeat lately
    healthcheck.py indexer                         an indexer has sent a heartbeat lately
    healthcheck.py worker                          a worker of this host has sent a heartbeat lately

Scheduler, indexer and workers listen on no port; their heartbeats are in Postgres.
"""

import socket
import sys
from urllib.error import URLError
from urllib.request import urlopen

from sqlalchemy.exc import SQLAlchemyError

from vectormill.db.session import make_engine
from vectormill.settings import load_settings
from vectormill.workers.workers import INDEXER, SCHEDULER, list_signs_of_life, list_workers


def find_complaint(subject: str) -> str | None:
    """Return a sentence that says why the process is unhealthy; None if it is healthy."""
    try:
        if subject not in (SCHEDULER, INDEXER, "worker"):
            urlopen(subject, timeout=4).close()  # noqa: S310 - the URL is one that docker-compose.yml names
            return None
        engine = make_engine(
            load_settings().database_url or "", application_name="vectormill healthcheck", pool_size=1
        )
        with engine.connect() as connection:
            if subject in (SCHEDULER, INDEXER):
                is_alive = subject in list_signs_of_life(connection)
            else:
                host = socket.gethostname()
                is_alive = any(worker.name.endswith(f"@{host}") for worker in list_workers(connection))
    except (URLError, SQLAlchemyError) as error:
        return f"Cannot check {subject}: {error}"
    return None if is_alive else f"No {subject} on this host has sent a heartbeat recently."


if __name__ == "__main__":
    sys.exit(find_complaint(sys.argv[1]))  # a sentence goes to stderr and means exit code 1
