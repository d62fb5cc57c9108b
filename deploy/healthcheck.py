"""Answers a container's health check: exit code 0 when the process beside it is well, 1 with a sentence when not.

    healthcheck.py http://127.0.0.1:8000/readyz    the address answers with success
    healthcheck.py scheduler                       a scheduler has done each of its duties lately
    healthcheck.py worker                          every worker of this host has reported lately, and there is one

The scheduler and the workers listen on no port; what they report stands in Postgres. Knows nothing of containers.
"""

import socket
import sys
from urllib.error import URLError
from urllib.request import urlopen

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from vectormill.db.session import make_engine
from vectormill.settings import load_settings

# Far above every interval at which something reports, below the patience of a person.
MAX_SILENCE_SECONDS = 60

# Silence of whoever spoke last longest ago; NULL when nobody ever spoke.
SILENCE = {
    "scheduler": "SELECT extract(epoch FROM now() - min(beat_at)) FROM vectormill.heartbeats",
    "worker": """
        SELECT extract(epoch FROM now() - min(heartbeat_at)) FROM vectormill.workers
        WHERE split_part(name, '@', 2) = :host
    """,
}


def find_complaint(subject: str) -> str | None:
    """What is wrong with the process, as a sentence; None when it is well."""
    try:
        if subject not in SILENCE:
            urlopen(subject, timeout=4).close()  # noqa: S310 - the URL is one that docker-compose.yml names
            return None
        settings = load_settings()
        engine = make_engine(
            settings.database_url or "", application_name="vectormill-healthcheck", pool_size=1
        )
        with engine.connect() as connection:
            silence = connection.execute(text(SILENCE[subject]), {"host": socket.gethostname()}).scalar()
    except (URLError, SQLAlchemyError) as error:
        return f"{subject} cannot be checked: {error}"
    if silence is None:
        return f"No {subject} of this host has ever reported."
    return f"A {subject} has been silent for {silence:.0f} s." if silence > MAX_SILENCE_SECONDS else None


if __name__ == "__main__":
    sys.exit(find_complaint(sys.argv[1]))  # a sentence goes to stderr and means exit code 1
